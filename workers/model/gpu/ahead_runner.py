"""Runs steps one ahead: while the host finishes one step, the device computes the next.

Implements the engine's Model around a ModelRunner, with the same tokens. After each step it starts
the next one for all rows that will continue; their tokens come from device memory. The engine then
finds the rows it asks for already computed. Rows it no longer wants (ended, stopped or preempted)
are dropped; rows not started are computed as usual.

This is safe because a row writes KV only behind its sequence's known tokens, in a block of its own,
and all device work is in one order: whoever gets the block next writes and reads later.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.engine.grammar import StepMasks
from workers.engine.model import Chunk, Padding, Row, Sample
from workers.engine.sequence import Sequence
from workers.model.gpu.decode import PrepareRows, RowsDecoder
from workers.model.gpu.drawing import OPEN, can_draw, draw, wishes_of
from workers.model.gpu.graphs import Record, padded_size
from workers.model.gpu.request_state import HostCopy, RequestState, to_device
from workers.model.runner import ModelRunner


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
            padded_size(max_num_seqs),
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
        used = {c.sequence: flight[c.sequence] for c in chunks if self._was_started(c, flight)}
        rest = [chunk for chunk in chunks if chunk.sequence not in used]
        self.num_rows_used += len(used)
        drawn = [chunk for chunk in chunks if chunk.samples]
        rest_ids: HostCopy | None = None
        answers: dict[Sequence, Row] = {}
        scores_prompts = any(chunk.sequence.scores_prompt for chunk in chunks)
        if padding or masks is not None or scores_prompts or not self._admit(drawn):
            answers = self._run_now(rest, padding, masks)
        else:
            rest_ids = self._start_rest(rest)
            self._start_next(drawn)
        token_ids = [] if flight_ids is None else flight_ids.read()
        answers |= {s: _sample(token_ids[started.index]) for s, started in used.items()}
        if rest_ids is not None:
            sampled = [chunk.sequence for chunk in rest if chunk.samples]
            answers |= dict(zip(sampled, map(_sample, rest_ids.read()), strict=True))
        return self._settle(chunks, answers)

    def _was_started(self, chunk: Chunk, flight: dict[Sequence, _Started]) -> bool:
        """Whether exactly this row is in flight."""
        started = flight.get(chunk.sequence)
        return (
            started is not None
            and chunk.num_tokens == 1
            and chunk.samples
            and chunk.copy_from is None
            and started.block_id == chunk.sequence.block_ids[chunk.start // self.block_size]
        )

    def _admit(self, chunks: Seq[Chunk]) -> bool:
        """Assigns each sampling sequence a row; False if some cannot be sampled on the device."""
        busy = {chunk.sequence for chunk in chunks}
        return all(
            can_draw(chunk.sequence) and self.state.admit(chunk.sequence, busy) is not None
            for chunk in chunks
        )

    def _run_now(
        self, chunks: Seq[Chunk], padding: Seq[Padding], masks: StepMasks | None = None
    ) -> dict[Sequence, Row]:
        rows = self._runner.run(chunks, padding, masks)
        return {chunk.sequence: row for chunk, row in zip(chunks, rows, strict=True)}

    def _start_rest(self, chunks: Seq[Chunk]) -> HostCopy | None:
        """Starts rows not in flight. Returns the sampled ids, in order."""
        if not chunks:
            return None
        logits = self._runner.logits(chunks)
        sequences = [chunk.sequence for chunk in chunks if chunk.samples]
        if not sequences:
            return None
        rows = []
        for chunk in chunks:
            if chunk.samples:
                end = chunk.start + chunk.num_tokens
                self.state.place(chunk.sequence, chunk.sequence.token_ids[end - 1], end - 1)
                rows.append(self.state.row_of(chunk.sequence))
        self.state.flush()
        order = to_device(np.array(rows, dtype=np.int64), self._device)
        return self._choose(logits, order, sequences)

    def _start_next(self, chunks: Seq[Chunk]) -> None:
        """Starts one more step of all continuing rows, from tokens known only to the device."""
        on = [chunk for chunk in chunks if self._goes_on(chunk)]
        if not on:
            return
        for index, chunk in enumerate(on):
            sequence, position = chunk.sequence, chunk.start + chunk.num_tokens
            self.state.cover(sequence)
            block_id = sequence.block_ids[position // self.block_size]
            self._flight[sequence] = _Started(block_id, index)
        sequences = [chunk.sequence for chunk in on]
        self.state.line_up([self.state.row_of(sequence) for sequence in sequences])
        self.state.flush()
        longest = 1 + max(chunk.start + chunk.num_tokens for chunk in on)
        logits = self.decoder.logits(len(on), longest)
        self._flight_ids = self._choose(logits, self.state.order[: len(on)], sequences)
        self.num_rows_started += len(on)
        if self.decoder.graphs is not None:
            self.decoder.graphs.record_next()

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


def _sample(token_id: int) -> Sample:
    return Sample(token_id)


def _is_open(row: Row) -> bool:
    return isinstance(row, Sample) and row.token_id == OPEN
