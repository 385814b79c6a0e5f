"""Computes one token for each of some rows, from state on the device (`RequestState`).

A step can follow another without waiting for its tokens, and can be recorded. Sampling is in
`drawing`.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from workers.model.attention.interface import PreparedAttention
from workers.model.attention.rows import SPLIT_TOKENS, RowsStep
from workers.model.gpu.graphs import Record, StepGraphs, padded_size
from workers.model.gpu.request_state import POSITION, TOKEN, RequestState
from workers.model.kv_cache import PagedStep
from workers.model.runner import ModelRunner

# Parts of contexts that a recorded step has room for, beside one of each row: the KV of a million
# tokens. A step that reads more takes the device longer than its launches take the host.
_MOST_MORE_PARTS = 4096

PrepareRows = Callable[[RowsStep], PreparedAttention]


class RowsDecoder:
    """Computes the logits of the rows in the state's order."""

    def __init__(
        self,
        runner: ModelRunner,
        state: RequestState,
        prepare_rows: PrepareRows,
        record: Record | None,
    ) -> None:
        """`record` makes graphs of steps; None computes each step directly."""
        self.runner = runner
        self._state = state
        self._prepare_rows = prepare_rows
        self._logits: Tensor | None = None  # (padded rows, vocab_size), if steps are recorded
        self.graphs: StepGraphs | None = None
        if record is not None:
            self.graphs = StepGraphs(
                record, self._compute_in_place, self._warm_up, len(state.order)
            )

    def logits(self, positions: Seq[int]) -> Tensor:
        """Logits (n, vocab) of the first n rows, whose last tokens are at these positions. Valid
        until the next step."""
        size = padded_size(len(positions))
        num_parts = size - len(positions) + sum(at // SPLIT_TOKENS + 1 for at in positions)
        if self.graphs is not None and num_parts <= self._most_parts(size):
            return self.replay(size)[: len(positions)]
        return self.compute(size, num_parts, 1 + max(positions))[: len(positions)]

    def compute(self, size: int, num_parts: int, longest: int) -> Tensor:
        """The logits (size, vocab_size) of the first rows and of padding, without a graph, of
        contexts with these parts together, and none longer than `longest`."""
        return self._compute(self._state.order[:size], num_parts, longest)

    def replay(self, size: int) -> Tensor:
        """`compute` by a graph, of contexts with at most `_most_parts`."""
        assert self.graphs is not None
        assert self._logits is not None
        self.graphs.replay(size)
        return self._logits[:size]

    def _most_parts(self, size: int) -> int:
        """Of all contexts of a recorded step."""
        of_one = -(-self._state.tables.shape[1] * self.runner.block_size // SPLIT_TOKENS)
        return min(size * of_one, size + _MOST_MORE_PARTS)

    def _compute_in_place(self, size: int) -> None:
        found = self._compute(self._state.order[:size], self._most_parts(size), None)
        self._buffer(found)[:size] = found

    def _buffer(self, logits: Tensor) -> Tensor:
        """Where steps leave their logits."""
        if self._logits is None:
            self._logits = logits.new_empty(len(self._state.order), logits.shape[1])
        return self._logits

    def _warm_up(self, size: int) -> None:
        """Runs on padding only, to compile kernels; changes nothing that is read."""
        rows = self._state.padding_order[:size]
        self._buffer(self._compute(rows, self._most_parts(size), None))

    def _compute(self, rows: Tensor, most_parts: int, longest: int | None) -> Tensor:
        """rows int64 (n,) -> logits (n, vocab_size); writes the KV of the rows' last tokens."""
        state, block_size = self._state, self.runner.block_size
        positions = state.field(POSITION, rows)
        step = RowsStep(rows, positions, state.tables, most_parts, longest, block_size)
        blocks = state.tables[rows, positions // block_size]
        paged = PagedStep(
            self.runner.cache,
            self._prepare_rows(step),
            blocks * block_size + positions % block_size,
            self.runner.kernels,
        )
        index = torch.arange(len(rows), device=rows.device)
        token_ids = state.field(TOKEN, rows)
        return self.runner.forward(token_ids[None], positions[None], index, paged)
