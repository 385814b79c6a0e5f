"""Runs jobs on a host that computes requests together, such as vLLM, and has places for some.

The scheduler of batchway's own engine decides who has the places: to it, a place is a block in
which a whole context fits. Who is displaced leaves the host, and comes back with its output so far.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from workers.engine.block_manager import BlockManager
from workers.engine.constraints import POLL_S, Constraints
from workers.engine.grammar import GrammarFailed, Grammars
from workers.engine.interface import Chunk, EngineLimits, PromptLogprobs, Sample
from workers.engine.jobs import JobEngine
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import RequestRefused, Sequence
from workers.engine.step_plan import UNLIMITED, StepReport, prefix_found
from workers.engine.strategy import Strategies
from workers.lanes import DEFAULT_LANES, Lane

_STALLED_STEPS = 256  # without output; a prompt takes fewer


@dataclass(frozen=True, slots=True)
class HostOutput:
    """What a step yields for a sequence: tokens, or why there are none."""

    sequence: Sequence
    samples: Seq[Sample]
    prompt_samples: tuple[Sample, ...] = ()  # from the prompt's second token on
    num_cached: int = 0  # leading tokens whose KV the host had when the request came
    end: str | None = None  # the host has ended the request, and says why


class Host(Protocol):
    """Computes the requests that it is given, at most `num_places` at a time."""

    num_places: int
    max_model_len: int
    num_step_tokens: int  # the most that a step computes
    num_kv_tokens: int

    def start(self, sequence: Sequence, priority: int) -> None:
        """Continues a sequence after its known tokens. The host serves the smallest priority
        first where its KV cache is short. Raises RequestRefused."""

    def abort(self, sequences: Seq[Sequence]) -> None:
        """Ends requests, before the next step; those that have ended are ignored."""

    def step(self) -> list[HostOutput]:
        """Waits for the next step of the requests; there is at least one. Yields nothing for those
        that were aborted."""

    def count(self, report: StepReport) -> None:
        """Adds the counts of the steps since the last call."""


class PlacingEngine(JobEngine):
    """Calls and reports as `workers.engine.engine.Engine`. Each choice is a request of the host."""

    def __init__(
        self,
        host: Host,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        lanes: Seq[Lane] = DEFAULT_LANES,
        grammars: Grammars | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `grammars`, constrained jobs are refused."""
        self._host = host
        self._hosted: dict[Sequence, int] = {}  # each with the step of its last output
        self._stalled: set[Sequence] = set()  # of them, those that the host keeps waiting
        self._num_steps = 0
        self._has_new = False  # since the last announcement
        places = BlockManager(host.num_places, host.max_model_len, can_share=False)
        limits = EngineLimits(host.num_step_tokens, host.num_places, vocab_size, kv_high_water=1.0)
        super().__init__(
            Scheduler(places, limits, lanes),
            Constraints(grammars, host.max_model_len),
            limits,
            eos_token_ids,
            host.max_model_len,
            host.num_kv_tokens,
            clock_s,
        )

    def reconfigure(
        self, limits: EngineLimits, strategies: Strategies | None, lanes: Seq[Lane] = DEFAULT_LANES
    ) -> None:
        """Applies new lanes from the next step on; the host's own limits stay as they are."""
        self._scheduler.reconfigure(self._limits, lanes)

    def next_wake_s(self) -> float | None:
        """As `Engine.next_wake_s`."""
        if self._ended_early or self._scheduler.num_running or self._scheduler.num_waiting:
            return self._clock_s()
        poll_s = self._clock_s() + POLL_S if self._constraints.is_compiling else None
        return min((s for s in (self._deadlines.next_s, poll_s) if s is not None), default=None)

    def step(self, announce: Callable[[Seq[Chunk]], None] | None = None) -> StepReport:
        """Hands out places, then waits for a step of the host. Raises what the host raises if it
        has died."""
        start_s = self._clock_s()
        report = self._begin_step(start_s)
        num_displaced = self._hand_out_places(start_s, report)
        if self._hosted:
            if self._has_new and announce is not None:
                computed = [sequence for sequence in self._hosted if sequence not in self._stalled]
                announce([Chunk(sequence, 0, 1, samples=True) for sequence in computed])
            self._has_new = False
            self._num_steps += 1
            outputs = self._host.step()
            report.num_recomputed_tokens = self._account(outputs, report)
            for output in outputs:
                self._take(output, report)
            report.step_s = self._clock_s() - start_s
        self._host.count(report)
        report.num_preemptions += num_displaced
        self._count_waiting(report)
        return report

    def _hand_out_places(self, now_s: float, report: StepReport) -> int:
        """Aborts what is displaced and starts what has a place. Returns how many were displaced."""
        plan = self._scheduler.plan(now_s, UNLIMITED)
        self._leave(list(plan.preempted))
        for sequence in self._scheduler.running:
            if sequence in self._hosted or not self._holds(sequence):
                continue
            try:
                self._host.start(sequence, self._scheduler.priority_of(sequence))
            except RequestRefused as refusal:
                self._fail(sequence, refusal.message, report, refusal.code)
                continue
            self._hosted[sequence] = self._num_steps
            self._has_new = True
        return len(plan.preempted)

    def _account(self, outputs: Seq[HostOutput], report: StepReport) -> int:
        """Accounts for a step; returns how many of its tokens had been computed before."""
        chunks = []
        for output in outputs:
            sequence = output.sequence
            if output.samples:
                if sequence.num_computed == 0:
                    report.prefixes += prefix_found(sequence, output.num_cached)
                start = sequence.num_computed or min(output.num_cached, sequence.num_known - 1)
                chunks.append(Chunk(sequence, start, sequence.num_known - start, samples=True))
        num_recomputed = self._scheduler.account(chunks)
        for output in outputs:
            if len(output.samples) > 1:
                self._scheduler.keep(output.sequence, len(output.samples) - 1)
        return num_recomputed

    def _take(self, output: HostOutput, report: StepReport) -> None:
        sequence = output.sequence
        if sequence not in self._hosted:
            return  # another choice of its job has failed in this step
        self._hosted[sequence] = self._num_steps
        if output.prompt_samples:
            report.add_scores(sequence, PromptLogprobs(1, output.prompt_samples))
        for sample in output.samples:
            try:
                self._constraints.append(sequence, sample, report)
            except GrammarFailed as failure:
                self._fail(sequence, str(failure), report, failure.code)
                return
            if sequence.finish_reason is not None:
                self._remove([sequence])
                return
        if output.end is not None:  # and no token says why
            self._fail(sequence, f"vLLM ended the request: {output.end}", report)

    def _count_waiting(self, report: StepReport) -> None:
        """Adds what waits here. What waits in the host, for KV blocks or its turn, is among those
        that have got no token there, or none for long."""
        lanes = set(self._scheduler.waiting_lanes)
        stalled = set[Sequence]()
        if report.num_waiting:
            since = self._num_steps - _STALLED_STEPS
            stalled = {sequence for sequence, last in self._hosted.items() if last < since}
            fresh = {sequence for sequence in self._hosted if sequence.num_computed == 0}
            lanes |= {sequence.lane for sequence in fresh | stalled}
        self._has_new |= stalled != self._stalled
        self._stalled = stalled
        report.num_waiting += self._scheduler.num_waiting
        report.waiting_lanes = tuple(sorted(lanes))

    def _enter(self, sequence: Sequence) -> None:
        self._scheduler.add(sequence)
        self._scheduler.admit([sequence])

    def _leave(self, sequences: Seq[Sequence]) -> None:
        hosted = [sequence for sequence in sequences if sequence in self._hosted]
        for sequence in hosted:
            del self._hosted[sequence]
        self._host.abort(hosted)
