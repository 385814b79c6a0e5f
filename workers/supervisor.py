"""The long-lived half of a worker: owns Redis, leases, text and signals. No torch.

One task each: claim what there is room for, take in what the engine says, publish it, beat and
sweep. The engine process owns the device; if it dies its jobs go back and it is started again.
"""

import asyncio
import contextlib
import json
import logging
import signal
import time
from collections.abc import Coroutine
from typing import Literal

from tokenizers import Tokenizer

from contract.errors import BrokerUnavailable, ErrorCode
from contract.functions import Claimed, Release
from workers.configuration import ConfigurationError
from workers.engine_client import EngineClient
from workers.held_job import HeldJob
from workers.lane import Lane, make_card
from workers.messages import (
    ChoiceEnded,
    EngineLoad,
    FromEngine,
    JobFailed,
    LoadFailed,
    Loading,
    Ready,
    Reconfigure,
    StopChoice,
    StopJob,
    TokenOut,
)
from workers.publisher import Publisher
from workers.settings import WorkerSettings, new_incarnation

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_LOAD_FAILED = 3

_POLL_S = 1.0  # hints may be lost
_RETRY_S = 0.2  # while Redis is away
_ENGINE_RESTART_S = 1.0
_MAX_CLAIM = 64  # jobs in one call
# Outputs mostly end before their cap, and the engine preempts when they do not: so a worker
# claims up to twice what its KV cache could hold if every job ran to its cap.
_OVERCOMMIT = 2
_IDLE = EngineLoad(0, 0, 0, 0, 0.0)


async def run_worker(settings: WorkerSettings) -> int:
    """Runs a worker until SIGTERM or SIGINT; returns its exit status."""
    try:
        supervisor = Supervisor(settings)
    except ConfigurationError as exc:
        log.error("%s", exc)
        return EXIT_LOAD_FAILED
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.drain)
    loop.add_signal_handler(signal.SIGHUP, supervisor.reload)
    return await supervisor.run()


class Supervisor:
    """One incarnation of a worker."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._options = settings.engine_options()
        self._incarnation = new_incarnation()
        self._lane = Lane(settings, self._incarnation)
        self._held: dict[str, HeldJob] = {}
        self._publisher = Publisher(self._lane, self._drop)
        self._wake = asyncio.Event()
        self._ended_outside: asyncio.Queue[str] = asyncio.Queue()
        self._draining = asyncio.Event()
        self._claims_over = asyncio.Event()
        self._job_left = asyncio.Event()
        self._engine: EngineClient | None = None
        self._ready: Ready | None = None
        self._tokenizer: Tokenizer | None = None
        self._load = _IDLE
        self._refusal: str | None = None
        self._is_published = False

    def drain(self) -> None:
        """Claims no more; ends when the running jobs have ended or the budget is spent."""
        if not self._draining.is_set():
            log.info("draining jobs_held=%d budget_s=%.0f", len(self._held), self._settings.drain_s)
        self._draining.set()
        self._wake.set()

    def reload(self) -> None:
        """Reads batching.yaml again; one that cannot be used changes nothing."""
        try:
            self._options = self._settings.engine_options()
        except ConfigurationError as exc:
            log.error("not reloaded: %s", exc)
            return
        log.info("reloaded batching=%s", self._options.batching_version or "none")
        if self._engine is not None:
            self._engine.send([Reconfigure(self._options)])

    async def run(self) -> int:
        """Serves until drained. Returns the exit status."""
        duties: list[Coroutine[None, None, None]] = [
            self._keep_engine(),
            self._claim_jobs(),
            self._publisher.run(),
            self._beat(),
            self._watch_fence(),
            self._sweep(),
            self._lane.listen(self._wake, self._ended_outside),
            self._hear_of_ended(),
        ]
        tasks = [asyncio.create_task(duty) for duty in duties]
        drained = asyncio.create_task(self._drained())
        await asyncio.wait([*tasks, drained], return_when=asyncio.FIRST_COMPLETED)
        await _end_tasks({*tasks, drained})
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await self._close()
        for result in results:
            if isinstance(result, Exception):
                raise result
        if self._refusal is not None:
            log.error("%s", self._refusal)
            return EXIT_LOAD_FAILED
        return EXIT_OK

    # --- the engine process -------------------------------------------------------------------

    async def _keep_engine(self) -> None:
        """Starts the engine, takes in what it says, and starts it again if it dies."""
        while True:
            self._engine = await EngineClient.start(self._settings.engine_module, self._options)
            async for messages in self._engine.messages():
                await self._take_in(messages)
            status = await self._engine.stop()
            self._engine, self._ready, self._load = None, None, _IDLE
            if self._refusal is not None:
                return
            log.error("engine process ended status=%d jobs_held=%d", status, len(self._held))
            await self._give_back_all("error", "the engine process ended unexpectedly")
            await asyncio.sleep(_ENGINE_RESTART_S)

    async def _take_in(self, messages: list[FromEngine]) -> None:
        stops: list[StopChoice | StopJob] = []
        for message in messages:
            match message:
                case TokenOut() | ChoiceEnded():
                    stops += self._take_output(message)
                case JobFailed(job_id, epoch, code, text):
                    if self._holds(job_id, epoch):
                        self._publisher.fail(self._held[job_id], code, text)
                case EngineLoad():
                    if self._load.num_waiting > 0 and message.num_waiting == 0:
                        self._wake.set()
                    self._load = message
                case Ready():
                    await self._get_ready(message)
                case Loading(text):
                    log.info("%s", text)
                case LoadFailed(text):
                    self._refusal = text
        self._send(stops)

    def _take_output(self, out: TokenOut | ChoiceEnded) -> list[StopChoice | StopJob]:
        """Notes one choice's output; returns what the engine must hear of it."""
        if not self._holds(out.job_id, out.epoch):
            return []
        job = self._held[out.job_id]
        try:
            if isinstance(out, ChoiceEnded):
                job.on_ended(out)
                is_stopped = False
            else:
                is_stopped = job.on_token(out)
        except Exception as exc:  # an error of this job's text is this job's alone
            log.error("job failed job_id=%s error=%s", out.job_id, type(exc).__name__)
            self._publisher.fail(job, ErrorCode.ENGINE_ERROR, "its output could not be decoded")
            return [StopJob(out.job_id, out.epoch)]
        self._publisher.note(job)
        return [StopChoice(out.job_id, out.epoch, out.choice)] if is_stopped else []

    async def _get_ready(self, ready: Ready) -> None:
        self._tokenizer = Tokenizer.from_str(ready.tokenizer.tokenizer_json)
        self._ready = ready
        self._is_published = False
        while not self._is_published:
            try:
                await self._publish_model()
            except BrokerUnavailable as exc:
                log.warning("cannot publish the model: %s", exc)
                await asyncio.sleep(_POLL_S)
        self._wake.set()
        log.info(
            "ready model=%s incarnation=%s kv_tokens=%d",
            self._settings.served_model_name,
            self._incarnation,
            ready.num_blocks * ready.block_size,
        )

    async def _publish_model(self) -> None:
        """Makes this worker and its model known. Raises BrokerUnavailable."""
        assert self._ready is not None
        card = make_card(self._settings.served_model_name, self._ready)
        await self._lane.ensure_library()
        await self._lane.publish_model(card, self._ready.tokenizer)
        await self._lane.heartbeat([], self._info())
        self._is_published = True

    def _send(self, messages: list[StopChoice | StopJob]) -> None:
        if self._engine is not None:
            self._engine.send(messages)

    # --- claiming -----------------------------------------------------------------------------

    async def _claim_jobs(self) -> None:
        while not self._draining.is_set():
            await self._woken()
            while (room := self._room()) is not None and not self._draining.is_set():
                try:
                    claimed = await self._lane.claim(max_jobs=room[0], max_tokens=room[1])
                    for job in claimed:
                        await self._start(job)
                except BrokerUnavailable:  # leases of what was claimed and not started will lapse
                    await asyncio.sleep(_RETRY_S)
                    break
                if not claimed:
                    break
        self._claims_over.set()
        await asyncio.Event().wait()  # the other duties go on

    async def _woken(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await self._wake.wait()
        self._wake.clear()

    def _room(self) -> tuple[int, int] | None:
        """How many jobs and tokens this worker could start now; None where it should wait."""
        if self._ready is None or (self._held and self._load.num_waiting > 0):
            return None
        num_choices = sum(job.job.params.n for job in self._held.values())
        max_jobs = min(self._options.max_num_seqs - num_choices, _MAX_CLAIM)
        if max_jobs <= 0:
            return None
        if not self._held:
            return max_jobs, 2**53  # what can never fit is refused by the engine, not left waiting
        held_tokens = sum(job.cost_tokens for job in self._held.values())
        kv_tokens = self._ready.num_blocks * self._ready.block_size
        max_tokens = _OVERCOMMIT * kv_tokens - held_tokens
        return (max_jobs, max_tokens) if max_tokens > 0 else None

    async def _start(self, claimed: Claimed) -> None:
        assert self._tokenizer is not None
        job_id = claimed.job.id
        job = HeldJob(claimed, self._tokenizer)
        if claimed.next_number > 1:
            log.info("resuming job_id=%s attempt=%d", job_id, claimed.attempt)
            job.replay(await self._lane.read_log(job_id, claimed.job.tenant))
        if self._engine is None:  # it died meanwhile
            await self._lane.release([Release(job_id, claimed.epoch, "drain")])
            return
        self._held[job_id] = job
        if job.is_complete:
            self._publisher.note(job)
        else:
            self._engine.send([job.start_message()])

    def _holds(self, job_id: str, epoch: int) -> bool:
        held = self._held.get(job_id)
        return held is not None and held.epoch == epoch

    def _drop(self, job: HeldJob) -> None:
        """Forgets a job that has ended, or that is no longer ours."""
        if self._holds(job.job.id, job.epoch):
            del self._held[job.job.id]
            if not job.is_complete:
                self._send([StopJob(job.job.id, job.epoch)])
            self._wake.set()
            self._job_left.set()

    # --- leases -------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            if self._ready is not None:
                try:
                    await self._beat_once()
                except BrokerUnavailable:
                    self._is_published = False  # Redis may come back empty
            await asyncio.sleep(self._settings.heartbeat_s)

    async def _beat_once(self) -> None:
        if not self._is_published:
            await self._publish_model()
        held = [(job.job.id, job.epoch) for job in self._held.values()]
        for job_id in await self._lane.heartbeat(held, self._info()):
            if job_id in self._held and (job_id, self._held[job_id].epoch) in held:
                self._drop(self._held[job_id])

    async def _watch_fence(self) -> None:
        """Drops every job when Redis has been silent for most of a lease: others may hold them."""
        while True:
            silent_s = time.monotonic() - self._lane.last_contact_s
            if self._held and silent_s > self._settings.self_fence_s:
                log.warning("self-fence silent_s=%.1f jobs_held=%d", silent_s, len(self._held))
                self._publisher.clear()
                for job in list(self._held.values()):
                    self._drop(job)
            await asyncio.sleep(self._settings.lease_s / 20)

    async def _sweep(self) -> None:
        while True:
            with contextlib.suppress(BrokerUnavailable):
                await self._lane.sweep()
            await asyncio.sleep(_POLL_S)

    async def _hear_of_ended(self) -> None:
        """Stops jobs that were cancelled or expired, before their next append is refused."""
        while True:
            job_id = await self._ended_outside.get()
            if job_id in self._held:
                self._drop(self._held[job_id])

    def _info(self) -> str:
        return json.dumps(
            {
                "jobs_held": len(self._held),
                "num_running": self._load.num_running,
                "num_waiting": self._load.num_waiting,
                "num_free_blocks": self._load.num_free_blocks,
                "num_blocks": self._ready.num_blocks if self._ready else 0,
                "batching": self._options.batching_version,
                "step_s": round(self._load.step_s, 6),
            }
        )

    # --- the end ------------------------------------------------------------------------------

    async def _drained(self) -> None:
        """Returns when the worker may go: asked to, and holding nothing or out of time."""
        await self._draining.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_s):
                await self._claims_over.wait()
                while self._held:
                    self._job_left.clear()
                    await self._job_left.wait()

    async def _give_back_all(self, kind: Literal["drain", "error"], message: str = "") -> None:
        """Releases every held job; `error` uses up an attempt and says what went wrong."""
        code = ErrorCode.ENGINE_ERROR if kind == "error" else ""
        releases = [
            Release(job.job.id, job.epoch, kind, code, message) for job in self._held.values()
        ]
        self._publisher.clear()
        self._held.clear()
        self._job_left.set()
        if releases:
            with contextlib.suppress(BrokerUnavailable):  # their leases will lapse
                await self._lane.release(releases)

    async def _close(self) -> None:
        await self._give_back_all("drain")
        if self._engine is not None:
            await self._engine.stop()
        if self._ready is not None:
            with contextlib.suppress(BrokerUnavailable):
                await self._lane.say_goodbye()
        await self._lane.aclose()


async def _end_tasks(tasks: set[asyncio.Task[None]]) -> None:
    """Cancels tasks until they have ended: asyncio.wait_for of Python 3.11, which the Redis
    client uses, can lose a cancel that comes just as it is done."""
    while tasks:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=0.1)
