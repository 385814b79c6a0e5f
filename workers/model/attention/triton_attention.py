"""Paged attention by Triton: prepares the kernels' arguments from spans or tensors.

The host lists a step's work: a span of few tokens is split by its context, so that the work is as
much as all parts of all contexts; longer spans are cut into tiles of queries. Unsupported head
sizes use packed attention. Over 300 lines: the list and its only readers.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from workers.model.attention.interface import AttentionFlags, PreparedAttention, Span
from workers.model.attention.packed import PackedAttention
from workers.model.attention.reference import SPLIT_TOKENS, PreparedRows, RowsStep
from workers.model.attention.triton_kernels import (
    ITEM_FIELDS,
    JOIN_FIELDS,
    LOG2_E,
    attend_items,
    join_parts,
    list_parts,
)
from workers.model.attention.varlen import WholePrompts, takes, whole_prompts
from workers.model.staging import to_device

_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one launch. items int64 (at least num_items, ITEM_FIELDS), num_items int64 (1,)
    and joins int64 (num_joins, JOIN_FIELDS) as in `triton_kernels`; no joins if no context has
    several parts. `num_parts`: most partial results, 0 if contexts are not split."""

    items: Tensor
    num_items: Tensor
    joins: Tensor | None
    num_parts: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step's work. positions int64 (T,); tables int64 (rows, blocks) with last stride 1."""

    positions: Tensor
    tables: Tensor
    works: tuple[Work, ...]


def parts_of(num_tokens: int, split_tokens: int) -> int:
    """The number of parts of a context."""
    return -(-num_tokens // split_tokens)


def plan_spans(
    spans: Seq[Span],
    short_queries: int,
    tile_queries: int,
    split_tokens: int,
    block_size: int,
    device: torch.device,
) -> StepPlan:
    """Splits spans of at most `short_queries` tokens by context, others into tiles. Rows of no span
    have no position."""
    # (num_spans, 4): first row, number of tokens, row of the tables, first position.
    parts = [(s.first, s.num_tokens, row, s.start) for row, s in enumerate(spans)]
    columns = np.array(parts, dtype=np.int64)
    is_short = columns[:, 1] <= short_queries
    positions = np.empty(int((columns[:, 0] + columns[:, 1]).max()), dtype=np.int64)
    tables = np.zeros((len(spans), max(-(-len(s.slots) // block_size) for s in spans)), np.int64)
    for row, span in enumerate(spans):
        blocks = span.slots[::block_size] // block_size
        tables[row, : len(blocks)] = blocks
        end = span.start + span.num_tokens
        positions[span.first : span.first + span.num_tokens] = np.arange(span.start, end)
    items, joins, num_parts = _split(columns[is_short], split_tokens)
    tiles = _tiles(columns[~is_short], tile_queries)
    counts = np.array([[len(items)], [len(tiles)]], dtype=np.int64)
    sent = _send([items, joins, tiles, positions, tables, counts], device)
    works = []
    if len(tiles) > 0:
        works.append(Work(sent[2], sent[5][1], None, 0))
    if len(items) > 0:
        works.append(Work(sent[0], sent[5][0], sent[1] if len(joins) > 0 else None, num_parts))
    return StepPlan(sent[3], sent[4], tuple(works))


def _split(spans: _Rows, split_tokens: int) -> tuple[_Rows, _Rows, int]:
    """Items and joins of spans (n, 4), and the number of partial results."""
    first, num_tokens, table, start = spans.T
    counts = -(-(start + num_tokens) // split_tokens)
    ends = np.cumsum(counts * num_tokens)
    begins = ends - counts * num_tokens  # of the span's partial results
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    items = np.stack(
        [
            *np.repeat(np.stack([first, num_tokens, table]), counts, axis=1),
            number,
            *np.repeat(np.stack([begins, counts]), counts, axis=1),
        ],
        axis=1,
    )
    # One join for each token of a span with several parts.
    tokens = np.where(counts > 1, num_tokens, 0)
    token = np.arange(tokens.sum()) - np.repeat(np.cumsum(tokens) - tokens, tokens)
    row, begin, count = np.repeat(np.stack([first, begins, counts]), tokens, axis=1)
    joins = np.stack([row + token, begin + token * count, count], axis=1)
    return items, joins, int(ends[-1]) if len(ends) > 0 else 0


def _tiles(spans: _Rows, tile_queries: int) -> _Rows:
    """Items of spans (n, 4) over whole contexts, the longest first, so that no program starts one
    last."""
    first, num_tokens, table, start = spans.T
    counts = -(-num_tokens // tile_queries)
    skipped = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    skipped *= tile_queries
    first, num_tokens, table, start = np.repeat(spans.T, counts, axis=1)
    num_queries = np.minimum(tile_queries, num_tokens - skipped)
    zeros = np.zeros_like(first)
    tiles = np.stack([first + skipped, num_queries, table, zeros, zeros, zeros + 1], axis=1)
    return tiles[np.argsort(-(start + skipped + num_queries), kind="stable")]


def _send(arrays: Seq[_Rows], device: torch.device) -> list[Tensor]:
    """Copies arrays to the device at once."""
    flat = to_device(np.concatenate([array.reshape(-1) for array in arrays]), device)
    parts = torch.split(flat, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


_LEAST_ROWS = 16  # minimum for a product on tensor cores
# Programs for few rows, over all KV heads: two or three times what runs at once on an H100. More
# would start for nothing where contexts are short, fewer would leave multiprocessors idle.
_FEW_PROGRAMS = 1024


@dataclass(frozen=True, slots=True)
class _Tile:
    """How a program of `attend_items` computes: rows are queries times the heads of a group."""

    num_rows: int
    num_keys: int
    num_warps: int
    num_stages: int


class TritonAttention:
    """AttentionBackend for CUDA, and for a CPU in Triton's interpreter."""

    def __init__(self, block_size: int, *, torch_prompts: bool = False) -> None:
        """`torch_prompts`: torch attends whole prompts where it can (`varlen`)."""
        self._block_size = block_size
        self._torch_prompts = torch_prompts

    def use_torch_prompts(self) -> None:
        """From now on torch attends whole prompts where it can."""
        self._torch_prompts = True

    def prepare(self, spans: Seq[Span], device: torch.device) -> "PreparedTriton":
        return PreparedTriton(
            self._block_size, spans=spans, device=device, torch_prompts=self._torch_prompts
        )

    def prepare_rows(self, step: RowsStep) -> PreparedAttention:
        """Plans single tokens whose tables are on the device, without reading them."""
        num_rows, most_parts = len(step.rows), step.most_parts
        items = step.rows.new_empty(most_parts, ITEM_FIELDS)
        joins = step.rows.new_empty(num_rows, JOIN_FIELDS)
        num_items = step.rows.new_empty(1)
        list_parts[(num_rows,)](
            step.positions,
            step.rows,
            items,
            num_items,
            joins,
            num_rows,
            most_parts,
            SPLIT_TOKENS=SPLIT_TOKENS,
            TILE=128,
        )
        work = Work(items, num_items, joins if most_parts > num_rows else None, most_parts)
        plan = StepPlan(step.positions, step.tables, (work,))
        return PreparedTriton(self._block_size, plan=plan, rows=step)


class PreparedTriton:
    """PreparedAttention for one step: from spans, or from a plan for single tokens."""

    def __init__(
        self,
        block_size: int,
        *,
        spans: Seq[Span] = (),
        device: torch.device | None = None,
        plan: StepPlan | None = None,
        rows: RowsStep | None = None,
        torch_prompts: bool = False,
    ) -> None:
        self._block_size = block_size
        self._torch_prompts = torch_prompts
        self._spans = spans
        self._device = device
        self._rows = rows
        self._fixed = plan
        self._plans: dict[tuple[int, int, bool], tuple[StepPlan | None, WholePrompts | None]] = {}
        self._packed: PreparedAttention | None = None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, flags: AttentionFlags) -> Tensor:
        num_tokens, num_heads, k_dim = query.shape
        kv_heads, v_dim = values.shape[1:]
        if not can_attend(num_heads, kv_heads, k_dim, v_dim):
            return self._packed_attention(query.device).attend(query, keys, values, flags)
        if query.stride(2) != 1:
            query = query.contiguous()
        group, widest = num_heads // kv_heads, max(k_dim, v_dim)
        tiles = [_tile(query.dtype, widest, group, is_short=is_short) for is_short in (True, False)]
        torch_prompts = self._torch_prompts and takes(query, keys, values, flags)
        short_queries, tile_queries = (tile.num_rows // group for tile in tiles)
        plan, prompts = self._plan(short_queries, tile_queries, torch_prompts)
        if plan is None:  # the spans, in order, are all rows
            assert prompts is not None
            return prompts.attend(query, keys, values, flags)
        out = query.new_empty(num_tokens, num_heads, v_dim)
        if prompts is not None:
            out[prompts.rows] = prompts.attend(query, keys, values, flags)
        for work in plan.works:
            tile = tiles[0] if work.num_parts > 0 else tiles[1]
            self._compute(work, tile, plan, (query, keys, values, out), flags)
        return out

    def _compute(
        self,
        work: Work,
        tile: _Tile,
        plan: StepPlan,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        flags: AttentionFlags,
    ) -> None:
        """Attends the rows of one list of work."""
        query, keys, values, out = tensors
        num_heads, k_dim = query.shape[1:]
        kv_heads, v_dim = values.shape[1:]
        sinks = None if flags.sinks is None else flags.sinks.float().contiguous()
        num_parts = work.num_parts if work.joins is not None else 1  # otherwise none is written
        parts = [
            torch.empty(num_parts, num_heads, *dims, dtype=torch.float32, device=out.device)
            for dims in ((v_dim,), (), ())
        ]
        common = {
            "NUM_HEADS": num_heads,
            "V_DIM": v_dim,
            "V_PAD": max(16, triton.next_power_of_2(v_dim)),
            "WINDOW": flags.window or 0,
            "HAS_SINKS": sinks is not None,
            "SPLIT_TOKENS": SPLIT_TOKENS if work.num_parts > 0 else 0,
        }
        num_programs = min(len(work.items), max(len(out), _FEW_PROGRAMS // kv_heads))
        attend_items[(num_programs, kv_heads)](
            query,
            keys,
            values,
            out,
            work.items,
            work.num_items,
            plan.positions,
            plan.tables,
            out if sinks is None else sinks,
            *parts,
            query.stride(0),
            query.stride(1),
            plan.tables.stride(0),
            flags.scale if flags.softcap else flags.scale * LOG2_E,
            **common,
            KV_HEADS=kv_heads,
            K_DIM=k_dim,
            K_PAD=max(16, triton.next_power_of_2(k_dim)),
            BLOCK_SIZE=self._block_size,
            TILE_ROWS=tile.num_rows,
            TILE_KEYS=tile.num_keys,
            SOFTCAP=flags.softcap or 0.0,
            FACTOR_TYPE=_factor_type(query.dtype),
            # TF32 would keep 10 of 23 bits.
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if work.joins is not None:
            join_parts[(len(work.joins), num_heads)](
                out,
                work.joins,
                plan.positions,
                out if sinks is None else sinks,
                *parts,
                **common,
            )

    def _packed_attention(self, device: torch.device) -> PreparedAttention:
        if self._packed is None:
            if self._rows is not None:
                self._packed = PreparedRows(self._rows)
            else:
                self._packed = PackedAttention().prepare(self._spans, device)
        return self._packed

    def _plan(
        self, short_queries: int, tile_queries: int, torch_prompts: bool
    ) -> tuple[StepPlan | None, WholePrompts | None]:
        """What Triton attends, and what torch does. Cached for the step's other layers."""
        if self._fixed is not None:
            return self._fixed, None
        key = short_queries, tile_queries, torch_prompts
        if key not in self._plans:
            assert self._device is not None
            parts: tuple[list[Span], list[Span]] = ([], [])
            for span in self._spans:
                is_whole = torch_prompts and span.start == 0 and span.num_tokens > short_queries
                parts[is_whole].append(span)
            rest, whole = parts
            sizes = short_queries, tile_queries, SPLIT_TOKENS, self._block_size
            self._plans[key] = (
                plan_spans(rest, *sizes, self._device) if rest else None,
                whole_prompts(whole, self._device) if whole else None,
            )
        return self._plans[key]


def can_attend(num_heads: int, kv_heads: int, k_dim: int, v_dim: int) -> bool:
    return (
        num_heads % kv_heads == 0
        and num_heads // kv_heads <= 64
        and min(k_dim, v_dim) >= 8
        and max(k_dim, v_dim) <= 256
    )


def _tile(dtype: torch.dtype, widest: int, group: int, *, is_short: bool) -> _Tile:
    """Returns tiles that fit 99 KiB of shared memory, which every GPU from sm_80 on has, and the
    registers, by the compiler's figures (tests/workers/model/test_triton_compile.py). With five
    stages the next keys and values are loaded during a product: fewer look ahead in the table
    only."""
    num_rows = max(_LEAST_ROWS, triton.next_power_of_2(group))
    num_keys = 32 if widest > 128 else 64
    if dtype == torch.float32:  # without tensor cores, and twice as large
        if is_short and num_rows <= 32:
            return _Tile(num_rows, num_keys, 8, 2)
        return _Tile(max(num_rows, 32), num_keys // 2, 8, 2)
    if is_short:
        return _Tile(num_rows, num_keys, *((4, 5) if num_rows <= 32 else (8, 2)))
    num_rows = max(num_rows, 64 if widest > 128 else 128)
    return _Tile(num_rows, min(num_keys, _most_keys()), 8, 2)


@cache
def _most_keys() -> int:
    """Of a chunk's tile: more do not fit the registers of GPUs for desktops (8.6, 8.9, 12.x)."""
    if triton.knobs.runtime.interpret:
        return 64
    arch = driver.active.get_current_target().arch
    return 32 if 80 < arch < 90 or arch >= 120 else 64


def _factor_type(dtype: torch.dtype) -> tl.dtype:
    """The tensors' type; float32 in the interpreter, which multiplies bfloat16 as integers."""
    if triton.knobs.runtime.interpret or dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16
