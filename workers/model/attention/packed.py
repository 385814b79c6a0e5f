"""Attention in torch with few calls: decoding rows together, prompts one by one through SDPA; whole
prompts together by FlashAttention, where the GPU has it.

The default without a kernel of our own. A row, even as padding, reads only slots of its own
sequence, so other sequences' data (NaN included) cannot reach it.
"""

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.attention.interface import AttentionFlags, RowSpan
from workers.model.attention.reference import attend_dense, causal_mask
from workers.model.attention.varlen import WholePrompts, takes, whole_prompts

# Decoding rows are grouped by the power of two of their context, from this length on. Above it at
# most half of a gather is padding; below it one group saves calls.
_SHORTEST_GROUP_TOKENS = 128
# A larger gather does not fit the CPU's caches and gets new pages from the allocator: 64 rows of
# 512 tokens with 4 KV heads of 64 took 74 ms at once and 21 ms in slices of this size.
_CPU_GATHER_BYTES = 4 * 2**20
# Scores (or mask entries) of a chunk computed at once: 32 MiB of float32, enough for a chunk of
# 2048 tokens with 4096 tokens of context.
_SLICE_SCORES = 2**23


class PackedAttention:
    """AttentionBackend for any device: padded groups of single tokens, SDPA per longer chunk."""

    def __init__(self, *, flash: bool = False) -> None:
        """`flash`: whole prompts by FlashAttention, in layers for which torch has it."""
        self._flash = flash

    def prepare(self, spans: Seq[RowSpan], device: torch.device) -> "_PreparedPacked":
        return _PreparedPacked(spans, device, flash=self._flash)


class _PreparedPacked:
    def __init__(self, spans: Seq[RowSpan], device: torch.device, *, flash: bool) -> None:
        self._spans = spans
        self._device = device
        self._flash = flash
        self._parts: dict[bool, list[_Part]] = {}  # with FlashAttention and without

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, flags: AttentionFlags) -> Tensor:
        flash = self._flash and takes(query, keys, values, flags)
        if flash not in self._parts:
            self._parts[flash] = _parts(self._spans, self._device, flash=flash)
        parts = self._parts[flash]
        if len(parts) == 1:
            return parts[0].attend(query, keys, values, flags)
        out = query.new_empty(query.shape[0], query.shape[1], values.shape[-1])
        for part in parts:
            out[part.rows] = part.attend(query[part.rows], keys, values, flags)
        return out


def _parts(spans: Seq[RowSpan], device: torch.device, *, flash: bool) -> "list[_Part]":
    groups: dict[int, list[RowSpan]] = {}
    whole: list[RowSpan] = []
    parts: list[_Part] = []
    for span in spans:
        if span.num_tokens == 1:
            key = max(len(span.slots) - 1, _SHORTEST_GROUP_TOKENS - 1).bit_length()
            groups.setdefault(key, []).append(span)
        elif flash and span.start == 0:
            whole.append(span)
        else:
            parts.append(_Prompt(span, device))
    parts += [_Group(group, device) for group in groups.values()]
    return [*parts, whole_prompts(whole, device)] if whole else parts


class _Group:
    """Rows of one token each; their keys are gathered into one padded tensor."""

    def __init__(self, spans: Seq[RowSpan], device: torch.device) -> None:
        self._spans = spans
        self._device = device
        self._views: dict[int | None, tuple[Tensor, Tensor | None]] = {}
        self.rows = torch.as_tensor(np.array([span.first for span in spans]), device=device)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, flags: AttentionFlags) -> Tensor:
        """query (n, num_heads, k_dim) -> (n, num_heads, v_dim)."""
        if flags.window not in self._views:
            self._views[flags.window] = self._view(flags.window)
        slots, seen = self._views[flags.window]
        num_rows = len(slots)
        at_once = num_rows
        if query.device.type == "cpu":
            num_bytes = slots.numel() * (keys[0].nbytes + values[0].nbytes)
            at_once = -(-num_rows // -(-num_bytes // _CPU_GATHER_BYTES))
        parts = []
        for first in range(0, num_rows, at_once):
            rows = slice(first, first + at_once)
            mask = None if seen is None else seen[rows, None, None]
            parts.append(_attend_tokens(query[rows], keys, values, slots[rows], mask, flags))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _view(self, window: int | None) -> tuple[Tensor, Tensor | None]:
        """Slots (n, L) of each row's visible keys, and a mask (n, L) that excludes padding."""
        rows = [span.slots if window is None else span.slots[-window:] for span in self._spans]
        lengths = np.array([len(slots) for slots in rows])
        longest = int(lengths.max())
        padded: npt.NDArray[np.int64] = np.empty((len(rows), longest), dtype=np.int64)
        for row, slots in zip(padded, rows, strict=True):
            row[: len(slots)] = slots
            row[len(slots) :] = slots[0]
        seen = None
        if int(lengths.min()) < longest:
            is_seen = np.arange(longest) < lengths[:, None]
            seen = torch.as_tensor(is_seen, device=self._device)
        return torch.as_tensor(padded, device=self._device), seen


class _Prompt:
    """A chunk of several tokens of one sequence, computed in slices of its queries.

    A slice sees keys up to its last position, so nothing beyond the diagonal is computed, and
    memory is bounded whatever the context.
    """

    def __init__(self, span: RowSpan, device: torch.device) -> None:
        self._span = span
        self._slots = torch.as_tensor(span.slots, device=device)
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}
        self.rows = slice(span.first, span.first + span.num_tokens)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, flags: AttentionFlags) -> Tensor:
        """query (num_tokens, num_heads, k_dim) -> (num_tokens, num_heads, v_dim)."""
        span, window = self._span, flags.window
        first_key = 0 if window is None else max(0, span.start + 1 - window)
        slots = self._slots[None, first_key:]
        key, value = _gather(keys, slots), _gather(values, slots)
        heads_first = query.transpose(0, 1)[None]
        is_dense = flags.softcap is not None or flags.sinks is not None
        if not is_dense and span.start == 0 and (window is None or window >= span.num_tokens):
            return _sdpa(heads_first, key, value, None, flags, is_causal=True)
        num_scores = slots.shape[1] * (query.shape[1] if is_dense else 1)
        at_once = max(1, _SLICE_SCORES // num_scores)
        parts = []
        for first in range(0, span.num_tokens, at_once):
            last = min(first + at_once, span.num_tokens)
            lowest = 0 if window is None else max(0, span.start + first + 1 - window)
            seen_keys = slice(lowest - first_key, span.start + last - first_key)
            part = heads_first[:, :, first:last], key[:, :, seen_keys], value[:, :, seen_keys]
            mask = self._mask(first, last, lowest, window)
            if is_dense:
                parts.append(attend_dense(*part, mask, flags)[0].transpose(0, 1))
            else:
                parts.append(_sdpa(*part, mask, flags))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _mask(self, first: int, last: int, lowest: int, window: int | None) -> Tensor:
        """causal_mask of queries `first .. last - 1` over keys from position `lowest`. Cached for
        the step's other layers if it is the only slice."""
        start = self._span.start + first
        num_queries, num_keys = last - first, self._span.start + last - lowest
        if num_queries < self._span.num_tokens:
            return causal_mask(start, num_queries, lowest, num_keys, window, self._slots.device)
        key = (first, lowest, window)
        if key not in self._masks:
            self._masks[key] = causal_mask(
                start, num_queries, lowest, num_keys, window, self._slots.device
            )
        return self._masks[key]


_Part = _Group | _Prompt | WholePrompts


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    flags: AttentionFlags,
    *,
    is_causal: bool = False,
) -> Tensor:
    """query (1, num_heads, Q, k_dim), key and value (1, kv_heads, L, dim), seen bool (Q, L)
    -> (Q, num_heads, v_dim).
    """
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        seen,
        is_causal=is_causal,
        scale=flags.scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return out[0].transpose(0, 1)


def _attend_tokens(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    seen: Tensor | None,
    flags: AttentionFlags,
) -> Tensor:
    """One query per row. query (n, num_heads, k_dim), slots (n, L), seen bool (n, 1, 1, L)
    -> (n, num_heads, v_dim).
    """
    num_rows, num_heads, k_dim = query.shape
    key = _gather(keys, slots)
    value = _gather(values, slots)
    if flags.softcap is not None or flags.sinks is not None:
        mask = None if seen is None else seen.unsqueeze(1)
        return attend_dense(query.unsqueeze(2), key, value, mask, flags).squeeze(2)
    # Treat the heads that share a KV head as its queries, so that keys are not repeated.
    grouped = query.view(num_rows, key.shape[1], -1, k_dim)
    out = F.scaled_dot_product_attention(grouped, key, value, seen, scale=flags.scale)
    return out.reshape(num_rows, num_heads, -1)


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """cache (num_slots, kv_heads, dim), slots (n, L) -> (n, kv_heads, L, dim).

    Uses `embedding`, ten times as fast as index_select on a CPU for such short rows.
    """
    flat = F.embedding(slots, cache.view(cache.shape[0], -1))
    return flat.view(*slots.shape, *cache.shape[1:]).transpose(1, 2)
