"""Models for measurements, as checkpoints: small random Llamas, random Qwen3 in real sizes, and R,
which is SmolLM2-135M-Instruct with its published weights."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from bench.questions import PROMPTS, QUESTIONS
from infra.measure.workloads import Workload, WorkloadRequest
from workers.model.gguf_cache import smollm2_folder

# About 5 M and 124 M parameters; embeddings are not tied.
SIZES: Mapping[str, Mapping[str, int]] = {
    "S": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 768,
        "vocab_size": 4096,
    },
    "M": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2048,
        "vocab_size": 32000,
    },
}
R = "R"
CONTEXT_LENGTH = 8448  # 8,192 tokens of context and some to generate
_SPECIAL = ("<s>", "</s>", "<pad>", "<unk>")


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of a model. Embeddings are not tied: with random weights a tied model repeats its
    input, and a token that is lost or repeated would not show."""

    name: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int = 151_936
    max_position_embeddings: int = 40_960

    def config(self, **changed: int) -> Qwen3Config:
        numbers = asdict(self) | changed
        del numbers["name"]
        return Qwen3Config(**numbers, tie_word_embeddings=False)

    def num_weights(self) -> int:
        """The parameters, without the small ones of the norms."""
        heads = 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        return self.num_hidden_layers * layer + 2 * self.vocab_size * self.hidden_size

    def num_kv(self) -> int:
        """Elements of the KV cache for each token."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim


TINY = Shape("tiny Qwen3", 2, 64, 2, 1, 32, 96, 300, 4096)
SHAPES = (
    Shape("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072),
    Shape("Qwen3-1.7B", 28, 2048, 16, 8, 128, 6144),
    Shape("Qwen3-4B", 36, 2560, 32, 8, 128, 9728),
    Shape("Qwen3-8B", 36, 4096, 32, 8, 128, 12_288),
    Shape("Qwen3-14B", 40, 5120, 40, 8, 128, 17_408),
)


def make_model(size: str, folder: Path, *, seed: int = 0) -> Path:
    """Writes a model of this size with a byte tokenizer; returns the folder. For R it links to the
    folder that `--model smollm2` serves.

    The matrices are large enough that attention decides the next token, so that a wrong position or
    neighbour changes the greedy tokens.
    """
    if size == R:
        folder.symlink_to(smollm2_folder())
        return folder
    torch.manual_seed(seed)
    arguments: dict[str, Any] = dict(SIZES[size])
    config = LlamaConfig(
        **arguments,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                scale = 1.0 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5
                parameter.normal_(std=scale)
    model.save_pretrained(folder)
    save_tokenizer(folder, config.vocab_size)
    return folder


def chat_ids(folder: Path, texts: Iterable[str]) -> list[tuple[int, ...]]:
    """The prompt of a chat for each text, by the model's template."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": text}] for text in texts]
    rendered = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    return [tuple(one["input_ids"]) for one in rendered]


def chat_workload(folder: Path, num_chats: int, max_tokens: int) -> Workload:
    """Chats that come at once: those that are answered at length before those that ask for a
    fact."""
    texts = [*PROMPTS[len(QUESTIONS) :], *PROMPTS[: len(QUESTIONS)]][:num_chats]
    chats = chat_ids(folder, texts)
    return Workload(tuple(WorkloadRequest(ids, max_tokens) for ids in chats))


def save_tokenizer(folder: Path, vocab_size: int, *, has_pairs: bool = False) -> None:
    """Saves a tokenizer of bytes as tokens after the special ones; other ids get unique names. With
    pairs, special tokens are put around each text, as in encoders."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*_SPECIAL, *alphabet]
    words += [f"<{i}>" for i in range(len(words), vocab_size)]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if has_pairs:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> $B:1 </s>:1",
            special_tokens=[("<s>", 0), ("</s>", 1)],
        )
    tokenizer_class: Any = PreTrainedTokenizerFast
    saved = tokenizer_class(
        tokenizer_object=tokenizer,
        **dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), _SPECIAL, strict=True)),
    )
    saved.save_pretrained(folder)


def random_decoder(config: Qwen3Config, device: torch.device, dtype: torch.dtype) -> Any:
    """Creates a PreTrainedModel on the device, the same at each call. Matrices are scaled so that
    activations keep their size through the layers, and logits have a deviation of 1."""
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    with device:
        decoder = auto.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=1.0 if "embed" in name else parameter.shape[1] ** -0.5)
    return decoder.eval().requires_grad_(False)


def save_model(shape: Shape, device: torch.device, dtype: torch.dtype, folder: Path) -> None:
    """Writes a checkpoint in safetensors with a tokenizer of bytes."""
    random_decoder(shape.config(), device, dtype).save_pretrained(folder, max_shard_size="4GB")
    save_tokenizer(folder, shape.vocab_size)


_MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers


def save_embedder(shape: Shape, device: torch.device, dtype: torch.dtype, folder: Path) -> None:
    """Writes a model of embeddings, as sentence-transformers saves one: the decoder without its
    head, whose last token's state is the vector."""
    random_decoder(shape.config(), device, dtype).model.save_pretrained(folder)
    save_tokenizer(folder, shape.vocab_size)
    modules = [
        {
            "idx": number,
            "name": f"{number}",
            "path": f"{number}_{name}" if number else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for number, name in enumerate(_MODULES)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    pooling = {"word_embedding_dimension": shape.hidden_size, "pooling_mode_lasttoken": True}
    pooling["pooling_mode_mean_tokens"] = False
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
