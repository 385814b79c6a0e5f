"""Tiny random models for vectors, saved as sentence-transformers or transformers saves them.

Both are imported where a model is made: a soak of whole processes needs its names only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors

WINDOW = 8  # tokens to each side, or in all, as the family counts
_SPECIAL = ("<pad>", "[CLS]", "[SEP]", "<unk>")
_COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DECODER = _COMMON | {"num_key_value_heads": 2, "head_dim": 16}

# family → configuration class and its arguments
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", _COMMON),
    "roberta": ("RobertaConfig", _COMMON | {"type_vocab_size": 1}),
    "xlm_roberta": ("XLMRobertaConfig", _COMMON | {"type_vocab_size": 1, "pad_token_id": 1}),
    "distilbert": (
        "DistilBertConfig",
        {
            "vocab_size": 320,
            "dim": 32,
            "hidden_dim": 48,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 512,
            "pad_token_id": 0,
        },
    ),
    "mpnet": ("MPNetConfig", _COMMON | {"pad_token_id": 1}),
    "modernbert": (
        "ModernBertConfig",
        _COMMON | {"local_attention": WINDOW, "global_attn_every_n_layers": 2},
    ),
    "electra": ("ElectraConfig", _COMMON | {"embedding_size": 32}),
    "albert": ("AlbertConfig", _COMMON | {"embedding_size": 32}),
    "gemma3_embedding": (
        "Gemma3TextConfig",
        _DECODER
        | {
            "use_bidirectional_attention": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3": ("Qwen3Config", _DECODER),
    "deberta_v2": (
        "DebertaV2Config",
        _COMMON | {"relative_attention": True, "pos_att_type": ["c2p"]},
    ),
}
# Qwen3-Reranker's template, shortened.
PAIR_TEMPLATE = (
    "<|im_start|>{% for m in messages if m['role'] == 'system' %}<Instruct>: {{ m['content'] }}\n"
    "{% endfor %}<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute="
    "'content') | first }}\n<Document>: {{ messages | selectattr('role', 'eq', 'document') | "
    "map(attribute='content') | first }}<|im_end|>"
)


def bi_encoder(folder: Path) -> Any:
    """What sentence-transformers makes of this folder."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def cross_encoder(folder: Path, **options: Any) -> Any:
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(folder), device="cpu", **options)


def save_tokenizer(
    folder: Path,
    chat_template: str | None = None,
    *,
    pad_id: int = 0,
    has_types: bool = False,
) -> None:
    """Bytes as tokens, behind four special tokens; [CLS] … [SEP] around texts and pairs.
    `has_types`: the two texts of a pair differ in their types, as BERT's do."""
    from transformers import PreTrainedTokenizerFast

    names = list(_SPECIAL)
    names.insert(pad_id, names.pop(0))
    special = {name: index for index, name in enumerate(names)}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = special | {char: 4 + i for i, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, special[name]) for name in ("[CLS]", "[SEP]")],
    )
    # As many tokenizers on the Hub have it; gateways must see whole texts all the same.
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16, pad_id=pad_id, pad_token="<pad>")
    tokenizer_class: Any = PreTrainedTokenizerFast
    fast = tokenizer_class(
        tokenizer_object=tokenizer,
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=400,
        model_input_names=["input_ids", *["token_type_ids"] * has_types, "attention_mask"],
    )
    fast.chat_template = chat_template
    fast.save_pretrained(folder)


def make_config(family: str, **changes: Any) -> Any:
    import transformers

    class_name, arguments = ENCODERS[family]
    return getattr(transformers, class_name)(**(arguments | changes))


def save_base(family: str, folder: Path, auto_class: Any, seed: int = 0, **changes: Any) -> Path:
    """A transformers folder with a random model of that auto class, and a tokenizer."""
    import torch

    torch.manual_seed(seed)
    config = make_config(family, **changes)
    model = auto_class.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # So large that attention, and with it every neighbour, decides the result.
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape) * 1.5 * parameter.shape[-1] ** -0.5)
            elif "norm" not in name.lower():
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)
    pad_id = config.pad_token_id
    has_types = family in ("bert", "electra", "albert", "deberta_v2")
    save_tokenizer(folder, pad_id=0 if pad_id is None else pad_id, has_types=has_types)
    return folder


def save_embedder(
    family: str,
    folder: Path,
    *,
    mode: str | Sequence[str] = "mean",
    num_dense: int = 0,
    is_normalized: bool = True,
    prompts: dict[str, str] | None = None,
    default_prompt: str | None = None,
    **changes: Any,
) -> Path:
    """A folder that SentenceTransformer has saved. `changes`: of the configuration."""
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import (
        Dense,
        Normalize,
        Pooling,
        Transformer,
    )

    base = save_base(family, folder / "base", transformers.AutoModel, **changes)
    modules: list[Any] = [Transformer(str(base))]
    modules.append(Pooling(32, pooling_mode=mode if isinstance(mode, str) else tuple(mode)))
    torch.manual_seed(1)
    size = modules[-1].get_embedding_dimension()
    for _ in range(num_dense):
        modules.append(Dense(size, 24))
        size = 24
    if is_normalized:
        modules.append(Normalize())
    saved = SentenceTransformer(
        modules=modules, prompts=prompts, default_prompt_name=default_prompt, device="cpu"
    )
    saved.save(str(folder / "saved"), create_model_card=False)
    return folder / "saved"


def save_classifier(family: str, folder: Path, num_labels: int, **changes: Any) -> Path:
    """A plain `*ForSequenceClassification` folder."""
    import transformers

    auto_class = transformers.AutoModelForSequenceClassification
    return save_base(family, folder, auto_class, num_labels=num_labels, **changes)


def save_reranker(folder: Path, false_id: int | None = 50, **changes: Any) -> Path:
    """As Qwen3-Reranker: a decoder, the log-odds of two tokens, and a template for pairs."""
    import transformers
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.modules import LogitScore
    from sentence_transformers.sentence_transformer.modules import Transformer

    base = save_base("qwen3", folder / "base", transformers.AutoModelForCausalLM, **changes)
    save_tokenizer(base, PAIR_TEMPLATE)
    modules = [Transformer(str(base), transformer_task="text-generation"), LogitScore(40, false_id)]
    CrossEncoder(
        modules=modules,
        prompts={"web": "Given a web search query, find passages"},
        default_prompt_name="web",
        device="cpu",
    ).save(str(folder / "saved"), create_model_card=False)
    return folder / "saved"
