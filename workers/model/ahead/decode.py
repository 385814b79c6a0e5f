"""Computes the logits of a step from state on the device (`RequestState`). The step has one token
for each of some rows, and prompts: each of their tokens is a row of its own with its sequence's
table.

A step can follow another without waiting for its tokens, and can be recorded. Sampling is in
`drawing`.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from workers.engine.interface import Chunk
from workers.model.attention.interface import PreparedAttention
from workers.model.attention.reference import SPLIT_TOKENS, RowsStep
from workers.model.gpu.graphs import Record, StepGraphs, padded_size, sizes_up_to
from workers.model.gpu.request_state import OWN, POSITION, TOKEN, RequestState
from workers.model.kv_cache import PagedStep
from workers.model.runner import ModelRunner

# Parts of contexts that a recorded step has room for, beside one of each row: the KV of a million
# tokens. A step that reads more takes the device longer than its launches take the host.
_MOST_MORE_PARTS = 4096
# Parts that the tokens of prompts may read together in a recorded step, each token its own: 512
# tokens of short prompts, or 16 behind 8,000 others. A direct step reads a part for many tokens.
_MOST_PROMPT_PARTS = 512

PrepareRows = Callable[[RowsStep], PreparedAttention]


class RowsDecoder:
    """Computes the logits of the step that the state has lined up."""

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
        self._sizes = sizes_up_to(state.num_rows)
        self._most_wanted = padded_size(state.num_rows)
        self._logits: Tensor | None = None  # where recorded steps leave them
        self.graphs: StepGraphs | None = None
        if record is not None:
            self.graphs = StepGraphs(record, self._compute_in_place, self._sizes)

    def has_graph_for(self, chunks: Seq[Chunk]) -> bool:
        """Whether a recorded step has room for these chunks, which may be prompts."""
        positions = _positions_of(chunks)
        if self.graphs is None or len(positions) > self._sizes[-1]:
            return False
        size, num_parts = self._extent(positions)
        prompts = [chunk for chunk in chunks if chunk.num_tokens > 1]
        num_prompt_parts = _num_parts(_positions_of(prompts))
        return num_parts <= self._most_parts(size) and num_prompt_parts <= _MOST_PROMPT_PARTS

    def logits_of(self, chunks: Seq[Chunk]) -> Tensor:
        """Returns the logits (n, vocab_size) of the n chunks that sample. A chunk of one token
        takes that token from the state's row. All sequences have a row."""
        self.line_up(chunks)
        num_wanted = sum(chunk.samples for chunk in chunks)
        return self.logits(_positions_of(chunks), num_wanted)

    def line_up(self, chunks: Seq[Chunk]) -> None:
        """Makes these chunks the device's next step; see `logits_of`."""
        rows, tokens, positions, wanted = list[int](), list[int](), list[int](), list[int]()
        for chunk in chunks:
            self._state.cover(chunk.sequence)
            rows += [self._state.row_of(chunk.sequence)] * chunk.num_tokens
            if chunk.num_tokens == 1 and chunk.samples:
                tokens.append(OWN)
                positions.append(OWN)
            else:
                tokens += chunk.token_ids
                positions += _positions_of([chunk])
            if chunk.samples:
                wanted.append(len(rows) - 1)
        self._state.line_up(rows, (tokens, positions), wanted)
        self._state.flush()

    def logits(self, positions: Seq[int], num_wanted: int) -> Tensor:
        """Returns logits (num_wanted, vocab) of the step that the state has lined up, whose tokens
        are at these positions. Valid until the next step."""
        size, num_parts = self._extent(positions)
        if self.graphs is not None and num_parts <= self._most_parts(size):
            found = self.replay(size)
        else:
            found = self.compute(size, num_parts, 1 + max(positions))
        return found[:num_wanted]

    def _extent(self, positions: Seq[int]) -> tuple[int, int]:
        """The padded number of these tokens, and the number of KV splits of their contexts."""
        size = next(size for size in self._sizes if size >= len(positions))
        return size, size - len(positions) + _num_parts(positions)

    def compute(self, size: int, num_parts: int, longest: int) -> Tensor:
        """Computes a step of this size without a graph, and writes its KV. Returns the logits of
        all places that may be wanted. `num_parts`: KV splits of all contexts; `longest` context."""
        found = self._compute(size, num_parts, longest)
        return found if self._has_index(size) else found[self._wanted(size)]

    def _compute(self, size: int, num_parts: int, longest: int | None) -> Tensor:
        """As `compute`. If the head computes all places, returns the logits of all."""
        state, block_size = self._state, self.runner.block_size
        rows, given = state.order[:size], state.given[:, :size]
        token_ids, positions = (
            torch.where(given[i] == OWN, state.field(field, rows), given[i])
            for i, field in enumerate((TOKEN, POSITION))
        )
        step = RowsStep(rows, positions, state.tables, num_parts, longest, block_size)
        blocks = state.tables[rows, positions // block_size]
        paged = PagedStep(
            self.runner.cache,
            self._prepare_rows(step),
            blocks * block_size + positions % block_size,
            self.runner.kernels,
        )
        index = self._wanted(size)
        if not self._has_index(size):
            index = torch.arange(size, device=state.device)
        return self.runner.forward(token_ids[None], positions[None], index, paged)

    def replay(self, size: int) -> Tensor:
        """Does `compute` by a graph, for contexts with at most `_most_parts` KV splits."""
        assert self.graphs is not None
        assert self._logits is not None
        self.graphs.replay(size)
        return self._logits[: len(self._wanted(size))]

    def _wanted(self, size: int) -> Tensor:
        """The places of a step whose logits may be wanted."""
        return self._state.wanted[: min(size, self._most_wanted)]

    def _has_index(self, size: int) -> bool:
        """Whether the model's head computes only some places."""
        return size > self._most_wanted

    def _most_parts(self, size: int) -> int:
        """The most KV splits of all contexts in a recorded step."""
        of_one = -(-self._state.tables.shape[1] * self.runner.block_size // SPLIT_TOKENS)
        return min(size * of_one, size + _MOST_MORE_PARTS)

    def _compute_in_place(self, size: int) -> None:
        found = self._compute(size, self._most_parts(size), None)
        if self._logits is None:
            self._logits = found.new_empty(self._most_wanted, found.shape[1])
        wanted = self._wanted(size)
        if self._has_index(size):
            self._logits[: len(wanted)] = found
        else:
            torch.index_select(found, 0, wanted, out=self._logits[: len(wanted)])


def _positions_of(chunks: Iterable[Chunk]) -> list[int]:
    """The positions of all tokens of these chunks."""
    return [chunk.start + i for chunk in chunks for i in range(chunk.num_tokens)]


def _num_parts(positions: Iterable[int]) -> int:
    """The number of KV splits of the contexts that end at these positions."""
    return sum(position // SPLIT_TOKENS + 1 for position in positions)
