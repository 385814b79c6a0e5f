"""A decoder on its device, and what the choice of a runner depends on."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PretrainedConfig

from workers.engine.model import ModelRefused
from workers.ipc.messages import EngineOptions
from workers.model.int8_weights import quantize
from workers.model.memory import default_kv_bytes
from workers.model.processor import Processor

DEFAULT_BLOCK_SIZE = 16


@dataclass(slots=True)
class Loaded:
    """`read` gives the decoder, each time the same; max_model_len: the operator's limit, or the
    model's own.
    """

    read: Callable[[], nn.Module]
    config: PretrainedConfig
    device: torch.device
    dtype: torch.dtype
    options: EngineOptions
    max_model_len: int
    eos_token_ids: frozenset[int]
    processor: Processor | None = None  # the one at hand, unless a test narrows it
    decoder: nn.Module = field(default_factory=nn.Module)

    def renew(self, progress: Callable[[str], None]) -> None:
        """Reads the decoder, rounded where that is asked for. One that is there already is let go
        first: memory need not hold both. Raises ModelRefused.
        """
        self.decoder = nn.Module()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.decoder = self.read()
        if self.options.quantization == "int8":
            progress(quantize(self.decoder))

    @property
    def block_size(self) -> int:
        return self.options.block_size or DEFAULT_BLOCK_SIZE

    @property
    def kv_bytes(self) -> int:
        num_bytes = self.options.kv_memory_bytes
        return default_kv_bytes(self.device) if num_bytes is None else num_bytes

    @property
    def most_blocks(self) -> int:
        """What all sequences together could ever fill."""
        return self.options.max_num_seqs * -(-self.max_model_len // self.block_size)

    def longest(self, num_blocks: int) -> int:
        """Tokens that one sequence can have at most, alone in the cache. Raises ModelRefused."""
        num_kv_tokens = num_blocks * self.block_size
        if self.options.max_model_len is not None and self.max_model_len > num_kv_tokens:
            raise ModelRefused(
                f"the KV cache holds {num_kv_tokens} tokens, less than "
                f"max_model_len {self.options.max_model_len}"
            )
        return min(self.max_model_len, num_kv_tokens)
