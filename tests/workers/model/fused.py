"""Tiny decoders whose modules are exchanged, without a loader."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.tiny_models import make_config, make_model
from workers.model.attention.interface import ATTENTION_NAME, register_attention
from workers.model.backend import choose_backend
from workers.model.fusion.exchange import Exchange, Exchanged
from workers.model.kv_cache import KVCache
from workers.model.matmul_choice import Processor
from workers.model.probe import probe_layers
from workers.model.proof import Untouched, record
from workers.model.quantization import quantize
from workers.model.runner import ModelRunner

CPU = torch.device("cpu")
BLOCK_SIZE = 16


@dataclass
class Patient:
    """A decoder of a tiny model's sizes, its runner, and its output before the exchange."""

    decoder: Any
    runner: ModelRunner
    untouched: Untouched
    done: Exchanged

    def num(self, kind: str) -> int:
        """How many modules of a kind were exchanged."""
        return len(self.done.exchanged.get(kind, ()))


def wide(family: str) -> dict[str, int]:
    """Two heads of 32, a size that the kernels support."""
    has_head_dim = getattr(make_config(family), "head_dim", None) is not None
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    return sizes | ({"head_dim": 32} if has_head_dim else {})


def fused(
    family: str,
    dtype: torch.dtype = torch.float32,
    *,
    processor: Processor | None = None,
    spoil: Callable[[Any], None] | None = None,
    is_int8: bool = False,
    **changes: Any,
) -> Patient:
    """Exchanges modules. `spoil` changes the decoder first."""
    register_attention()
    decoder = make_model(family, **(wide(family) | changes)).to(dtype)
    decoder.set_attn_implementation(ATTENTION_NAME)
    if is_int8:
        quantize(decoder)
    if spoil is not None:
        spoil(decoder)
    backend = choose_backend("auto", dtype, CPU, lambda text: None, fused=True, processor=processor)
    shapes = probe_layers(decoder, decoder.config, CPU)
    cache = KVCache(shapes, 4, BLOCK_SIZE, dtype, CPU)
    runner = ModelRunner(
        decoder,
        cache,
        backend.attention,
        eos_token_ids=frozenset(),
        max_model_len=64,
        device=CPU,
        kernels=backend.kernels,
    )
    names = {name: shapes[m] for name, m in decoder.named_modules() if m in shapes}
    assert backend.layout is not None
    exchange = Exchange(decoder, names, cache, backend.kernels, backend.layout)
    candidates = exchange.candidates()
    untouched = record(runner, decoder, decoder.config, candidates)
    done = exchange.apply(candidates, untouched.calls)
    return Patient(decoder, runner, untouched, done)
