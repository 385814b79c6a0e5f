"""Tiny decoders with random weights, made on the spot and saved as a checkpoint would be.

Lively on purpose: their greedy outputs vary, so that a wrong position, mask or neighbour shows.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PretrainedConfig, PreTrainedTokenizerFast

VOCAB_SIZE = 320
EOS_ID = 1
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
WINDOW = 12  # tokens; shorter than most prompts of the tests

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": EOS_ID,
    "pad_token_id": 2,
    # Tied, a random model mostly says its last token again.
    "tie_word_embeddings": False,
}
_GPT2_NAMES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "bos_token_id": 0,
    "eos_token_id": EOS_ID,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MIXED_LAYERS = ["sliding_attention", "full_attention"]


def _common(*without: str, **changes: Any) -> dict[str, Any]:
    return {k: v for k, v in (_COMMON | changes).items() if k not in without}


# family → configuration class and its arguments
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _common()),
    "qwen2": ("Qwen2Config", _common()),
    "qwen3": ("Qwen3Config", _common(head_dim=32)),
    "mistral": ("MistralConfig", _common(sliding_window=WINDOW)),
    "gpt2": ("GPT2Config", _GPT2_NAMES),
    "gpt_neox": ("GPTNeoXConfig", _common("num_key_value_heads")),
    "gemma": ("GemmaConfig", _common(head_dim=16)),
    "gemma2": (
        "Gemma2Config",
        _common(
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=_MIXED_LAYERS,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=20.0,
        ),
    ),
    "gemma3": (
        "Gemma3TextConfig",
        _common(head_dim=16, sliding_window=WINDOW, layer_types=_MIXED_LAYERS),
    ),
    "phi": ("PhiConfig", _common("num_key_value_heads")),
    "phi3": ("Phi3Config", _common(sliding_window=WINDOW)),
    "olmo2": ("Olmo2Config", _common()),
    "olmo3": ("Olmo3Config", _common(sliding_window=WINDOW, layer_types=_MIXED_LAYERS)),
    "cohere": ("CohereConfig", _common()),
    "cohere2": ("Cohere2Config", _common(sliding_window=WINDOW, layer_types=_MIXED_LAYERS)),
    "granite": ("GraniteConfig", _common(attention_multiplier=0.2, logits_scaling=2.0)),
    "stablelm": ("StableLmConfig", _common()),
    "nemotron": ("NemotronConfig", _common()),
    "opt": (
        "OPTConfig",
        _common("intermediate_size", "num_key_value_heads", ffn_dim=96, word_embed_proj_dim=64),
    ),
    "mixtral": ("MixtralConfig", _common(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": ("Qwen3MoeConfig", _common(num_experts=4, head_dim=16, **_MOE)),
    "gpt_oss": (
        "GptOssConfig",
        _common(
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            layer_types=_MIXED_LAYERS,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
    ),
    "smollm3": ("SmolLM3Config", _common()),
    "starcoder2": ("Starcoder2Config", _common(sliding_window=WINDOW)),
    "gpt_bigcode": ("GPTBigCodeConfig", _GPT2_NAMES),
    "deepseek_v3": (
        "DeepseekV3Config",
        _common(
            num_key_value_heads=4,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=12,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            **_MOE,
        ),
    ),
    # Refused: these keep their attention to themselves, or have layers that do not attend.
    "gptj": ("GPTJConfig", _GPT2_NAMES | {"rotary_dim": 8}),
    "gpt_neo": (
        "GPTNeoConfig",
        _common(
            "num_key_value_heads",
            "num_hidden_layers",
            "num_attention_heads",
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
        ),
    ),
    "falcon": ("FalconConfig", _common("intermediate_size", "num_key_value_heads")),
    "bloom": ("BloomConfig", _common("intermediate_size", "num_key_value_heads")),
    "mpt": (
        "MptConfig",
        {"vocab_size": VOCAB_SIZE, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 512},
    ),
    "mamba": (
        "MambaConfig",
        _common("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    ),
}


def make_config(family: str, **changes: Any) -> PretrainedConfig:
    """The configuration of a tiny model of a family."""
    class_name, arguments = FAMILIES[family]
    config_class: Callable[..., PretrainedConfig] = getattr(transformers, class_name)
    return config_class(**(arguments | changes))


def make_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny random model (a PreTrainedModel) whose greedy outputs vary."""
    torch.manual_seed(seed)
    auto_class: Any = transformers.AutoModelForCausalLM
    model = auto_class.from_config(make_config(family, **changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _enliven(name, parameter, generator)
    return model.eval()


def _enliven(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Matrices large enough that what a token attends to decides what comes next."""
    noise = torch.randn(parameter.shape, generator=generator)
    if "norm" in name or "ln_" in name:
        parameter.add_(noise, alpha=0.1)
    elif parameter.ndim < 2:
        parameter.copy_(noise * 0.2)
    elif any(part in name for part in ("embed", "wte", "wpe", "lm_head", "embed_out")):
        parameter.copy_(noise)
    else:
        parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)


@cache
def _tokenizer_json() -> str:
    """Bytes as tokens, behind the special tokens 0 … 3."""
    special = {"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = special | {char: 4 + i for i, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text: str = tokenizer.to_str()
    return text


def save_tokenizer(folder: Path) -> None:
    """Writes a byte tokenizer with a chat template."""
    tokenizer_class: Any = PreTrainedTokenizerFast
    tokenizer = tokenizer_class(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json()),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def save_tiny_model(family: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Writes a tiny model with its tokenizer; returns the folder."""
    make_model(family, seed, **changes).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def edit_json(file: Path, **changes: Any) -> None:
    """Sets keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
