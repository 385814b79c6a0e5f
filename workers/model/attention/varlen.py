"""Attention of whole prompts by torch's variable-length FlashAttention, on CUDA.

A whole prompt, or the first part of one, attends only to its own tokens: their keys and values are
gathered from the cache. FlashAttention in torch reads pages of 256 tokens or multiples only.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from workers.model.attention.interface import AttentionFlags, Span
from workers.model.staging import to_device

_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_DIM = 256
# Without the argument torch takes groups of heads as they are.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


@dataclass(frozen=True, slots=True)
class WholePrompts:
    """Spans that begin at position 0: their rows in the flat batch, and their slots int64
    (num_tokens,), both in order; the ends of the spans, int32 (n + 1,) from 0 on; the longest."""

    rows: slice | Tensor
    slots: Tensor
    ends: Tensor
    longest: int

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, flags: AttentionFlags) -> Tensor:
        """query (T, num_heads, dim), keys and values (num_slots, kv_heads, dim) -> (num_tokens,
        num_heads, dim)."""
        key, value = keys[self.slots], values[self.slots]
        sizes = self.ends, self.ends, self.longest, self.longest
        # Keys to the left and to the right of a query: (-1, 0) is all before it.
        window = (-1 if flags.window is None else flags.window - 1, 0)
        options: dict[str, Any] = {"scale": flags.scale, "window_size": window, **_GROUPED}
        found = varlen_attn(query[self.rows], key, value, *sizes, **options)
        assert isinstance(found, Tensor)
        return found


def can_vary(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch may have this attention there."""
    return device.type == "cuda" and dtype in _DTYPES


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


def whole_prompts(spans: Seq[Span], device: torch.device) -> WholePrompts:
    """Prepares spans that begin at position 0."""
    first = [span.first for span in spans]
    counts = [span.num_tokens for span in spans]
    ends = np.cumsum([0, *counts])
    rows = np.concatenate([np.arange(n) + start for start, n in zip(first, counts, strict=True)])
    is_run = rows[-1] - rows[0] == len(rows) - 1 and bool((np.diff(rows) == 1).all())
    return WholePrompts(
        slice(int(rows[0]), int(rows[-1]) + 1) if is_run else to_device(rows, device),
        to_device(np.concatenate([span.slots for span in spans]), device),
        to_device(ends.astype(np.int32), device),
        max(counts),
    )
