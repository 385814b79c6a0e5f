"""Runs steps one ahead: while the host finishes one step, the device computes the next.

Implements the engine's Model around a ModelRunner, with the same tokens. After each step it starts
the next one for all rows that will continue; their tokens come from device memory. The engine then
finds the rows it asks for already computed. Rows it no longer wants (ended, stopped or preempted)
are dropped. Rows not started, as prompts, are computed together with the next step of the others,
by a graph where they are few tokens.

This is safe because a row writes KV only behind its sequence's known tokens, in a block of its own,
and all device work is in one order: whoever gets the block next writes and reads later.

A step's logits come from state on the device (`RequestState`): one token for each of some rows, and
prompts, each of whose tokens is a row of its own with its sequence's table. Sampling is in
`drawing`. Over 300 lines: one step, started ahead, computed and read.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.engine.interface import Chunk, Padding, PromptLogprobs, Row, Sample
from workers.engine.masks import StepMasks
from workers.engine.sequence import Sequence
from workers.model.attention.interface import PreparedAttention
from workers.model.attention.reference import SPLIT_TOKENS, RowsStep
from workers.model.gpu.drawing import draw
from workers.model.gpu.graphs import Record, StepGraphs, padded_size, sizes_up_to
from workers.model.gpu.request_state import OWN, POSITION, TOKEN, HostCopy, RequestState
from workers.model.kv_cache import PagedStep
from workers.model.runner import ModelRunner, score_prompt, with_prompt
from workers.model.sampler import OPEN, rank_chosen, to_samples
from workers.model.staging import to_device

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


@dataclass(frozen=True, slots=True)
class _Started:
    """One row of the step in flight: the last token that its sequence will have by then."""

    block_id: int  # receives its KV
    index: int  # in the step's samples


class AheadRunner:
    """A ModelRunner with one step in flight."""

    shares_blocks = True
    runs_ahead = True

    def __init__(
        self,
        runner: ModelRunner,
        prepare_rows: PrepareRows,
        max_num_seqs: int,
        device: torch.device,
        record: Record | None = None,
    ) -> None:
        self._runner = runner
        self._device = device
        self.num_blocks, self.block_size = runner.num_blocks, runner.block_size
        self.max_model_len, self.eos_token_ids = runner.max_model_len, runner.eos_token_ids
        max_blocks = -(-runner.max_model_len // runner.block_size)
        self.state = RequestState(
            max_num_seqs,
            sizes_up_to(max_num_seqs)[-1],
            max_blocks,
            runner.cache.scratch_block_id,
            device,
        )
        self.decoder = RowsDecoder(runner, self.state, prepare_rows, record)
        self._started: dict[Sequence, _Started] = {}
        self._flight: _Draw | None = None
        self.num_rows_started = 0
        self.num_rows_used = 0

    @torch.inference_mode()
    def run(
        self, chunks: Seq[Chunk], padding: Seq[Padding] = (), masks: StepMasks | None = None
    ) -> list[Row]:
        started, flight = self._started, self._flight
        self._started, self._flight = {}, None
        used = {
            chunk.sequence: started[chunk.sequence]
            for chunk in chunks
            if self._was_started(chunk, started) and not _is_masked(chunk, masks)
        }
        rest = [chunk for chunk in chunks if chunk.sequence not in used]
        self.num_rows_used += len(used)
        drawn = [chunk for chunk in chunks if chunk.samples]
        answers: dict[Sequence, Row] = {}
        now: _Draw | None = None
        if padding or not self._admit(chunks):
            answers = self._run_now(rest, padding, masks)
        else:
            # The host waits for a prompt's token, and for one that decides the next mask, so
            # nothing is gained by starting those rows again.
            is_waited_for = any(c.num_tokens > 1 or _is_masked(c, masks) for c in rest)
            ready = [chunk for chunk in drawn if is_waited_for and chunk.sequence in used]
            answers, now = self._start_rest(rest, ready, masks)
            if not is_waited_for:
                self._start_next(drawn)
        samples = [] if flight is None else flight.read()
        answers |= {sequence: samples[started.index] for sequence, started in used.items()}
        if now is not None:
            sampled = [chunk.sequence for chunk in rest if chunk.samples]
            # If none is sampled, as in the middle of a prompt, nothing waits for the device.
            found = now.read() if sampled else []
            for sequence, row in zip(sampled, found, strict=False):
                prompt = answers.get(sequence)
                assert prompt is None or isinstance(prompt, PromptLogprobs)
                answers[sequence] = with_prompt(row, prompt)
        return self._settle(chunks, answers, masks)

    def _was_started(self, chunk: Chunk, rows: dict[Sequence, _Started]) -> bool:
        """Whether exactly this row is in flight."""
        started = rows.get(chunk.sequence)
        return (
            started is not None
            and chunk.num_tokens == 1
            and chunk.samples
            and chunk.copy_from is None
            and started.block_id == self._block_of(chunk)
        )

    def _admit(self, chunks: Seq[Chunk]) -> bool:
        """Assigns each sequence a row; False if there are too few."""
        busy = {chunk.sequence for chunk in chunks}
        return all(self.state.admit(chunk.sequence, busy) is not None for chunk in chunks)

    def _run_now(
        self, chunks: Seq[Chunk], padding: Seq[Padding], masks: StepMasks | None = None
    ) -> dict[Sequence, Row]:
        rows = self._runner.run(chunks, padding, masks)
        return {chunk.sequence: row for chunk, row in zip(chunks, rows, strict=True)}

    def _start_rest(
        self, rest: Seq[Chunk], ready: Seq[Chunk], masks: StepMasks | None
    ) -> tuple[dict[Sequence, Row], "_Draw | None"]:
        """Starts rows not in flight, and in the same forward the next step of the `ready` ones that
        continue. Returns the log probabilities of prompts, and the samples, in order."""
        if not rest:
            return {}, None
        nexts = self._nexts(ready)
        for chunk in rest:
            if chunk.samples:
                end = chunk.start + chunk.num_tokens
                self.state.place(chunk.sequence, chunk.sequence.token_ids[end - 1], end - 1)
        logits, scored = self._compute(rest, nexts)
        numbers, prompts, first = list[int](), dict[Sequence, Row](), 0
        drawn = [chunk for chunk in (*rest, *nexts) if chunk.samples]
        scores = list[tuple[Sequence, Tensor, int]]()
        for chunk, positions in zip((*rest, *nexts), scored, strict=True):
            if positions:
                part = logits[first : first + len(positions)]
                scores.append((chunk.sequence, part, positions.start))
            first += len(positions) + chunk.samples
            if chunk.samples:
                numbers.append(first - 1)
        if drawn:
            draw = self._choose(
                self._picked(logits, numbers), self._rows([c.sequence for c in drawn]), drawn, masks
            )
            self._note_started(nexts, len(drawn) - len(nexts))
            self._flight = draw if nexts else None
        else:
            # The next step waits for this one, so that no more than one is in flight.
            draw = self._flight = _Draw(logits.new_empty(0, dtype=torch.int64), None, [])
        for sequence, part, start in scores:
            prompts[sequence] = score_prompt(part, sequence, start)
        return prompts, draw

    def _compute(self, rest: Seq[Chunk], nexts: Seq[Chunk]) -> tuple[Tensor, Seq[range]]:
        """The logits of chunks, then of tokens known only to the device, and the positions that
        are scored. Single tokens are rows of the state, and so are prompts in a graph."""
        chunks = (*rest, *nexts)
        are_rows = all(chunk.num_tokens == 1 and chunk.samples for chunk in chunks)
        if (are_rows or self.decoder.has_graph_for(chunks)) and not any(
            chunk.sequence.scores_prompt for chunk in rest
        ):
            self._runner.copy_blocks(rest)
            return self.decoder.logits_of(chunks), [range(0)] * len(chunks)
        self.state.flush()
        tokens = self.state.field(TOKEN, self._rows([chunk.sequence for chunk in nexts]))
        return self._runner.logits_beside(rest, nexts, tokens)

    def _rows(self, sequences: Seq[Sequence]) -> Tensor:
        """The state's rows of these, int64 (n,)."""
        rows = [self.state.row_of(sequence) for sequence in sequences]
        return to_device(np.array(rows, dtype=np.int64), self._device)

    def _picked(self, logits: Tensor, numbers: list[int]) -> Tensor:
        """Rows of logits (num_rows, vocab_size)."""
        if numbers == list(range(len(logits))):
            return logits
        return logits[to_device(np.array(numbers, dtype=np.int64), self._device)]

    def _block_of(self, chunk: Chunk) -> int:
        return chunk.sequence.block_ids[chunk.start // self.block_size]

    def _start_next(self, chunks: Seq[Chunk]) -> None:
        """Starts one more step of all continuing rows, from tokens known only to the device."""
        nexts = self._nexts(chunks)
        if not nexts:
            return
        logits = self.decoder.logits_of(nexts)
        self._flight = self._choose(logits, self.state.order[: len(nexts)], nexts)
        self._note_started(nexts, 0)

    def _nexts(self, chunks: Seq[Chunk]) -> list[Chunk]:
        """The next step of those that continue: tokens that are not in their sequences yet."""
        return [
            Chunk(chunk.sequence, chunk.start + chunk.num_tokens, 1, samples=True)
            for chunk in chunks
            if self._goes_on(chunk)
        ]

    def _note_started(self, nexts: Seq[Chunk], first: int) -> None:
        """Notes that these rows are in flight, `first ..` of its samples."""
        for index, chunk in enumerate(nexts, first):
            self._started[chunk.sequence] = _Started(self._block_of(chunk), index)
        self.num_rows_started += len(nexts)

    def _choose(
        self, logits: Tensor, rows: Tensor, chunks: Seq[Chunk], masks: StepMasks | None = None
    ) -> "_Draw":
        """Samples the rows' next tokens and advances the rows. logits (n, vocab), rows (n,)."""
        sequences = [chunk.sequence for chunk in chunks]
        lengths = [chunk.start + chunk.num_tokens for chunk in chunks]
        token_ids = draw(logits, self.state, rows, sequences, lengths, masks)
        self.state.advance(rows, token_ids.clamp(min=0))
        self.state.note_advance(sequences)
        return _Draw(token_ids, rank_chosen(logits, token_ids, sequences), sequences)

    def _goes_on(self, chunk: Chunk) -> bool:
        """Whether the sequence needs another token after this chunk's, and has a slot for it."""
        sequence, position = chunk.sequence, chunk.start + chunk.num_tokens
        return (
            sequence.num_output + 1 < sequence.max_output
            and position + 1 < self.max_model_len
            and position < len(sequence.block_ids) * self.block_size
        )

    def _settle(
        self, chunks: Seq[Chunk], answers: dict[Sequence, Row], masks: StepMasks | None
    ) -> list[Row]:
        """One row per chunk. Rows the device could not decide are recomputed and sampled here."""
        is_open = [c for c in chunks if c.samples and _is_open(answers[c.sequence])]
        if is_open:
            answers |= self._run_now(is_open, (), masks)
            for chunk in is_open:
                self._started.pop(chunk.sequence, None)  # it was given another token
        return [answers.get(chunk.sequence) for chunk in chunks]


class _Draw:
    """The samples of one step, being copied to the host."""

    def __init__(self, token_ids: Tensor, ranked: Tensor | None, sequences: Seq[Sequence]) -> None:
        """token_ids int64 (n,), of the sequences; `ranked` as `rank_chosen` gives it."""
        self._token_ids = HostCopy(token_ids)
        self._ranked = None if ranked is None else HostCopy(ranked)
        self._sequences = sequences

    def read(self) -> list[Sample]:
        """Waits for the step. Samples without a token have OPEN."""
        token_ids = self._token_ids.read()
        return to_samples(token_ids, self._ranked.read() if self._ranked else (), self._sequences)


def _is_masked(chunk: Chunk, masks: StepMasks | None) -> bool:
    return masks is not None and masks.constrains(chunk.sequence)


def _is_open(row: Row) -> bool:
    return isinstance(row, Sample) and row.token_id == OPEN
