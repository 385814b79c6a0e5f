"""Runs jobs on a host that computes requests together, such as vLLM, and has places for some.

The scheduler of batchway's own engine decides who has the places: to it, a place is a block in
which a whole context fits. Who is displaced leaves the host, and comes back with its output so far.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from contract.errors import ErrorCode
from contract.jobs import FinishReason
from workers.engine.block_manager import BlockManager
from workers.engine.constraints import POLL_S, Constraints
from workers.engine.grammar import GrammarFailed, Grammars
from workers.engine.interface import Chunk, PromptLogprobs, Sample
from workers.engine.lanes import DEFAULT_LANES, Lane
from workers.engine.limits import Deadlines, EngineLimits
from workers.engine.policies import fair_service
from workers.engine.report import JobError, StepReport, token_out
from workers.engine.request import RequestRefused, check_request, sequences_of
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence
from workers.engine.step_plan import UNLIMITED
from workers.engine.strategy import Strategies
from workers.ipc.jobs import Request


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
        ...

    def abort(self, sequences: Seq[Sequence]) -> None:
        """Ends requests, before the next step; those that have ended are ignored."""
        ...

    def step(self) -> list[HostOutput]:
        """Waits for the next step of the requests; there is at least one. Yields nothing for those
        that were aborted."""
        ...

    def count(self, report: StepReport) -> None:
        """Adds the counts of the steps since the last call."""
        ...


@dataclass(slots=True)
class _Job:
    epoch: int
    sequences: dict[int, Sequence]  # by choice; those that have not ended


class PlacingEngine:
    """Calls and reports as `workers.engine.engine.Engine`. Each choice is a request of the host."""

    def __init__(
        self,
        host: Host,
        limits: EngineLimits,
        eos_token_ids: frozenset[int],
        lanes: Seq[Lane] = DEFAULT_LANES,
        grammars: Grammars | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `grammars`, constrained jobs are refused."""
        self._host = host
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._clock_s = clock_s
        self._constraints = Constraints(grammars, host.max_model_len)
        self._jobs: dict[str, _Job] = {}
        self._deadlines = Deadlines()
        self._ended_early: list[Sequence] = []
        self._next_arrival = 0
        self._hosted: dict[Sequence, None] = {}
        self._has_new = False  # since the last announcement
        places = BlockManager(host.num_places, host.max_model_len, can_share=False)
        self._place_limits = EngineLimits(
            host.num_step_tokens, host.num_places, limits.vocab_size, kv_high_water=1.0
        )
        self._scheduler = Scheduler(places, self._place_limits, fair_service(), lanes)
        self.reconfigure(limits, None, lanes)

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def reconfigure(
        self, limits: EngineLimits, strategies: Strategies | None, lanes: Seq[Lane] = DEFAULT_LANES
    ) -> None:
        """Applies new lanes from the next step on; the host's own limits stay as they are."""
        self._limits = limits
        self._scheduler.reconfigure(self._place_limits, lanes)

    def next_wake_s(self) -> float | None:
        """As `Engine.next_wake_s`."""
        if self._ended_early or self._scheduler.num_running or self._scheduler.num_waiting:
            return self._clock_s()
        poll_s = self._clock_s() + POLL_S if self._constraints.is_compiling else None
        return min((s for s in (self._deadlines.next_s, poll_s) if s is not None), default=None)

    def add(self, request: Request) -> None:
        """As `Engine.add`. Raises RequestRefused."""
        held = self._jobs.get(request.job_id)
        if held is not None and held.epoch >= request.epoch:
            return
        self.stop_job(request.job_id, request.epoch - 1)
        check_request(
            request,
            vocab_size=self._limits.vocab_size,
            max_model_len=self._host.max_model_len,
            num_kv_tokens=self._host.num_kv_tokens,
        )
        sequences = sequences_of(request, self._eos_token_ids, self._next_arrival)
        self._next_arrival += len(request.outputs)
        job = _Job(request.epoch, {s.choice: s for s in sequences})
        if request.params.grammar and sequences:
            self._constraints.compile(request.job_id, request.params.grammar, sequences)
            self._jobs[request.job_id] = job
        else:
            self._enter(job)
        self._note_deadline(request.job_id, request.epoch, request.deadline_s)

    def stop_job(self, job_id: str, epoch: int) -> None:
        """As `Engine.stop_job`."""
        self._ended_early = [s for s in self._ended_early if s.job_id != job_id or s.epoch > epoch]
        held = self._jobs.get(job_id)
        if held is not None and held.epoch <= epoch:
            self._drop(job_id)

    def stop_choice(self, job_id: str, epoch: int, choice: int) -> None:
        """As `Engine.stop_choice`."""
        held = self._jobs.get(job_id)
        if held is not None and held.epoch == epoch and choice in held.sequences:
            self._remove([held.sequences[choice]])

    def reprioritise(
        self, job_id: str, epoch: int, lane: str, deadline_s: float | None = None
    ) -> None:
        """As `Engine.reprioritise`. The host keeps the priority of what it runs."""
        held = self._jobs.get(job_id)
        if held is None or held.epoch != epoch:
            return
        for sequence in held.sequences.values():
            sequence.deadline_s = deadline_s
            if self._constraints.holds(job_id):
                sequence.lane = lane
            else:
                self._scheduler.move(sequence, lane, self._clock_s())
        self._note_deadline(job_id, epoch, deadline_s)

    def step(self, announce: Callable[[Seq[Chunk]], None] | None = None) -> StepReport:
        """Hands out places, then waits for a step of the host. Raises what the host raises if it
        has died."""
        report = StepReport(ended=self._ended_early)
        self._ended_early = []
        start_s = self._clock_s()
        self._expire(start_s, report)
        self._enter_compiled(report)
        num_displaced = self._hand_out_places(start_s, report)
        if self._hosted:
            if self._has_new and announce is not None:
                announce([Chunk(sequence, 0, 1, samples=True) for sequence in self._hosted])
            self._has_new = False
            outputs = self._host.step()
            report.num_recomputed_tokens = self._account(outputs)
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
        self._leave_host([sequence for sequence in plan.preempted if sequence in self._hosted])
        for sequence in self._scheduler.running:
            if sequence in self._hosted or not self._holds(sequence):
                continue
            try:
                self._host.start(sequence, self._scheduler.priority_of(sequence))
            except RequestRefused as refusal:
                self._fail(sequence, refusal.message, report, refusal.code)
                continue
            self._hosted[sequence] = None
            self._has_new = True
        return len(plan.preempted)

    def _account(self, outputs: Seq[HostOutput]) -> int:
        """Accounts for a step; returns how many of its tokens had been computed before."""
        chunks = []
        for output in outputs:
            sequence = output.sequence
            if output.samples:
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
        if output.prompt_samples:
            report.prompt_logprobs.append((sequence, PromptLogprobs(1, output.prompt_samples)))
        for sample in output.samples:
            position, token_id = sequence.num_output, sample.token_id
            if sequence.matcher is not None:
                try:
                    sequence.matcher.consume(token_id)
                except GrammarFailed as exc:
                    self._fail(sequence, str(exc), report, exc.code)
                    return
            sequence.token_ids.append(token_id)
            end = sequence.end_reason(self._host.max_model_len)
            # A token that makes a constrained output whole is part of it; an ending token is not.
            is_whole = end is FinishReason.STOP and token_id not in sequence.ending_ids
            said = None if is_whole else end
            found = sample.logprob, sample.top_logprobs
            report.outputs.append(token_out(sequence, position, token_id, said, *found))
            if end is not None:
                if is_whole:
                    report.ended.append(sequence)
                sequence.finish_reason = end
                self._finish(sequence, report)
                return
        if output.end is not None:  # and no token says why
            self._fail(sequence, f"vLLM ended the request: {output.end}", report)

    def _finish(self, sequence: Sequence, report: StepReport) -> None:
        assert sequence.started_s is not None
        self._remove([sequence])
        report.num_finished += 1
        report.queue_s += sequence.started_s - sequence.added_s
        report.run_s += self._clock_s() - sequence.started_s

    def _count_waiting(self, report: StepReport) -> None:
        """Adds what waits here. What waits in the host, for KV blocks or its turn, is among those
        that have got no token there."""
        lanes = set(self._scheduler.waiting_lanes)
        if report.num_waiting:
            lanes |= {sequence.lane for sequence in self._hosted if sequence.num_computed == 0}
        report.num_waiting += self._scheduler.num_waiting
        report.waiting_lanes = tuple(sorted(lanes))

    def _note_deadline(self, job_id: str, epoch: int, deadline_s: float | None) -> None:
        if deadline_s is not None and job_id in self._jobs:
            self._deadlines.add(deadline_s, job_id, epoch, self._jobs)

    def _expire(self, now_s: float, report: StepReport) -> None:
        for deadline_s, job_id, epoch in self._deadlines.take_passed(now_s):
            held = self._jobs.get(job_id)
            if held is None or held.epoch != epoch:
                continue
            if all(s.deadline_s == deadline_s for s in held.sequences.values()):
                message = "the deadline passed before the job had ended"
                report.failed.append(JobError(job_id, epoch, ErrorCode.DEADLINE, message))
                self._drop(job_id)

    def _enter_compiled(self, report: StepReport) -> None:
        for job_id, failure in self._constraints.compiled():
            job = self._jobs.pop(job_id)
            if failure is None:
                self._enter(job)
                continue
            code = ErrorCode.BAD_PARAMETER
            report.failed.append(JobError(job_id, job.epoch, code, str(failure)))

    def _enter(self, job: _Job) -> None:
        """Hands a job's sequences to the scheduler; one that is complete ends at once."""
        now_s = self._clock_s()
        for sequence in list(job.sequences.values()):
            sequence.added_s = now_s
            sequence.finish_reason = sequence.end_reason(self._host.max_model_len)
            if sequence.finish_reason is not None:
                del job.sequences[sequence.choice]
                self._ended_early.append(sequence)
                continue
            self._jobs[sequence.job_id] = job
            self._scheduler.add(sequence)
            self._scheduler.let_in([sequence], now_s)

    def _fail(
        self,
        sequence: Sequence,
        message: str,
        report: StepReport,
        code: ErrorCode = ErrorCode.ENGINE_ERROR,
    ) -> None:
        """Fails the sequence's whole job."""
        report.failed.append(JobError(sequence.job_id, sequence.epoch, code, message))
        self._drop(sequence.job_id)

    def _holds(self, sequence: Sequence) -> bool:
        job = self._jobs.get(sequence.job_id)
        return job is not None and job.sequences.get(sequence.choice) is sequence

    def _drop(self, job_id: str) -> None:
        self._remove(list(self._jobs[job_id].sequences.values()))

    def _remove(self, sequences: Seq[Sequence]) -> None:
        """Forgets sequences of one job that have ended or were stopped."""
        job_id = sequences[0].job_id
        job = self._jobs[job_id]
        self._leave_host([sequence for sequence in sequences if sequence in self._hosted])
        for sequence in sequences:
            if not self._constraints.holds(job_id):
                self._scheduler.remove(sequence)
            del job.sequences[sequence.choice]
        if not job.sequences:
            del self._jobs[job_id]
            self._constraints.forget(job_id)

    def _leave_host(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            del self._hosted[sequence]
        self._host.abort(sequences)
