"""What an engine does with jobs, however it computes them: they come, wait for their grammars, move
to other lanes, are stopped, and end by their deadlines."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from contract.errors import ErrorCode
from workers.engine.constraints import Constraints
from workers.engine.grammar import GrammarFailed
from workers.engine.interface import Chunk, Deadlines, EngineLimits
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import RequestRefused, Sequence, check_request, sequences_of
from workers.engine.step_plan import StepReport, choice_ended
from workers.engine.strategy import Strategies
from workers.ipc.messages import ChoiceEnded, JobFailed, Request
from workers.lanes import DEFAULT_LANES, Lane


@dataclass(slots=True)
class _Job:
    epoch: int
    sequences: dict[int, Sequence]  # by choice; those that have not ended


class JobEngine(ABC):
    """An engine's jobs. The scheduler does not know those that wait for their grammars."""

    takes_images = False

    def __init__(
        self,
        scheduler: Scheduler,
        constraints: Constraints,
        limits: EngineLimits,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        num_kv_tokens: int,
        clock_s: Callable[[], float],
    ) -> None:
        """`num_kv_tokens`: what the whole KV cache holds."""
        self._scheduler = scheduler
        self._constraints = constraints
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._num_kv_tokens = num_kv_tokens
        self._clock_s = clock_s
        self._jobs: dict[str, _Job] = {}
        self._deadlines = Deadlines()
        self._ended_early: list[ChoiceEnded] = []
        self._next_arrival = 0

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def has_work(self) -> bool:
        """Whether a step would compute or report anything."""
        return bool(self._jobs or self._ended_early)

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that have not ended, running and waiting."""
        return [s for job in self._jobs.values() for s in job.sequences.values()]

    def add(self, request: Request) -> None:
        """Adds a job; each choice continues after its known output.

        A newer epoch of a job replaces the running one; an older one is ignored, as it is fenced.
        Raises RequestRefused for a job that can never run here; other jobs are not affected.
        """
        held = self._jobs.get(request.job_id)
        if held is not None and held.epoch >= request.epoch:
            return
        self.stop_job(request.job_id, request.epoch - 1)
        if request.images and not self.takes_images:
            raise RequestRefused(ErrorCode.BAD_PARAMETER, "this engine takes no images")
        check_request(
            request,
            vocab_size=self._limits.vocab_size,
            max_model_len=self._max_model_len,
            num_kv_tokens=self._num_kv_tokens,
            prefill_only=self._limits.prefill_only,
        )
        sequences = sequences_of(request, self._eos_token_ids, self._next_arrival)
        self._next_arrival += len(request.outputs)
        job = _Job(request.epoch, {s.choice: s for s in sequences})
        if request.params.grammar and sequences:
            self._constraints.compile(request.job_id, request.params.grammar, sequences)
            self._jobs[request.job_id] = job
        else:
            self._start(job)
        self._note_deadline(request.job_id, request.epoch, request.deadline_s)

    def stop_job(self, job_id: str, epoch: int) -> None:
        """Drops a job up to that epoch, without a report. Unknown jobs have ended already."""
        self._ended_early = [s for s in self._ended_early if s.job_id != job_id or s.epoch > epoch]
        held = self._jobs.get(job_id)
        if held is not None and held.epoch <= epoch:
            self._drop(job_id)

    def stop_choice(self, job_id: str, epoch: int, choice: int, *, pauses: bool = False) -> None:
        """Drops one choice, if it has not ended, without a report. Retains it if it `pauses`."""
        held = self._jobs.get(job_id)
        if held is not None and held.epoch == epoch and choice in held.sequences:
            self._remove([held.sequences[choice]])
        if pauses:
            blocks = self._scheduler.blocks
            blocks.sort(blocks.retention.begin(job_id, epoch, choice))

    def reprioritise(
        self, job_id: str, epoch: int, lane: str, deadline_s: float | None = None
    ) -> None:
        """Moves a job to another lane and deadline, running or waiting. Unknown ones have ended."""
        held = self._jobs.get(job_id)
        if held is None or held.epoch != epoch:
            return
        for sequence in held.sequences.values():
            sequence.deadline_s = deadline_s
            if self._constraints.holds(job_id):
                sequence.lane = lane
            else:
                self._scheduler.move(sequence, lane)
        self._note_deadline(job_id, epoch, deadline_s)

    @abstractmethod
    def next_wake_s(self) -> float | None:
        """When the next step has something to do, on the engine's clock: at once (in the past), or
        later. None: not before something is added."""

    @abstractmethod
    def reconfigure(
        self, limits: EngineLimits, strategies: Strategies, lanes: Seq[Lane] = DEFAULT_LANES
    ) -> None:
        """Applies from the next step on."""

    @abstractmethod
    def step(self, announce: Callable[[Seq[Chunk]], None] | None = None) -> StepReport:
        """Runs one step; calls `announce` with its chunks before they are computed."""

    @abstractmethod
    def _enter(self, sequence: Sequence) -> None:
        """Adds a sequence to the scheduler."""

    @abstractmethod
    def _leave(self, sequences: Seq[Sequence]) -> None:
        """The sequences have ended or were stopped, and the scheduler has dropped them."""

    def _force(self, sequence: Sequence, report: StepReport) -> None:
        """Takes the first tokens that a grammar forces. May raise GrammarFailed."""
        return

    def _begin_step(self, now_s: float) -> StepReport:
        """Starts the jobs whose grammars are compiled. Returns the step's report, with what has
        ended or failed before the step."""
        report = StepReport(ended=self._ended_early)
        self._ended_early = []
        self._expire(now_s, report)
        self._start_compiled(report)
        return report

    def _note_deadline(self, job_id: str, epoch: int, deadline_s: float | None) -> None:
        if deadline_s is not None and job_id in self._jobs:
            self._deadlines.add(deadline_s, job_id, epoch, self._jobs)

    def _expire(self, now_s: float, report: StepReport) -> None:
        """Ends the jobs whose deadline has passed, running or waiting."""
        for deadline_s, job_id, epoch in self._deadlines.take_passed(now_s):
            held = self._jobs.get(job_id)
            if held is None or held.epoch != epoch:
                continue
            if all(s.deadline_s == deadline_s for s in held.sequences.values()):
                message = "the deadline passed before the job had ended"
                report.failed.append(JobFailed(job_id, epoch, ErrorCode.DEADLINE, message))
                self._drop(job_id)

    def _start_compiled(self, report: StepReport) -> None:
        for job_id, failure in self._constraints.compiled():
            job, code = self._jobs.pop(job_id), ErrorCode.BAD_PARAMETER
            if failure is None:
                try:
                    self._start(job, report)
                    continue
                except GrammarFailed as limit:  # among the first tokens that it forces
                    failure, code = limit, limit.code
            report.failed.append(JobFailed(job_id, job.epoch, code, str(failure)))

    def _start(self, job: _Job, report: StepReport | None = None) -> None:
        """Hands a job's sequences to the scheduler; one that is complete ends at once. The report
        gets the first tokens that a grammar forces. If this raises GrammarFailed, it hands over
        none."""
        ended: list[ChoiceEnded] = []
        for sequence in list(job.sequences.values()):
            room = self._max_model_len - sequence.num_prompt
            sequence.max_output = min(sequence.max_output, room)
            if not self._limits.prefill_only:
                sequence.finish_reason = sequence.end_reason(self._max_model_len)
            if sequence.finish_reason is not None:
                ended.append(choice_ended(sequence))
            elif report is not None:
                self._force(sequence, report)
            if sequence.finish_reason is not None:
                del job.sequences[sequence.choice]
        self._ended_early += ended
        for sequence in job.sequences.values():
            self._enter(sequence)
            self._jobs[sequence.job_id] = job

    def _fail(
        self,
        sequence: Sequence,
        message: str,
        report: StepReport,
        code: ErrorCode = ErrorCode.ENGINE_ERROR,
    ) -> None:
        """Fails the sequence's whole job."""
        report.failed.append(JobFailed(sequence.job_id, sequence.epoch, code, message))
        self._drop(sequence.job_id)

    def _holds(self, sequence: Sequence) -> bool:
        job = self._jobs.get(sequence.job_id)
        return job is not None and job.sequences.get(sequence.choice) is sequence

    def _drop(self, job_id: str) -> None:
        self._remove(list(self._jobs[job_id].sequences.values()))

    def _remove(self, sequences: Seq[Sequence]) -> None:
        job_id = sequences[0].job_id
        job = self._jobs[job_id]
        for sequence in sequences:
            del job.sequences[sequence.choice]
        if not self._constraints.holds(job_id):
            for sequence in sequences:
                self._scheduler.remove(sequence)
            self._leave(sequences)
        if not job.sequences:
            del self._jobs[job_id]
            self._constraints.forget(job_id)
