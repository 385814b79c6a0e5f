"""A decoder on its device, with what the choice of a runner depends on."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PretrainedConfig

from workers.engine.interface import ModelRefused
from workers.ipc.messages import EngineOptions
from workers.model.matmul_choice import Processor
from workers.model.memory import (
    LEAST_KV_TOKENS,
    Card,
    card_of,
    default_kv_bytes,
    kv_bytes_in_share,
)
from workers.model.quantization import num_weight_bytes, quantize

DEFAULT_BLOCK_SIZE = 16


@dataclass(slots=True)
class Loaded:
    """A decoder and the operator's options. `read` loads it, always the same one; max_model_len is
    the operator's or the model's."""

    read: Callable[[], nn.Module]
    config: PretrainedConfig
    device: torch.device
    dtype: torch.dtype
    options: EngineOptions
    max_model_len: int
    eos_token_ids: frozenset[int]
    processor: Processor | None = None  # the current one, unless a test narrows it
    decoder: nn.Module = field(default_factory=nn.Module)

    def renew(self, progress: Callable[[str], None]) -> None:
        """Reloads the decoder, quantized if requested. Frees the old one first, to save memory.
        Raises ModelRefused."""
        self.decoder = nn.Module()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.decoder = self.read()
        if self.options.quantization != "none":
            progress(quantize(self.decoder))

    @property
    def block_size(self) -> int:
        return self.options.block_size or DEFAULT_BLOCK_SIZE

    @property
    def measured(self) -> Card | None:
        """The card whose memory the largest step shares with the KV cache. None for a CPU, or if
        the operator gives the cache's size."""
        return card_of(self.device) if self.options.kv_memory_bytes is None else None

    def kv_bytes(
        self, token_bytes: int, fixed_bytes: int = 0, step_bytes: int | None = None
    ) -> int:
        """Returns bytes for the KV cache, at `token_bytes` for each token and `fixed_bytes` at
        least; `step_bytes`: memory of the largest step, if known. Raises ModelRefused if they do
        not fit into the worker's share of the memory."""
        num_bytes, share = self.options.kv_memory_bytes, self.options.memory_share
        if share is None:
            return default_kv_bytes(self.device, step_bytes) if num_bytes is None else num_bytes
        num_tokens = self.options.max_model_len or min(self.max_model_len, LEAST_KV_TOKENS)
        num_blocks = -(-num_tokens // self.block_size)
        return kv_bytes_in_share(
            share,
            self.device,
            weight_bytes=num_weight_bytes(self.decoder, self.device.type),
            least_bytes=num_blocks * self.block_size * token_bytes + fixed_bytes,
            wanted_bytes=num_bytes,
            step_bytes=step_bytes,
        )

    @property
    def most_blocks(self) -> int:
        """The number of blocks that all sequences together could fill."""
        return self.options.num_places * -(-self.max_model_len // self.block_size)

    def longest(self, num_blocks: int) -> int:
        """The longest sequence that fits the cache alone, in tokens. Raises ModelRefused."""
        num_kv_tokens = num_blocks * self.block_size
        if self.options.max_model_len is not None and self.max_model_len > num_kv_tokens:
            raise ModelRefused(
                f"the KV cache holds {num_kv_tokens} tokens, less than "
                f"max_model_len {self.options.max_model_len}"
            )
        return min(self.max_model_len, num_kv_tokens)
