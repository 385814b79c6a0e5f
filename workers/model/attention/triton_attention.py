"""Paged attention by Triton: prepares the kernels' arguments from spans or tensors.

Off by default: the kernels were compiled for GPUs and run in Triton's interpreter, but not yet on a
GPU. Unsupported head sizes use packed attention.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.model.attention.interface import AttentionFlags, PreparedAttention, Span
from workers.model.attention.packed import PackedAttention
from workers.model.attention.rows import PreparedRows, RowsStep
from workers.model.attention.triton_kernels import LOG2_E, attend_tiles, join_splits

# Context that one program reads for a single token. It is fixed, so that a row's partial sums
# depend only on its own length.
SPLIT_TOKENS = 512
_LEAST_ROWS = 16  # minimum for a product on tensor cores


@dataclass(frozen=True, slots=True)
class TilePlan:
    """One step for the kernels. tiles int32 (n, 3): first row, number of queries, row of `tables`;
    positions int64 (T,); tables (rows, blocks), integers with last stride 1. With `num_splits` each
    tile has one query."""

    tiles: Tensor
    positions: Tensor
    tables: Tensor
    tile_queries: int
    num_splits: int


class TritonAttention:
    """AttentionBackend for CUDA, and for a CPU in Triton's interpreter."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def prepare(self, spans: Seq[Span], device: torch.device) -> "PreparedTriton":
        return PreparedTriton(self._block_size, spans=spans, device=device)

    def prepare_rows(self, step: RowsStep) -> PreparedAttention:
        """Plans single tokens whose tables are on the device, without reading them."""
        ones = torch.ones_like(step.rows)
        firsts = torch.arange(len(ones), device=ones.device)
        tiles = torch.stack([firsts, ones, step.rows], dim=1).to(torch.int32)
        num_splits = num_splits_of(step.longest)
        plan = TilePlan(tiles, step.positions, step.tables, 1, num_splits)
        return PreparedTriton(self._block_size, plan=plan, rows=step)


class PreparedTriton:
    """PreparedAttention for one step: from spans, or from a plan for single tokens."""

    def __init__(
        self,
        block_size: int,
        *,
        spans: Seq[Span] = (),
        device: torch.device | None = None,
        plan: TilePlan | None = None,
        rows: RowsStep | None = None,
    ) -> None:
        self._block_size = block_size
        self._spans = spans
        self._device = device
        self._rows = rows
        self._plans: dict[int, TilePlan] = {} if plan is None else {1: plan}
        self._packed: PreparedAttention | None = None
        self._is_single = plan is not None or all(span.num_tokens == 1 for span in spans)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, flags: AttentionFlags) -> Tensor:
        num_tokens, num_heads, k_dim = query.shape
        kv_heads, v_dim = values.shape[1:]
        if not can_attend(num_heads, kv_heads, k_dim, v_dim):
            return self._packed_attention(query.device).attend(query, keys, values, flags)
        if query.stride(2) != 1:
            query = query.contiguous()
        widest = max(k_dim, v_dim)
        group = num_heads // kv_heads
        num_rows = _power_of_two(max(_LEAST_ROWS, group))
        if not self._is_single:
            num_rows = max(num_rows, 64 if widest > 128 else 128)
        plan = self._plan(1 if self._is_single else num_rows // group)
        out = query.new_empty(num_tokens, num_heads, v_dim)
        num_tiles, splits = len(plan.tiles), max(1, plan.num_splits)
        has_parts = plan.num_splits > 1
        sinks = None if flags.sinks is None else flags.sinks.float().contiguous()
        part_out, part_max, part_sum = _parts(num_tiles, splits, num_heads, v_dim, out, has_parts)
        scale = flags.scale if flags.softcap else flags.scale * LOG2_E
        attend_tiles[(num_tiles, kv_heads, splits)](
            query,
            keys,
            values,
            out,
            plan.tiles,
            plan.positions,
            plan.tables,
            out if sinks is None else sinks,
            part_out,
            part_max,
            part_sum,
            query.stride(0),
            query.stride(1),
            plan.tables.stride(0),
            scale,
            NUM_HEADS=num_heads,
            KV_HEADS=kv_heads,
            K_DIM=k_dim,
            V_DIM=v_dim,
            K_PAD=max(16, _power_of_two(k_dim)),
            V_PAD=max(16, _power_of_two(v_dim)),
            BLOCK_SIZE=self._block_size,
            TILE_QUERIES=plan.tile_queries,
            TILE_ROWS=num_rows,
            TILE_KEYS=32 if widest > 128 else 64,
            WINDOW=flags.window or 0,
            SOFTCAP=flags.softcap or 0.0,
            HAS_SINKS=sinks is not None,
            SPLIT_TOKENS=SPLIT_TOKENS if has_parts else 0,
            FACTOR_TYPE=_factor_type(query.dtype),
            # TF32 would keep 10 of 23 bits.
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=4 if num_rows < 128 else 8,
            num_stages=2,
        )
        if has_parts:
            join_splits[(num_tiles, num_heads)](
                out,
                plan.tiles,
                plan.positions,
                out if sinks is None else sinks,
                part_out,
                part_max,
                part_sum,
                splits,
                NUM_HEADS=num_heads,
                V_DIM=v_dim,
                V_PAD=max(16, _power_of_two(v_dim)),
                HAS_SINKS=sinks is not None,
                SPLIT_TOKENS=SPLIT_TOKENS,
            )
        return out

    def _packed_attention(self, device: torch.device) -> PreparedAttention:
        if self._packed is None:
            if self._rows is not None:
                self._packed = PreparedRows(self._rows)
            else:
                self._packed = PackedAttention().prepare(self._spans, device)
        return self._packed

    def _plan(self, tile_queries: int) -> TilePlan:
        """Cached for the step's other layers."""
        if tile_queries not in self._plans:
            assert self._device is not None
            self._plans[tile_queries] = plan_spans(
                self._spans, tile_queries, self._block_size, self._device
            )
        return self._plans[tile_queries]


def plan_spans(
    spans: Seq[Span], tile_queries: int, block_size: int, device: torch.device
) -> TilePlan:
    """Tiles of at most this many queries, longest first, so that no program starts one last.
    Contexts are split if all tiles are single tokens."""
    parts = []
    tables = np.zeros((len(spans), max(-(-len(s.slots) // block_size) for s in spans)), np.int32)
    positions = np.empty(sum(span.num_tokens for span in spans), dtype=np.int64)
    for row, span in enumerate(spans):
        blocks = span.slots[::block_size] // block_size
        tables[row, : len(blocks)] = blocks
        end = span.start + span.num_tokens
        positions[span.first : span.first + span.num_tokens] = np.arange(span.start, end)
        firsts = np.arange(0, span.num_tokens, tile_queries)
        tiles = np.empty((len(firsts), 4), dtype=np.int32)
        tiles[:, 0] = span.first + firsts
        tiles[:, 1] = np.minimum(tile_queries, span.num_tokens - firsts)
        tiles[:, 2] = row
        tiles[:, 3] = span.start + firsts + tiles[:, 1]  # number of keys it reads
        parts.append(tiles)
    both = np.concatenate(parts)
    ordered = np.ascontiguousarray(both[np.argsort(-both[:, 3], kind="stable"), :3])
    longest = int(both[:, 3].max())
    return TilePlan(
        torch.from_numpy(ordered).to(device),
        torch.from_numpy(positions).to(device),
        torch.from_numpy(tables).to(device),
        tile_queries,
        num_splits_of(longest) if tile_queries == 1 else 0,
    )


def num_splits_of(num_tokens: int) -> int:
    """Splits needed for the longest context of a step."""
    return -(-num_tokens // SPLIT_TOKENS)


def can_attend(num_heads: int, kv_heads: int, k_dim: int, v_dim: int) -> bool:
    return (
        num_heads % kv_heads == 0
        and num_heads // kv_heads <= 64
        and min(k_dim, v_dim) >= 8
        and max(k_dim, v_dim) <= 256
    )


def _parts(
    num_tiles: int, splits: int, num_heads: int, v_dim: int, out: Tensor, has_parts: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See attend_tiles; without splits the output itself, unused."""
    if not has_parts:
        return out, out, out
    shape = (num_tiles, splits, num_heads)
    return (
        torch.empty(*shape, v_dim, dtype=torch.float32, device=out.device),
        torch.empty(shape, dtype=torch.float32, device=out.device),
        torch.empty(shape, dtype=torch.float32, device=out.device),
    )


def _factor_type(dtype: torch.dtype) -> tl.dtype:
    """The tensors' type; float32 in the interpreter, which multiplies bfloat16 as integers."""
    if triton.knobs.runtime.interpret or dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
