"""The step loop's body: takes jobs, runs one step at a time, says what came of it.

Leaves the order of things to the scheduler, arithmetic to the model, text and the wire to the
supervisor. One thread; nothing here blocks but the model.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from contract.jobs import FinishReason
from workers.engine.batches import Batches
from workers.engine.block_manager import BlockManager
from workers.engine.limits import EngineLimits
from workers.engine.model import Chunk, Model, RowFailed, Sample
from workers.engine.policies import FirstComeFirstServed, Policy
from workers.engine.request import ErrorCode, Request, check_request
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence
from workers.engine.strategy import Strategies, Strategy


@dataclass(frozen=True, slots=True)
class Output:
    """A new token of a sequence, at `position` among its output tokens.

    The token that ends a sequence is reported too; `finish_reason` says that it does.
    """

    sequence: Sequence
    position: int
    token_id: int
    finish_reason: FinishReason | None
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class JobError:
    """A job that failed while it ran; all its choices are dropped."""

    job_id: str
    epoch: int
    code: ErrorCode
    message: str


@dataclass(slots=True)
class StepReport:
    """What one step yielded, and the engine's state after it."""

    outputs: list[Output] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)  # complete when they came: no new token
    failed: list[JobError] = field(default_factory=list)
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_step_tokens: int = 0  # of sequences
    num_padding_tokens: int = 0  # computed beside them, for no one
    num_preemptions: int = 0


@dataclass(slots=True)
class _Job:
    epoch: int
    sequences: dict[int, Sequence]  # by choice; those that have not ended


class Engine:
    """Runs the choices of many jobs through one model, one step at a time."""

    def __init__(
        self,
        model: Model,
        limits: EngineLimits,
        strategies: Strategy | Strategies,
        policy: Policy | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._limits = limits
        self._clock_s = clock_s
        self._blocks = BlockManager(model.num_blocks, model.block_size)
        self._policy = policy or FirstComeFirstServed()
        self._batches = Batches(_strategies(strategies), limits.max_num_seqs)
        self._scheduler = Scheduler(self._blocks, limits, self._batches, self._policy)
        self._jobs: dict[str, _Job] = {}
        self._ended_early: list[Sequence] = []
        self._next_arrival = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would compute or report anything."""
        return bool(self._jobs or self._ended_early)

    def next_wake_s(self) -> float | None:
        """When the next step has something to do, on the engine's clock: now, in the past, or
        when a strategy's wait is over. None: not before something is added.
        """
        now_s = self._clock_s()
        if self._ended_early or self._batches.num_let_in:
            return now_s
        return self._batches.wake_s(now_s)

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def reconfigure(self, limits: EngineLimits, strategies: Strategies) -> None:
        """From the next step on. What runs goes on, beyond a limit that has become smaller too;
        batches that are open stay open until they end.
        """
        self._limits = self._scheduler.limits = limits
        self._batches.strategies, self._batches.max_num_rows = strategies, limits.max_num_seqs

    def add(self, request: Request) -> None:
        """Takes a job, each choice going on after its known output.

        A newer epoch of a job replaces the one that runs; another is ignored, for it is fenced.
        Raises RequestRefused for a job that can never run here; no other job is touched.
        """
        held = self._jobs.get(request.job_id)
        if held is not None and held.epoch >= request.epoch:
            return
        self.stop_job(request.job_id, request.epoch - 1)
        check_request(
            request,
            vocab_size=self._limits.vocab_size,
            max_model_len=self._model.max_model_len,
            num_kv_tokens=self._blocks.num_blocks * self._blocks.block_size,
        )
        sequences = request.sequences(self._model.eos_token_ids, self._next_arrival)
        self._next_arrival += request.params.n
        self._start(_Job(request.epoch, {s.choice: s for s in sequences}))

    def stop_job(self, job_id: str, epoch: int) -> None:
        """Drops a job up to that epoch, without a report. Unknown jobs have ended already."""
        self._ended_early = [s for s in self._ended_early if s.job_id != job_id or s.epoch > epoch]
        held = self._jobs.get(job_id)
        if held is not None and held.epoch <= epoch:
            self._drop(job_id)

    def stop_choice(self, job_id: str, epoch: int, choice: int) -> None:
        """Drops one choice of a job, without a report. Unknown ones have ended already."""
        held = self._jobs.get(job_id)
        if held is not None and held.epoch == epoch and choice in held.sequences:
            self._remove(held.sequences[choice])

    def step(self) -> StepReport:
        """Runs one step. An exception of the model passes through: the engine is lost then."""
        report = StepReport(ended=self._ended_early)
        self._ended_early = []
        now_s = self._clock_s()
        self._batches.let_in(lambda s: self._policy.key(s, now_s), now_s)
        padding = self._batches.padding_due(self._limits.max_num_batched_tokens)
        plan = self._scheduler.plan(now_s, num_reserved=sum(pad.num_tokens for pad in padding))
        chunks = list(plan.chunks.values())
        padding += self._batches.padding_beside(chunks, plan.num_tokens_left)
        if chunks or padding:
            self._apply(chunks, self._model.run(chunks, padding), report)
        report.num_running = self._scheduler.num_running
        report.num_waiting = self._scheduler.num_waiting
        report.num_free_blocks = self._blocks.num_free
        report.num_step_tokens = sum(chunk.num_tokens for chunk in chunks)
        report.num_padding_tokens = sum(pad.num_tokens for pad in padding)
        report.num_preemptions = plan.num_preemptions
        return report

    def audit(self) -> None:
        """Asserts what must hold between steps; for tests and for hunting a leak."""
        running = self._scheduler.running
        self._blocks.audit(running)
        num_sequences = sum(len(job.sequences) for job in self._jobs.values())
        assert num_sequences == self._scheduler.num_running + self._scheduler.num_waiting

    def _start(self, job: _Job) -> None:
        """Hands a job's sequences to the scheduler; one that is complete ends at once."""
        for sequence in list(job.sequences.values()):
            sequence.finish_reason = sequence.end_reason(self._model.max_model_len)
            if sequence.finish_reason is not None:
                self._ended_early.append(sequence)
                del job.sequences[sequence.choice]
                continue
            self._scheduler.add(sequence)
            self._batches.add(sequence)
            self._jobs[sequence.job_id] = job

    def _apply(
        self, chunks: list[Chunk], rows: Seq[Sample | RowFailed | None], report: StepReport
    ) -> None:
        """Books what the model computed. A failed row takes its whole job with it."""
        for chunk, row in zip(chunks, rows, strict=True):
            sequence = chunk.sequence
            if not self._holds(sequence):
                continue  # another choice of its job has failed in this step
            sequence.num_computed += chunk.num_tokens
            if isinstance(row, RowFailed):
                report.failed.append(
                    JobError(sequence.job_id, sequence.epoch, ErrorCode.ENGINE_ERROR, row.message)
                )
                self._drop(sequence.job_id)
            elif chunk.samples:
                assert row is not None, "a chunk that reaches the last token yields a sample"
                report.outputs.append(self._extend(sequence, row))

    def _extend(self, sequence: Sequence, sample: Sample) -> Output:
        """Appends the new token, and ends the sequence where it is the last one."""
        position = sequence.num_output
        sequence.token_ids.append(sample.token_id)
        sequence.finish_reason = sequence.end_reason(self._model.max_model_len)
        if sequence.finish_reason is not None:
            self._remove(sequence)
        return Output(
            sequence,
            position,
            sample.token_id,
            sequence.finish_reason,
            sample.logprob,
            sample.top_logprobs,
        )

    def _holds(self, sequence: Sequence) -> bool:
        job = self._jobs.get(sequence.job_id)
        return job is not None and job.sequences.get(sequence.choice) is sequence

    def _remove(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._batches.remove(sequence)
        job = self._jobs[sequence.job_id]
        del job.sequences[sequence.choice]
        if not job.sequences:
            del self._jobs[sequence.job_id]

    def _drop(self, job_id: str) -> None:
        for sequence in list(self._jobs[job_id].sequences.values()):
            self._remove(sequence)


def _strategies(given: Strategy | Strategies) -> Strategies:
    return given if isinstance(given, Strategies) else Strategies(given)
