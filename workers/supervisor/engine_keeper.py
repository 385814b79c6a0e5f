"""Keeps an engine process running and handles its messages.

When the process dies, or hangs and is killed, the jobs of its last step are blamed: each is then
run alone, so that a job that kills engines is found without failing others. All other jobs are
released.
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

from tokenizers import Tokenizer

from contract import tasks
from contract.errors import BrokerUnavailable, CommandDenied, ErrorCode, WireError
from contract.function_types import Blame, Release
from workers.ipc.engine_client import EngineClient
from workers.ipc.messages import (
    ChoiceEnded,
    EngineLoad,
    FromEngine,
    JobFailed,
    LoadFailed,
    Loading,
    PromptLogprobs,
    Ready,
    Running,
    StopChoice,
    StopJob,
    TokenOut,
)
from workers.settings import WorkerSettings
from workers.supervisor.held_job import HeldJob
from workers.supervisor.holding import EngineLink, Holding
from workers.supervisor.meter import Meter
from workers.supervisor.publisher import Publisher
from workers.supervisor.worker_broker import WorkerBroker

log = logging.getLogger(__name__)

RESTART_S = 1.0
_MAX_FAILED_STARTS = 3


class EngineRefused(Exception):
    """The model cannot be served, or its process keeps dying."""


class EngineKeeper:
    """Starts and restarts the engine. `tokenizer` is set once an engine has been ready."""

    def __init__(
        self,
        settings: WorkerSettings,
        lane: WorkerBroker,
        engine: EngineLink,
        holding: Holding,
        publisher: Publisher,
        meter: Meter,
    ) -> None:
        self._settings = settings
        self._lane = lane
        self._engine = engine
        self._holding = holding
        self._publisher = publisher
        self._meter = meter
        self._watchdog = Watchdog(settings.step_timeout_s, self._engine_has_work)
        self._frees_place = False  # the current step frees a place: claim as soon as it ends
        self.tokenizer: Tokenizer | None = None

    async def run(self) -> None:
        """Runs until it raises EngineRefused."""
        num_failed_starts = 0
        while True:
            client = await EngineClient.start(
                self._settings.engine_module,
                self._engine.options,
                self._take_in,
                self._settings.engine_python,
            )
            self._engine.client = client
            await self._watched(client)
            status = await client.stop()
            num_failed_starts = 0 if self._engine.ready else num_failed_starts + 1
            running = self._engine.running
            self._engine.forget()
            jobs = self._holding.clear()
            self._publisher.clear()
            self._meter.note_engine_failure()
            log.error("engine process ended status=%d jobs_held=%d", status, len(jobs))
            if num_failed_starts == _MAX_FAILED_STARTS:
                raise EngineRefused("the engine process ends before it is ready: see above")
            # If this fails, the leases expire.
            with contextlib.suppress(BrokerUnavailable, CommandDenied, WireError):
                await self._give_up(jobs, running)
            await asyncio.sleep(RESTART_S)

    async def _watched(self, client: EngineClient) -> None:
        """Waits for the engine to end; kills it if it hangs."""
        self._watchdog.hear()
        watching = asyncio.create_task(self._end_hanging(client))
        try:
            await client.end()
        finally:
            await tasks.end(watching)

    async def _end_hanging(self, client: EngineClient) -> None:
        await self._watchdog.engine_hangs()
        limit_s, num_held = self._settings.step_timeout_s, len(self._holding.jobs)
        log.error("no step ended in %.1f s: engine killed jobs_held=%d", limit_s, num_held)
        client.kill()

    def _engine_has_work(self) -> bool:
        """Ignores complete jobs: they wait for Redis, not for the engine."""
        return any(not job.is_complete for job in self._holding.jobs.values())

    async def _give_up(self, jobs: list[HeldJob], running: frozenset[str]) -> None:
        """Blames the jobs of the fatal step and releases the others."""
        blamed = [job for job in jobs if job.job.id in running]
        innocent = [job for job in jobs if job.job.id not in running]
        if innocent:
            await self._lane.release([Release(j.job.id, j.epoch, "drain") for j in innocent])
        if blamed:
            log.warning("blamed jobs=%s", ",".join(job.job.id for job in blamed))
            await self._lane.blame([Blame(j.job.id, j.epoch, _about(j)) for j in blamed])

    def _take_in(self, messages: list[FromEngine]) -> None:
        self._watchdog.hear()
        *said, last = messages
        for message in said:
            self._take(message)
        if isinstance(last, EngineLoad):
            # Publish the step's tokens first: the bookkeeping takes longer.
            asyncio.get_running_loop().call_soon(self._take_load, last)
        else:
            self._take(last)

    def _take(self, message: FromEngine) -> None:
        match message:
            case TokenOut() | ChoiceEnded():
                self._take_output(message)
            case EngineLoad():
                self._take_load(message)
            case Running(job_ids):
                self._engine.running = frozenset(job_ids)
                self._engine.steps.begin(time.monotonic())
                self._holding.spans.note_running(job_ids)
            case JobFailed(_, _, ErrorCode.DEADLINE, _):
                pass  # Redis decides when a job expires; the sweep reports it
            case PromptLogprobs(job_id, epoch):
                if (job := self._holding.get(job_id, epoch)) is not None:
                    job.take_prompt(message)
                    self._publisher.note(job)
            case JobFailed(job_id, epoch, code, text):
                if (job := self._holding.get(job_id, epoch)) is not None:
                    self._publisher.fail(job, code, text)
            case Ready():
                self.tokenizer = Tokenizer.from_str(message.tokenizer.tokenizer_json)
                self._engine.ready = message
                self._engine.became_ready.set()
                self._holding.wake.set()
            case Loading(text):
                log.info("%s", text)
            case LoadFailed(text):
                raise EngineRefused(text)

    def _take_load(self, load: EngineLoad) -> None:
        if self._frees_place or set(self._engine.load.waiting_lanes) - set(load.waiting_lanes):
            self._holding.wake.set()
        self._frees_place = False
        self._engine.load = load
        self._meter.note_step(load)
        self._holding.spans.note_step(load)
        if load.num_step_tokens:
            self._engine.speed.note_step(load.step_s)
            self._engine.steps.end(load.step_s)
        if load.num_running:
            self._engine.steps.begin(time.monotonic())

    def _take_output(self, out: TokenOut | ChoiceEnded) -> None:
        """Records one choice's output and tells the engine if it must stop."""
        job = self._holding.get(out.job_id, out.epoch)
        if job is None:
            if isinstance(out, TokenOut):
                self._holding.count_late(out.job_id, out.epoch)
            return
        num_going_on = job.num_going_on
        try:
            is_stopped = job.take(out)
        except Exception as exc:  # fails this job only
            log.error("job failed job_id=%s error=%s", out.job_id, type(exc).__name__)
            self._publisher.fail(job, ErrorCode.ENGINE_ERROR, "its output could not be decoded")
            self._engine.send([StopJob(out.job_id, out.epoch)])
            return
        if isinstance(out, TokenOut):
            self._meter.note_token(job, out.choice)
            self._holding.spans.note_token(job)
        self._publisher.note(job)
        if job.num_going_on < num_going_on:
            self._frees_place = True
        if is_stopped:
            self._engine.send([StopChoice(out.job_id, out.epoch, out.choice)])


def _about(job: HeldJob) -> str:
    """What may be kept about a job that killed an engine: sizes and a hash, never its text."""
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


_NUM_LOOKS = 10


class Watchdog:
    """Waits for an engine that has work but sends nothing for `limit_s` seconds.

    Counts wake-ups instead of reading the clock, because a suspended machine gives the engine no
    time either.
    """

    def __init__(self, limit_s: float, has_work: Callable[[], bool]) -> None:
        self._every_s = limit_s / _NUM_LOOKS
        self._has_work = has_work
        self._num_silent = 0

    def hear(self) -> None:
        """The engine sent a message."""
        self._num_silent = 0

    async def engine_hangs(self) -> None:
        """Returns once the engine hangs."""
        while self._num_silent < _NUM_LOOKS:
            await asyncio.sleep(self._every_s)
            self._num_silent = self._num_silent + 1 if self._has_work() else 0
