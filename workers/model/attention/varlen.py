"""Attention of whole prompts by torch's variable-length FlashAttention, on CUDA.

A whole prompt, or the first part of one, attends only to its own tokens: their keys and values are
gathered from the cache. FlashAttention in torch reads pages of 256 tokens or multiples only.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.model.attention.interface import AttentionFlags, LayerShape, RowSpan
from workers.model.attention.reference import ReferenceAttention
from workers.model.checkpoint import first_line

_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_DIM = 256
# Of the prompts by which it is compared with the reference, in tokens.
_LENGTHS = (289, 70)
_TOLERANCE = 4e-2  # as a share of the largest number of a head


@dataclass(frozen=True, slots=True)
class WholePrompts:
    """Spans that begin at position 0: their rows in the flat batch, and their slots int64
    (num_tokens,), both in order; the ends of the spans, int32 (n + 1,) from 0 on; the longest."""

    rows: slice | Tensor
    slots: Tensor
    ends: Tensor
    longest: int

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, flags: AttentionFlags) -> Tensor:
        """query (num_tokens, num_heads, dim), keys and values (num_slots, kv_heads, dim) ->
        (num_tokens, num_heads, dim)."""
        key, value = keys[self.slots], values[self.slots]
        sizes = self.ends, self.ends, self.longest, self.longest
        # Keys to the left and to the right of a query: (-1, 0) is all before it.
        window = (-1 if flags.window is None else flags.window - 1, 0)
        attend = _flash_attention()
        return attend(query, key, value, *sizes, scale=flags.scale, window_size=window)


@cache
def _flash_attention() -> Callable[..., Tensor]:
    """torch's own, for groups of heads. It is imported here because it imports 900 modules."""
    from torch.nn.attention.varlen import varlen_attn

    # Without the argument torch takes groups of heads as they are.
    is_grouped = "enable_gqa" in signature(varlen_attn).parameters
    attend: Callable[..., Any] = varlen_attn
    return partial(attend, enable_gqa=True) if is_grouped else attend


def takes(query: Tensor, keys: Tensor, values: Tensor, flags: AttentionFlags) -> bool:
    """Whether torch has this attention; the shapes are those of `WholePrompts.attend`."""
    dim = query.shape[-1]
    return (
        query.dtype in _DTYPES
        and keys.shape == values.shape
        and dim % 8 == 0
        and dim <= _LARGEST_DIM
        and flags.softcap is None
        and flags.sinks is None
    )


def whole_prompts(spans: Seq[RowSpan], device: torch.device) -> WholePrompts:
    """Prepares spans that begin at position 0."""
    first = [span.first for span in spans]
    counts = [span.num_tokens for span in spans]
    ends = np.cumsum([0, *counts])
    rows = np.concatenate([np.arange(n) + start for start, n in zip(first, counts, strict=True)])
    is_run = rows[-1] - rows[0] == len(rows) - 1 and bool((np.diff(rows) == 1).all())
    return WholePrompts(
        slice(int(rows[0]), int(rows[-1]) + 1) if is_run else torch.as_tensor(rows, device=device),
        torch.as_tensor(np.concatenate([span.slots for span in spans]), device=device),
        torch.as_tensor(ends.astype(np.int32), device=device),
        max(counts),
    )


@torch.inference_mode()
def fault_of(shape: LayerShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why whole prompts of such a layer cannot be attended so; None if they can, or are left to
    others. Compares random numbers with the reference."""
    generator = torch.Generator().manual_seed(0)

    def random(num_heads: int, dim: int) -> Tensor:
        sizes = sum(_LENGTHS), num_heads, dim
        return torch.randn(sizes, generator=generator).to(device, dtype)

    query, keys, values = (
        random(shape.num_heads, shape.k_dim),
        random(shape.kv_heads, shape.k_dim),
        random(shape.kv_heads, shape.v_dim),
    )
    if not takes(query, keys, values, shape.flags):
        return None
    slots = np.random.default_rng(0).permutation(sum(_LENGTHS))
    spans = [
        RowSpan(0, _LENGTHS[0], 0, slots[: _LENGTHS[0]]),
        RowSpan(_LENGTHS[0], _LENGTHS[1], 0, slots[_LENGTHS[0] :]),
    ]
    expected = ReferenceAttention().prepare(spans, device).attend(query, keys, values, shape.flags)
    try:
        found = whole_prompts(spans, device).attend(query, keys, values, shape.flags)
        difference = (found.float() - expected.float()).abs().amax(-1)
    except Exception as exc:  # of a build of torch without it
        return f"it raises {type(exc).__name__}: {first_line(exc)}"
    share = float((difference / expected.float().abs().amax(-1)).max())
    return None if share <= _TOLERANCE else f"off by {share:.1e} of the largest number of a head"
