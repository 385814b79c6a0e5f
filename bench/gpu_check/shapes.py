"""The measured model shapes, and decoders of them with random weights."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from workers.model.attention.interface import ATTENTION_NAME, register_attention


@dataclass(frozen=True, slots=True)
class Shape:
    """A transformers configuration class with one model's numbers."""

    name: str
    config_class: type[PretrainedConfig]
    numbers: dict[str, Any]

    def config(self) -> PretrainedConfig:
        return self.config_class(**self.numbers)

    @property
    def vocab_size(self) -> int:
        return int(self.numbers["vocab_size"])

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        config: Any = self.config()
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads: int = config.num_hidden_layers * config.num_key_value_heads
        return 2 * heads * int(dim) * dtype.itemsize


QWEN3_8B = Shape(
    "Qwen3-8B",
    Qwen3Config,
    {
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12_288,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
    },
)
LLAMA2_7B = Shape(
    "Llama-2-7B",
    LlamaConfig,
    {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 11_008,
        "vocab_size": 32_000,
        "max_position_embeddings": 4096,
    },
)
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}
TINY_QWEN3 = Shape("tiny Qwen3", Qwen3Config, TINY)


def random_decoder(
    shape: Shape, dtype: torch.dtype, device: torch.device, attention: str = ATTENTION_NAME
) -> Any:
    """A PreTrainedModel created on the device. Matrices are scaled so that activations keep their
    size through the layers."""
    register_attention()
    torch.manual_seed(0)
    auto_class: Any = AutoModelForCausalLM
    with torch.device(device):
        decoder = auto_class.from_config(shape.config(), dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=1.0 if "embed" in name else parameter.shape[1] ** -0.5)
    return decoder.eval().requires_grad_(False)


def weight_bytes(decoder: Any) -> int:
    """Bytes that a decoding step must read: everything but the input embedding."""
    embedding = decoder.get_input_embeddings().weight
    is_tied = decoder.get_output_embeddings().weight is embedding
    num_bytes: int = sum(p.nbytes for p in decoder.parameters())
    return num_bytes if is_tied else num_bytes - int(embedding.nbytes)
