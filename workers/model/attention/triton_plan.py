"""Lists the work of a step for the Triton kernels, on the host.

A span of few tokens is split by its context, so that the work is as much as all parts of all
contexts; longer spans are cut into tiles of queries.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.model.attention.interface import Span
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
