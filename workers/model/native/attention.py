"""CPU attention by our kernel, which reads the cache in place, without gather or mask.

Layers the kernel does not support (odd head sizes) use packed attention.
"""

from collections.abc import Sequence as Seq
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.model.attention.interface import AttentionFlags, PreparedAttention, Span
from workers.model.attention.packed import PackedAttention
from workers.model.native.kernels import Kernels, can_attend

_Column = npt.NDArray[np.int64]

_ROWS = 64  # query rows in a tile: queries times heads of a group


class NativeAttention:
    """AttentionBackend for a CPU, in one element type."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def prepare(self, spans: Seq[Span], device: torch.device) -> "PreparedNative":
        return PreparedNative(self._kernels, spans)


class PreparedNative:
    """A step's work as tiles for the kernel; a tile is some queries of one sequence."""

    def __init__(self, kernels: Kernels, spans: Seq[Span]) -> None:
        self._kernels = kernels
        self._spans = spans
        self.slots = torch.from_numpy(np.concatenate([span.slots for span in spans]))
        # (4, num_spans): first row, number of rows, first position, start in the slots.
        lengths = [len(span.slots) for span in spans]
        begins = accumulate(lengths[:-1], initial=0)
        parts = [(span.first, span.num_tokens, span.start) for span in spans]
        self._parts = np.array(
            [(*part, begin) for part, begin in zip(parts, begins, strict=True)], dtype=np.int64
        ).T
        self._tiles: dict[int, Tensor] = {}
        self._packed: PreparedAttention | None = None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, flags: AttentionFlags) -> Tensor:
        num_heads, k_dim = query.shape[1:]
        kv_heads, v_dim = values.shape[1:]
        if not can_attend(num_heads, kv_heads, k_dim, v_dim):
            if self._packed is None:
                self._packed = PackedAttention().prepare(self._spans, query.device)
            return self._packed.attend(query, keys, values, flags)
        if query.stride()[1:] != (k_dim, 1):
            query = query.contiguous()
        tiles = self.tiles(num_heads // kv_heads)
        return self._kernels.attend(tiles, self.slots, query, keys, values, flags)

    def tiles(self, group: int) -> Tensor:
        """Tiles of all rows, int64 (num_tiles, 4), for `group` query heads per KV head; see
        Kernels.attend. The longest come first, so that no thread starts one last."""
        num_queries = max(1, _ROWS // group)
        if num_queries not in self._tiles:
            counts = -(-self._parts[1] // num_queries)  # of tiles in each span
            first, rows, start, begin = np.repeat(self._parts, counts, axis=1)
            number = np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
            skipped = number * num_queries
            rows = np.minimum(num_queries, rows - skipped)
            self._tiles[num_queries] = _ordered(first + skipped, rows, start + skipped, begin)
        return self._tiles[num_queries]

    def tiles_of_rows(self, wanted: Tensor, group: int) -> Tensor:
        """Tiles of rows `wanted` int64 (num_wanted,); includes other rows if there are more wanted
        rows than spans."""
        if len(wanted) > self._parts.shape[1]:
            return self.tiles(group)
        first, _, start, begin = self._parts
        rows = wanted.numpy()
        span = np.searchsorted(first, rows, side="right") - 1
        ones = np.ones_like(rows)
        return _ordered(rows, ones, start[span] + rows - first[span], begin[span])


def _ordered(first: _Column, rows: _Column, position: _Column, begin: _Column) -> Tensor:
    tiles = np.stack([first, rows, position, begin], axis=1)
    order = np.argsort(-rows * (position + rows), kind="stable")
    return torch.from_numpy(np.ascontiguousarray(tiles[order]))
