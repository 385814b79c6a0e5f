"""Keeps an engine process running and handles its messages.

If the process dies, or hangs and is killed, the jobs of its last step are blamed: those that
are blamed again then run alone, which finds the job that kills engines without failing others. All
other jobs are released.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Tokenizer

from contract.connection import end_tasks
from contract.errors import BrokerUnavailable, CommandDenied, ErrorCode, WireError
from contract.function_types import Blame, Claimed, Release
from workers.ipc.channel import EngineClient
from workers.ipc.messages import (
    ChoiceEnded,
    EngineLoad,
    EngineReady,
    FromEngine,
    JobFailed,
    LoadFailed,
    Loading,
    Marked,
    PrefixFound,
    PromptLogprobsOut,
    RunningJobs,
    StopChoice,
    StopJob,
    TokenOut,
    VectorOut,
)
from workers.settings import WorkerSettings
from workers.supervisor.held_job import HeldJob, OutputFormats
from workers.supervisor.holding import EngineLink, Holding
from workers.supervisor.load_progress import LoadProgress
from workers.supervisor.metrics import Meter
from workers.supervisor.publisher import Publisher
from workers.supervisor.warming import Warming
from workers.supervisor.worker_broker import WorkerBroker

log = logging.getLogger(__name__)

RESTART_S = 1.0
_MAX_FAILED_STARTS = 3


class EngineRefused(Exception):
    """The model cannot be served, or its process keeps dying."""


@dataclass(eq=False)
class EngineKeeper:
    """Starts and restarts the engine. `tokenizer` is set once an engine has been ready."""

    _settings: WorkerSettings
    _broker: WorkerBroker
    _engine: EngineLink
    _holding: Holding
    _publisher: Publisher
    _meter: Meter
    _warming: Warming

    def __post_init__(self) -> None:
        self._progress = LoadProgress(self._settings.progress_path)
        self._watchdog = Watchdog(self._settings.step_timeout_s, self._engine_has_work)
        self._started_s = 0.0  # when the current engine was started
        self._frees_place = False  # whether the current step frees a place: claim when it ends
        self.tokenizer: Tokenizer | None = None
        self._formats: OutputFormats | None = None

    def hold(self, claimed: Claimed) -> HeldJob:
        """Returns a claimed job with the model's tokenizer. Only after an engine has been ready."""
        assert self.tokenizer is not None
        return HeldJob(claimed, self.tokenizer, self._formats)

    async def run(self) -> None:
        """Runs until cancelled. Raises EngineRefused."""
        num_failed_starts = 0
        while True:
            self._started_s = time.monotonic()
            self._progress.note()
            log.info("starting the engine's process")
            client = await EngineClient.start(
                self._settings.engine_module,
                self._engine.options,
                self._receive,
                self._settings.engine_python,
            )
            self._engine.client = client
            await self._wait_for_end(client)
            status = await client.stop()
            num_failed_starts = 0 if self._engine.ready else num_failed_starts + 1
            running = self._engine.running
            self._engine.forget()
            jobs = self._holding.clear()
            self._publisher.clear()
            self._meter.note_engine_failure()
            log.error("engine process ended status=%d jobs_held=%d", status, len(jobs))
            if num_failed_starts == _MAX_FAILED_STARTS:
                raise EngineRefused("the engine process ends before it is ready; the log says why")
            # If this fails, the leases expire.
            with contextlib.suppress(BrokerUnavailable, CommandDenied, WireError):
                await self._give_up(jobs, running)
            await asyncio.sleep(RESTART_S)

    async def _wait_for_end(self, client: EngineClient) -> None:
        """Waits for the engine to end; kills it if it hangs."""
        self._watchdog.reset()
        watching = asyncio.create_task(self._end_hanging(client))
        try:
            await client.end()
        finally:
            await end_tasks(watching)

    async def _end_hanging(self, client: EngineClient) -> None:
        await self._watchdog.engine_hangs()
        limit_s, num_held = self._settings.step_timeout_s, len(self._holding.jobs)
        log.error("engine killed: no message for %.1f s jobs_held=%d", limit_s, num_held)
        client.kill()

    def _engine_has_work(self) -> bool:
        """Whether a job needs the engine; complete jobs only wait for Redis."""
        return any(not job.is_complete for job in self._holding.jobs.values())

    async def _give_up(self, jobs: list[HeldJob], running: frozenset[str]) -> None:
        """Blames the jobs of the fatal step and releases the others."""
        blamed = [job for job in jobs if job.job.id in running]
        innocent = [job for job in jobs if job.job.id not in running]
        if innocent:
            await self._broker.release([Release(j.job.id, j.epoch, "drain") for j in innocent])
        if blamed:
            log.warning("blamed jobs=%s", ",".join(job.job.id for job in blamed))
            await self._broker.blame([Blame(j.job.id, j.epoch, _about(j)) for j in blamed])

    def _receive(self, messages: list[FromEngine]) -> None:
        self._watchdog.reset()
        *earlier, last = messages
        for message in earlier:
            self._take(message)
        if isinstance(last, EngineLoad):
            # Publish the step's tokens first, as recording the step takes longer.
            asyncio.get_running_loop().call_soon(self._take_load, last)
        else:
            self._take(last)

    def _take(self, message: FromEngine) -> None:
        match message:
            case TokenOut(job_id) | JobFailed(job_id) if job_id == self._warming.job_id:
                self._warming.end(message)
            case TokenOut() | VectorOut() | ChoiceEnded():
                self._take_output(message)
            case EngineLoad():
                self._take_load(message)
            case RunningJobs(job_ids):
                self._engine.running = frozenset(job_ids)
                self._engine.steps.begin(time.monotonic())
                self._holding.spans.note_running(job_ids)
            case Marked(job_id, epoch, kind, num_tokens):
                if (job := self._holding.get(job_id, epoch)) is not None:
                    job.mark(kind, num_tokens, time.monotonic())
            case PrefixFound(job_id, epoch, choice, num_tokens):
                if (job := self._holding.get(job_id, epoch)) is not None:
                    job.note_prefix(choice, num_tokens)
            case JobFailed(_, _, ErrorCode.DEADLINE, _):
                pass  # the sweep of Redis ends expired jobs
            case PromptLogprobsOut(job_id, epoch):
                if (job := self._holding.get(job_id, epoch)) is not None:
                    job.take_prompt(message)
                    self._publisher.note(job)
            case JobFailed(job_id, epoch, code, text):
                if (job := self._holding.get(job_id, epoch)) is not None:
                    self._publisher.fail(job, code, text)
            case EngineReady():
                self.tokenizer = Tokenizer.from_str(message.tokenizer.tokenizer_json)
                self._formats = OutputFormats(message.tokenizer, self.tokenizer)
                self._engine.ready = message
                self._engine.load = EngineLoad(num_free_blocks=message.num_blocks)
                self._engine.speed.begin(message.tokens_per_s)
                self._engine.load_s = time.monotonic() - self._started_s
                self._engine.changed.set()
                self._holding.wake.set()
                self._progress.end()
            case Loading(text):
                self._progress.note()
                log.info("%s", text)
            case LoadFailed(text):
                raise EngineRefused(text)

    def _take_load(self, load: EngineLoad) -> None:
        self._warming.hide_step(load)
        if self._engine.note_step(load, time.monotonic()) or self._frees_place:
            self._holding.wake.set()
        self._frees_place = False
        self._meter.note_step(load)
        self._holding.spans.note_step(load)

    def _take_output(self, out: TokenOut | VectorOut | ChoiceEnded) -> None:
        """Records output of one choice. Tells the engine of a stop string or of tool calls."""
        job = self._holding.get(out.job_id, out.epoch)
        if job is None:
            if isinstance(out, TokenOut):
                self._holding.count_late(out.job_id, out.epoch)
            return
        num_continuing = job.num_continuing
        try:
            reason = job.take(out)
        except Exception as exc:  # fails this job only
            log.error("job failed job_id=%s error=%s", out.job_id, type(exc).__name__)
            self._publisher.fail(job, ErrorCode.ENGINE_ERROR, "its output could not be decoded")
            self._engine.send([StopJob(out.job_id, out.epoch)])
            return
        if isinstance(out, TokenOut):
            self._meter.note_token(job, out.choice)
            self._holding.spans.note_token(job)
        self._publisher.note(job)
        if job.num_continuing < num_continuing or job.is_complete:
            self._frees_place = True
        if reason is not None:
            self._engine.send([StopChoice(out.job_id, out.epoch, out.choice, reason)])


def _about(job: HeldJob) -> str:
    """Describes a job that killed an engine, as JSON: sizes and a hash, never text."""
    prompt_ids = list(itertools.chain.from_iterable(job.job.prompts))
    return json.dumps(
        {
            "prompt_sha256": hashlib.sha256(array("q", prompt_ids).tobytes()).hexdigest(),
            "prompt_tokens": len(prompt_ids),
            "output_tokens": job.num_output_tokens,
            "max_tokens": job.job.params.max_tokens,
            "n": job.job.params.n,
            "num_prompts": job.job.num_prompts,
            "model": job.job.model,
            "lane": job.job.lane,
            "tenant": job.job.tenant,
        }
    )


_NUM_CHECKS = 10


class Watchdog:
    """Waits for an engine that has work but sends nothing for `limit_s` seconds.

    Counts its own wake-ups instead of reading the clock: while the machine is suspended, the engine
    does not run either.
    """

    def __init__(self, limit_s: float, has_work: Callable[[], bool]) -> None:
        self._interval_s = limit_s / _NUM_CHECKS
        self._has_work = has_work
        self._num_silent = 0

    def reset(self) -> None:
        """Starts the count again: the engine sent a message."""
        self._num_silent = 0

    async def engine_hangs(self) -> None:
        while self._num_silent < _NUM_CHECKS:
            await asyncio.sleep(self._interval_s)
            self._num_silent = self._num_silent + 1 if self._has_work() else 0
