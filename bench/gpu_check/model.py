"""The measured model: the widest of Qwen3's shapes that suits the card, with random weights."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from bench.gpu_check.machine import Machine
from bench.models import save_tokenizer
from workers.model.attention.interface import ATTENTION_NAME, register_attention

_WEIGHT_SHARE = 0.3  # of the free memory at most: many streams' KV takes more than the weights
_USED_SHARE = 0.85  # of the free memory, by weights and the KV of the most streams


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


def shape_for(free_bytes: int, itemsize: int = 2) -> Shape:
    """Returns the largest shape whose weights take no more than their share, else the smallest."""
    fit = [s for s in SHAPES if s.num_weights() * itemsize <= _WEIGHT_SHARE * free_bytes]
    return fit[-1] if fit else SHAPES[0]


def output_tokens(shape: Shape, free_bytes: int, num_streams: int, num_in: int) -> int:
    """Returns the output tokens of each stream, 256 to 1024, with which the KV of all streams
    fits."""
    left = _USED_SHARE * free_bytes - 2 * shape.num_weights()
    num_tokens = int(left / (num_streams * 2 * shape.num_kv())) - num_in
    return max(256, min(1024, num_tokens // 128 * 128))


def random_decoder(config: Qwen3Config, machine: Machine, attention: str = ATTENTION_NAME) -> Any:
    """Creates a PreTrainedModel on the device, the same at each call. Matrices are scaled so that
    activations keep their size through the layers, and logits have a deviation of 1."""
    register_attention()
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    with torch.device(machine.device):
        decoder = auto.from_config(config, dtype=machine.dtype, attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=1.0 if "embed" in name else parameter.shape[1] ** -0.5)
    return decoder.eval().requires_grad_(False)


def save_model(shape: Shape, machine: Machine, folder: Path) -> None:
    """Writes a checkpoint in safetensors with a tokenizer of bytes."""
    random_decoder(shape.config(), machine).save_pretrained(folder, max_shard_size="4GB")
    save_tokenizer(folder, shape.vocab_size)
