"""Attention on a CPU by a kernel that reads the cache where it lies: no gather, no mask.

Leaves layers that the kernel does not take (odd head sizes) to packed attention.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from workers.model.attention.interface import AttentionFlags, PreparedAttention, Span
from workers.model.attention.packed import PackedAttention
from workers.model.native.kernels import Kernels, can_attend

_ROWS = 64  # query rows in a tile: queries times heads of a group


class NativeAttention:
    """AttentionBackend for a CPU, in one element type."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def prepare(self, spans: Seq[Span], device: torch.device) -> "_PreparedNative":
        return _PreparedNative(self._kernels, spans)


class _PreparedNative:
    def __init__(self, kernels: Kernels, spans: Seq[Span]) -> None:
        self._kernels = kernels
        self._spans = spans
        self._slots = torch.from_numpy(np.concatenate([span.slots for span in spans]))
        self._tiles: dict[int, Tensor] = {}
        self._packed: PreparedAttention | None = None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, flags: AttentionFlags) -> Tensor:
        """See PreparedAttention.attend."""
        num_heads, k_dim = query.shape[1:]
        kv_heads, v_dim = values.shape[1:]
        if not can_attend(num_heads, kv_heads, k_dim, v_dim):
            if self._packed is None:
                self._packed = PackedAttention().prepare(self._spans, query.device)
            return self._packed.attend(query, keys, values, flags)
        if query.stride()[1:] != (k_dim, 1):
            query = query.contiguous()
        tiles = self._tiles_of(max(1, _ROWS // (num_heads // kv_heads)))
        return self._kernels.attend(tiles, self._slots, query, keys, values, flags)

    def _tiles_of(self, num_queries: int) -> Tensor:
        """int64 (num_tiles, 4), see Kernels.attend; at most so many queries in each, the longest
        work first, so that no thread is left with it at the end.
        """
        if num_queries not in self._tiles:
            parts = []
            begin = 0
            for span in self._spans:
                firsts = np.arange(0, span.num_tokens, num_queries)
                tiles = np.empty((len(firsts), 4), dtype=np.int64)
                tiles[:, 0] = span.first + firsts
                tiles[:, 1] = np.minimum(num_queries, span.num_tokens - firsts)
                tiles[:, 2] = span.start + firsts
                tiles[:, 3] = begin
                parts.append(tiles)
                begin += len(span.slots)
            all_tiles = np.concatenate(parts)
            cost = all_tiles[:, 1] * (all_tiles[:, 2] + all_tiles[:, 1])
            ordered = np.ascontiguousarray(all_tiles[np.argsort(-cost, kind="stable")])
            self._tiles[num_queries] = torch.from_numpy(ordered)
        return self._tiles[num_queries]
