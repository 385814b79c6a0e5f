"""Runs steps one ahead: while the host finishes one step, the device computes the next.

Implements the engine's Model around a ModelRunner, with the same tokens. After each step it starts
the next one for all rows that will continue; their tokens come from device memory. The engine then
finds the rows it asks for already computed. Rows it no longer wants (ended, stopped or preempted)
are dropped. Rows not started, as prompts, are computed together with the next step of the others,
by a graph where they are few tokens.

This is safe because a row writes KV only behind its sequence's known tokens, in a block of its own,
and all device work is in one order: whoever gets the block next writes and reads later.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.engine.interface import Chunk, Padding, Row, Sample
from workers.engine.masks import StepMasks
from workers.engine.sequence import Sequence
from workers.model.ahead.decode import PrepareRows, RowsDecoder
from workers.model.answers import answer_chunks
from workers.model.gpu.drawing import can_draw, draw, wishes_of
from workers.model.gpu.graphs import Record, sizes_up_to
from workers.model.gpu.request_state import OPEN, TOKEN, HostCopy, RequestState
from workers.model.runner import ModelRunner
from workers.model.staging import to_device


@dataclass(frozen=True, slots=True)
class _Started:
    """One row of the step in flight: the last token that its sequence will have by then."""

    block_id: int  # receives its KV
    index: int  # in the step's ids


class AheadRunner:
    """A ModelRunner with one step in flight."""

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
        max_blocks = -(-runner.max_model_len // runner.block_size)
        self.state = RequestState(
            max_num_seqs,
            sizes_up_to(max_num_seqs)[-1],
            max_blocks,
            runner.cache.scratch_block_id,
            device,
        )
        self.decoder = RowsDecoder(runner, self.state, prepare_rows, record)
        self._flight: dict[Sequence, _Started] = {}
        self._flight_ids: HostCopy | None = None
        self.num_rows_started = 0
        self.num_rows_used = 0

    @property
    def num_blocks(self) -> int:
        return self._runner.num_blocks

    @property
    def block_size(self) -> int:
        return self._runner.block_size

    @property
    def shares_blocks(self) -> bool:
        return self._runner.shares_blocks

    @property
    def runs_ahead(self) -> bool:
        return True

    @property
    def max_model_len(self) -> int:
        return self._runner.max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._runner.eos_token_ids

    @torch.inference_mode()
    def run(
        self, chunks: Seq[Chunk], padding: Seq[Padding] = (), masks: StepMasks | None = None
    ) -> list[Row]:
        flight, flight_ids = self._flight, self._flight_ids
        self._flight, self._flight_ids = {}, None
        used = {
            chunk.sequence: flight[chunk.sequence]
            for chunk in chunks
            if self._was_started(chunk, flight) and not _is_masked(chunk, masks)
        }
        rest = [chunk for chunk in chunks if chunk.sequence not in used]
        self.num_rows_used += len(used)
        drawn = [chunk for chunk in chunks if chunk.samples]
        answers: dict[Sequence, Row] = {}
        rest_ids: HostCopy | None = None
        if padding or not self._admit(chunks):
            answers = self._run_now(rest, padding, masks)
        else:
            hosted = [chunk for chunk in rest if _is_hosted(chunk, masks)]
            # The host waits for a prompt's token and for a row that it samples itself, so nothing
            # is gained by starting those rows again.
            is_waited_for = bool(hosted) or any(chunk.num_tokens > 1 for chunk in rest)
            ready = [chunk for chunk in drawn if is_waited_for and chunk.sequence in used]
            answers, rest_ids = self._start_rest(rest, ready, hosted, masks)
            if not is_waited_for:
                self._start_next(drawn)
        token_ids = [] if flight_ids is None else flight_ids.read()
        answers |= {s: _sample(token_ids[started.index]) for s, started in used.items()}
        if rest_ids is not None:
            sampled = [c.sequence for c in rest if c.samples and c.sequence not in answers]
            # If none is sampled, as in the middle of a prompt, nothing waits for the device.
            ids = rest_ids.read()[: len(sampled)] if sampled else []
            answers |= dict(zip(sampled, map(_sample, ids), strict=True))
        return self._settle(chunks, answers)

    def _was_started(self, chunk: Chunk, flight: dict[Sequence, _Started]) -> bool:
        """Whether exactly this row is in flight."""
        started = flight.get(chunk.sequence)
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
        self,
        rest: Seq[Chunk],
        ready: Seq[Chunk],
        hosted: Seq[Chunk],
        masks: StepMasks | None,
    ) -> tuple[dict[Sequence, Row], HostCopy | None]:
        """Starts rows not in flight, and in the same forward the next step of the `ready` ones that
        continue. Returns the rows that the host samples, and the ids of the others, in order."""
        if not rest:
            return {}, None
        on = [chunk for chunk in ready if self._goes_on(chunk)]
        nexts = [Chunk(chunk.sequence, chunk.start + 1, 1, samples=True) for chunk in on]
        for chunk in rest:
            if chunk.samples:
                end = chunk.start + chunk.num_tokens
                self.state.place(chunk.sequence, chunk.sequence.token_ids[end - 1], end - 1)
        logits, scored = self._compute(rest, nexts)
        rows_of = _rows_of((*rest, *nexts), scored)
        by_host = {chunk.sequence for chunk in hosted}
        by_device = [c for c in rest if c.samples and c.sequence not in by_host]
        numbers = [rows_of[chunk.sequence][-1] for chunk in (*by_device, *nexts)]
        ids: HostCopy | None = None
        if not numbers and not hosted:
            # The next step waits for this one, so that no more than one is in flight.
            self._flight_ids = HostCopy(logits.new_empty(0, dtype=torch.int64))
        if numbers:
            sequences = [chunk.sequence for chunk in (*by_device, *nexts)]
            order = self._rows(sequences)
            ids = self._choose(self._picked(logits, numbers), order, sequences)
            for index, chunk in enumerate(nexts, len(by_device)):
                self._flight[chunk.sequence] = _Started(self._block_of(chunk), index)
            self._flight_ids = ids if nexts else None
            self.num_rows_started += len(nexts)
        if not hosted:
            return {}, ids
        answers = answer_chunks(
            self._picked(logits, [n for chunk in hosted for n in rows_of[chunk.sequence]]),
            hosted,
            [
                positions
                for c, positions in zip(rest, scored, strict=False)
                if c.sequence in by_host
            ],
            self._runner.find_likeliest,
            masks,
        )
        return dict(zip((c.sequence for c in hosted), answers, strict=True)), ids

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
        on = [chunk for chunk in chunks if self._goes_on(chunk)]
        if not on:
            return
        nexts = [
            Chunk(chunk.sequence, chunk.start + chunk.num_tokens, 1, samples=True) for chunk in on
        ]
        for index, chunk in enumerate(nexts):
            self._flight[chunk.sequence] = _Started(self._block_of(chunk), index)
        logits = self.decoder.logits_of(nexts)
        sequences = [chunk.sequence for chunk in nexts]
        self._flight_ids = self._choose(logits, self.state.order[: len(nexts)], sequences)
        self.num_rows_started += len(nexts)

    def _choose(self, logits: Tensor, rows: Tensor, sequences: Seq[Sequence]) -> HostCopy:
        """Samples the rows' next tokens and advances the rows. logits (n, vocab), rows (n,)."""
        token_ids = draw(logits, self.state, rows, wishes_of(sequences))
        self.state.advance(rows, token_ids.clamp(min=0))
        self.state.note_advance(sequences)
        return HostCopy(token_ids)

    def _goes_on(self, chunk: Chunk) -> bool:
        """Whether the sequence needs another token after this chunk's, and has a slot for it."""
        sequence, position = chunk.sequence, chunk.start + chunk.num_tokens
        return (
            sequence.num_output + 1 < sequence.max_output
            and position + 1 < self.max_model_len
            and position < len(sequence.block_ids) * self.block_size
        )

    def _settle(self, chunks: Seq[Chunk], answers: dict[Sequence, Row]) -> list[Row]:
        """One row per chunk. Rows the device could not decide are recomputed and sampled here."""
        is_open = [c for c in chunks if c.samples and _is_open(answers[c.sequence])]
        if is_open:
            answers |= self._run_now(is_open, ())
            for chunk in is_open:
                self._flight.pop(chunk.sequence, None)  # it was given another token
        return [answers.get(chunk.sequence) for chunk in chunks]


def _is_masked(chunk: Chunk, masks: StepMasks | None) -> bool:
    return masks is not None and masks.constrains(chunk.sequence)


def _is_hosted(chunk: Chunk, masks: StepMasks | None) -> bool:
    """Whether the host computes the chunk's answer from logits."""
    sequence = chunk.sequence
    is_odd = not can_draw(sequence) or _is_masked(chunk, masks)
    return sequence.scores_prompt or (chunk.samples and is_odd)


def _rows_of(chunks: Seq[Chunk], scored: Seq[range]) -> dict[Sequence, range]:
    """Each chunk's rows of the logits."""
    rows, first = {}, 0
    for chunk, positions in zip(chunks, scored, strict=True):
        num_rows = len(positions) + chunk.samples
        rows[chunk.sequence] = range(first, first + num_rows)
        first += num_rows
    return rows


def _sample(token_id: int) -> Sample:
    return Sample(token_id)


def _is_open(row: Row) -> bool:
    return isinstance(row, Sample) and row.token_id == OPEN
