"""Computes one token for each of some rows, from state on the device (`RequestState`).

A step can follow another without waiting for its tokens, and can be recorded. Sampling is in
`drawing`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from workers.model.attention.interface import PreparedAttention
from workers.model.attention.rows import RowsStep
from workers.model.gpu.graphs import Record, StepGraphs, padded_size
from workers.model.gpu.request_state import POSITION, TOKEN, RequestState
from workers.model.kv_cache import PagedStep
from workers.model.runner import ModelRunner

# Contexts are bounded by multiples of this, the size of the splits of Triton's kernel.
BOUND_TOKENS = 512

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

    def logits(self, num_rows: int, longest: int) -> Tensor:
        """Logits (n, vocab) of the first `num_rows` rows, whose contexts are at most `longest`.
        Valid until the next step."""
        num_units = -(-longest // BOUND_TOKENS)
        if self.graphs is None:
            return self.compute(num_rows, num_units)
        self.graphs.run(num_rows, num_units)
        assert self._logits is not None
        return self._logits[:num_rows]

    def compute(self, num_rows: int, num_units: int) -> Tensor:
        """`logits` without a graph, of contexts of at most `num_units` times BOUND_TOKENS."""
        return self._compute(self._state.order[: padded_size(num_rows)], num_units)[:num_rows]

    def replay(self, key: tuple[int, int]) -> Tensor:
        """The logits of one recorded graph: (its size, vocab_size)."""
        assert self.graphs is not None
        self.graphs.replay(key)
        assert self._logits is not None
        return self._logits[: key[0]]

    def _compute_in_place(self, size: int, num_units: int) -> None:
        found = self._compute(self._state.order[:size], num_units)
        self._buffer(found)[:size] = found

    def _buffer(self, logits: Tensor) -> Tensor:
        """Where steps leave their logits."""
        if self._logits is None:
            self._logits = logits.new_empty(len(self._state.order), logits.shape[1])
        return self._logits

    def _warm_up(self, size: int, num_units: int) -> None:
        """Runs on padding only, to compile kernels; changes nothing that is read."""
        self._buffer(self._compute(self._state.padding_order[:size], num_units))

    def _compute(self, rows: Tensor, num_units: int) -> Tensor:
        """rows int64 (n,) -> logits (n, vocab_size); writes the KV of the rows' last tokens."""
        state, block_size = self._state, self.runner.block_size
        positions = state.field(POSITION, rows)
        most = state.tables.shape[1] * block_size
        step = RowsStep(
            rows, positions, state.tables, min(num_units * BOUND_TOKENS, most), block_size
        )
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
