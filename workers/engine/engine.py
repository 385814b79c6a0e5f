"""The engine: takes jobs, runs one step at a time, reports the results.

The scheduler orders the work, the model computes, and the supervisor handles text and the log. It
has one thread, and only the model blocks.
"""

import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import replace

from contract.jobs import FinishReason
from workers.engine.admission_check import RecentLengths
from workers.engine.block_manager import blocks_of
from workers.engine.constraints import POLL_S, Constraints
from workers.engine.grammar import GrammarFailed, Grammars
from workers.engine.interface import (
    Chunk,
    Drawn,
    EngineLimits,
    Model,
    Row,
    RowFailed,
    Sample,
    Vector,
)
from workers.engine.jobs import JobEngine
from workers.engine.masks import StepMasks
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence
from workers.engine.step_plan import StepPlan, StepReport, marks_of, token_out
from workers.engine.strategy import Strategies, Strategy, StrategyBatches, num_tokens_of
from workers.ipc.messages import TokenOut, VectorOut
from workers.lanes import DEFAULT_LANES, WARM, Lane


class Engine(JobEngine):
    """Runs the choices of many jobs through one model, one step at a time."""

    def __init__(
        self,
        model: Model,
        limits: EngineLimits,
        strategies: Strategy | Strategies,
        clock_s: Callable[[], float] = time.monotonic,
        *,
        lanes: Seq[Lane] = DEFAULT_LANES,
        lengths: RecentLengths | None = None,
        model_revision: str = "",
        grammars: Grammars | None = None,
    ) -> None:
        self._model = model
        self._lengths = lengths or RecentLengths()
        self._blocks = blocks_of(model, limits, model_revision)
        if not isinstance(strategies, Strategies):
            strategies = Strategies(strategies)
        self._batches = StrategyBatches(strategies, limits.max_num_seqs)
        self._is_idle = False  # all that runs waits for masks
        scheduler = Scheduler(self._blocks, limits, lanes, self._lengths)
        # A model with a state for each sequence would compute a late row's from its start again.
        constraints = Constraints(grammars, model.max_model_len, skips_late=self._blocks.can_share)
        super().__init__(
            scheduler,
            constraints,
            limits,
            model.eos_token_ids,
            model.max_model_len,
            self._blocks.num_blocks * self._blocks.block_size,
            clock_s,
        )

    def next_wake_s(self) -> float | None:
        """As `JobEngine.next_wake_s`; later is after a strategy's wait, a deadline, a retention."""
        now_s = self._clock_s()
        if self._ended_early or (self._batches.num_admitted and not self._is_idle):
            return now_s
        poll_s = now_s + POLL_S if self._constraints.is_compiling or self._is_idle else None
        gone_s = self._blocks.retention.next_s
        wakes_s = (self._batches.wake_s(now_s), self._deadlines.next_s, poll_s, gone_s)
        return min((wake_s for wake_s in wakes_s if wake_s is not None), default=None)

    def reconfigure(
        self, limits: EngineLimits, strategies: Strategies, lanes: Seq[Lane] = DEFAULT_LANES
    ) -> None:
        """Applies from the next step on. Running sequences continue even above a smaller limit,
        open batches stay open until they end, and the prefix cache is kept. With states beside the
        blocks, no more sequences run than had a slot at the start.
        """
        if (states := self._blocks.states) is not None:
            most = min(limits.max_num_seqs, states.num_running)
            limits = replace(limits, max_num_seqs=most)
        self._limits = limits
        self._scheduler.reconfigure(limits, lanes)
        self._batches.reconfigure(strategies, limits.max_num_seqs)

    def reprioritise(
        self, job_id: str, epoch: int, lane: str, deadline_s: float | None = None
    ) -> None:
        """As `JobEngine.reprioritise`."""
        super().reprioritise(job_id, epoch, lane, deadline_s)
        self._batches.note_move()

    def preempt(self, job_id: str) -> None:
        """Preempts a job, as memory pressure does; it continues when there is room."""
        for sequence in self._scheduler.running:
            if sequence.job_id == job_id:
                self._scheduler.preempt(sequence)

    def evict_cache(self) -> None:
        """Empties the prefix cache of all that no running sequence holds."""
        self._blocks.evict()

    @property
    def blank_block_ids(self) -> list[int]:
        """Blocks whose content is never read again; tests overwrite them."""
        return self._blocks.blank_ids

    def step(self, announce: Callable[[Seq[Chunk]], None] | None = None) -> StepReport:
        """Runs one step. Raises what the model raises; the engine cannot be used afterwards.

        `announce` is called with the step's chunks before they are computed.
        """
        start_s = self._clock_s()
        report = self._begin_step(start_s)
        self._blocks.sort(self._blocks.retention.expire(start_s))
        entered = self._batches.admit(self._scheduler.place, start_s)
        self._scheduler.admit(entered)
        padding = self._batches.padding_due(self._limits.max_num_batched_tokens)
        num_tokens = self._limits.max_num_batched_tokens - num_tokens_of(padding)
        plan = self._scheduler.plan(start_s, num_tokens)
        chunks = list(plan.chunks.values())
        padding += self._batches.padding_beside(chunks, plan.num_tokens_left)
        if chunks or padding:
            if announce is not None:
                announce(chunks)
            start_s = self._clock_s()
            masks = self._constraints.start_masks(chunks)
            rows = self._model.run(chunks, padding, masks)
            report.step_s = self._clock_s() - start_s
            late = _late(masks, chunks)
            if late:
                self._scheduler.hold(plan, late)
            settled = self._scheduler.settle(plan, padding, report.step_s)
            report.num_recomputed_tokens, report.predicted_s = settled
            self._apply(chunks, rows, late, report)
        self._is_idle = not chunks and self._scheduler.num_held > 0
        self._count(plan, report)
        report.num_padding_tokens = num_tokens_of(padding)
        return report

    def audit(self) -> None:
        """Asserts the invariants between steps; for tests and for finding leaks."""
        running = self._scheduler.running
        self._blocks.audit(running)
        num_sequences = sum(
            len(job.sequences)
            for job_id, job in self._jobs.items()
            if not self._constraints.holds(job_id)
        )
        assert num_sequences == self._scheduler.num_running + self._scheduler.num_waiting

    def _count(self, plan: StepPlan, report: StepReport) -> None:
        num_streams, scheduler = len(plan.served_together.sequences), self._scheduler
        num_each = [chunk.num_tokens for chunk in plan.served_singly]
        num_drafted = sum([len(chunk.drafts) for chunk in plan.served_singly])
        num_known = [chunk.num_known for chunk in plan.served_singly]
        report.num_running, report.num_waiting = scheduler.num_running, scheduler.num_waiting
        report.waiting_lanes = scheduler.waiting_lanes
        report.num_free_blocks = self._blocks.num_free
        report.num_cached_blocks = self._blocks.num_cached
        report.num_retained_blocks = len(self._blocks.retained_ids)
        report.num_step_seqs = num_streams + len(num_each)
        report.num_step_tokens = num_streams + sum(num_each)
        report.num_decode_tokens = num_streams + num_known.count(1) + num_drafted
        report.num_drafted_tokens = num_drafted
        report.num_preemptions = len(plan.preempted)
        report.gives_way = bool(plan.limited)
        report.marks = marks_of(plan)
        report.num_prefix_queries = plan.num_prefix_queries
        report.num_prefix_hits = plan.num_prefix_hits
        report.prefixes = plan.prefixes

    def _enter(self, sequence: Sequence) -> None:
        self._scheduler.add(sequence)
        self._batches.add(sequence)

    def _leave(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            self._batches.remove(sequence)
            self._blocks.retention.note_end(sequence)

    def _force(self, sequence: Sequence, report: StepReport) -> None:
        self._constraints.force(sequence, report)

    def _take_constrained(self, sequence: Sequence, row: Sample, report: StepReport) -> None:
        try:
            self._constraints.take(sequence, row, report)
        except GrammarFailed as failure:
            self._fail(sequence, str(failure), report, failure.code)
            return
        if row.prompt_logprobs is not None:
            report.add_scores(sequence, row.prompt_logprobs)
        if sequence.finish_reason is not None:
            self._finish(sequence)

    def _take_drawn(self, chunk: Chunk, drawn: Drawn, report: StepReport) -> None:
        """Takes tokens drawn up to the draft's first mistake, and those that a grammar forces."""
        sequence, num_before = chunk.sequence, chunk.sequence.num_known
        drafted_ids = chunk.token_ids[chunk.num_known :]
        num_new = num_right = 0
        while num_right == num_new and sequence.finish_reason is None:
            row = drawn.rows[num_new]
            try:
                if isinstance(row, RowFailed):
                    self._fail(sequence, row.message, report)
                    return
                self._constraints.take(sequence, row, report)
            except GrammarFailed as failure:
                self._fail(sequence, str(failure), report, failure.code)
                return
            num_new = sequence.num_known - num_before
            num_right = _num_equal(drafted_ids, sequence.token_ids[num_before:])
        report.num_accepted_tokens += num_right
        self._scheduler.keep(sequence, num_right)
        if sequence.finish_reason is not None:
            self._finish(sequence)

    def _apply(
        self,
        chunks: list[Chunk],
        rows: Seq[Row],
        late: Collection[Sequence],
        report: StepReport,
    ) -> None:
        """Takes the model's results. A failed row fails its whole job; what was drawn for a row
        whose mask was late is dropped."""
        append, failed = report.outputs.append, report.failed
        for chunk, row in zip(chunks, rows, strict=True):
            sequence = chunk.sequence
            if failed and not self._holds(sequence):
                continue  # another choice of its job has failed in this step
            if sequence in late and isinstance(row, Sample | Drawn):
                if isinstance(row, Sample) and row.prompt_logprobs is not None:
                    report.add_scores(sequence, row.prompt_logprobs)
                continue
            if isinstance(row, Sample):
                assert chunk.samples, "who has not reached the last token yields none"
                if sequence.matcher is not None:
                    self._take_constrained(sequence, row, report)
                    continue
                token_ids, token_id, end = sequence.token_ids, row.token_id, None
                position = len(token_ids) - sequence.num_prompt
                token_ids.append(token_id)
                if position + 1 >= sequence.max_output or token_id in sequence.ending_ids:
                    end = sequence.finish_reason = sequence.end_reason(self._model.max_model_len)
                if sequence.params.logprobs is None:  # most tokens: without a call
                    job_id = sequence.job_id
                    append(
                        TokenOut(job_id, sequence.epoch, sequence.choice, position, token_id, end)
                    )
                else:
                    found = row.logprob, row.top_logprobs
                    append(token_out(sequence, position, token_id, end, *found))
                if end is not None:
                    self._finish(sequence)
                if row.prompt_logprobs is not None:
                    report.add_scores(sequence, row.prompt_logprobs)
            elif isinstance(row, Vector):
                sequence.finish_reason = FinishReason.STOP
                out = VectorOut(sequence.job_id, sequence.epoch, sequence.choice, row.data)
                report.vectors.append(out)
                self._finish(sequence)
            elif isinstance(row, Drawn):
                self._take_drawn(chunk, row, report)
            elif isinstance(row, RowFailed):
                self._fail(sequence, row.message, report)
            else:
                assert not chunk.samples, "who reaches the last token yields a sample"
                if row is not None:
                    report.add_scores(sequence, row)

    def _finish(self, sequence: Sequence) -> None:
        if sequence.lane != WARM.name:
            self._lengths.observe(sequence)
        self._remove([sequence])


def _num_equal(one: Seq[int], other: Seq[int]) -> int:
    """The number of leading elements that are equal in both."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _late(masks: StepMasks | None, chunks: Seq[Chunk]) -> set[Sequence]:
    """The sequences of the step whose masks were late."""
    if masks is None or not masks.late:
        return set()
    return {chunk.sequence for chunk in chunks if not masks.late.isdisjoint(chunk.sampled)}
