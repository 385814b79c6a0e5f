"""The long-lived half of a worker: owns Redis, leases, text and signals. No torch.

Claims what there is room for and hands it to the engine process, which owns the device; the other
duties have rooms of their own: engine_keeper, publisher, leases.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Coroutine

from contract import tasks
from contract.calls import Claimed, Release
from contract.errors import BrokerUnavailable
from workers import logs
from workers.configuration import ConfigurationError
from workers.engine_keeper import EngineKeeper, EngineRefused
from workers.held_job import HeldJob
from workers.holding import EngineLink, Holding
from workers.lane import Lane
from workers.leases import LeaseKeeper
from workers.messages import Reconfigure
from workers.publisher import Publisher
from workers.settings import WorkerSettings, new_incarnation

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_LOAD_FAILED = 3

_POLL_S = 1.0  # hints may be lost
_RETRY_S = 0.2  # while Redis is away
_RELEASE_ATTEMPTS = 3


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
    """One incarnation of a worker. Raises ConfigurationError where batching.yaml is wrong."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._lane = Lane(settings, new_incarnation())
        self._engine = EngineLink(settings.engine_options())
        logs.stamp(self._engine.options.batching_version)
        self._holding = Holding(self._engine)
        self._publisher = Publisher(self._lane, self._holding.drop)
        parts = (settings, self._lane, self._engine, self._holding, self._publisher)
        self._keeper = EngineKeeper(*parts)
        self._leases = LeaseKeeper(*parts)
        self._draining = asyncio.Event()
        self._claims_over = asyncio.Event()

    def drain(self) -> None:
        """Claims no more; ends when the running jobs have ended or the budget is spent."""
        if not self._draining.is_set():
            num_held, budget_s = len(self._holding.jobs), self._settings.drain_s
            log.info("draining jobs_held=%d budget_s=%.1f", num_held, budget_s)
        self._draining.set()
        self._holding.wake.set()

    def reload(self) -> None:
        """Reads batching.yaml again; one that cannot be used changes nothing."""
        try:
            options = self._settings.engine_options()
        except ConfigurationError as exc:
            log.error("not reloaded: %s", exc)
            return
        self._engine.options = options
        logs.stamp(options.batching_version)
        log.info("reloaded")
        self._engine.send([Reconfigure(options)])

    async def run(self) -> int:
        """Serves until drained. Returns the exit status."""
        duties: list[Coroutine[None, None, None]] = [
            self._keeper.run(),
            self._claim_jobs(),
            self._publisher.run(),
            *self._leases.duties(),
            self._drained(),
        ]
        running = [asyncio.create_task(duty) for duty in duties]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        await tasks.end(*running)
        await self._close()
        try:
            for task in running:
                if not task.cancelled():
                    task.result()
        except EngineRefused as refusal:
            log.error("%s", refusal)
            return EXIT_LOAD_FAILED
        return EXIT_OK

    # --- claiming -----------------------------------------------------------------------------

    async def _claim_jobs(self) -> None:
        has_lost_reply = False
        while not self._draining.is_set():
            await self._woken()
            try:
                if has_lost_reply and self._engine.ready is not None:
                    await self._start_all(await self._lane.mine(list(self._holding.jobs)))
                    has_lost_reply = False
                await self._claim_while_room()
            except BrokerUnavailable:
                has_lost_reply = True  # it may have handed us jobs all the same
                await asyncio.sleep(_RETRY_S)
        self._claims_over.set()
        await asyncio.Event().wait()  # the other duties go on

    async def _claim_while_room(self) -> None:
        while (room := self._holding.room()) is not None and not self._draining.is_set():
            claimed = await self._lane.claim(
                max_jobs=room.max_jobs,
                max_tokens=room.max_tokens,
                is_idle=not self._holding.jobs,
                config_version=self._engine.options.batching_version,
            )
            await self._start_all(claimed)
            if not claimed:
                return

    async def _woken(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await self._holding.wake.wait()
        self._holding.wake.clear()

    async def _start_all(self, claimed: list[Claimed]) -> None:
        for job in claimed:
            await self._start(job)

    async def _start(self, claimed: Claimed) -> None:
        assert self._keeper.tokenizer is not None
        job_id = claimed.job.id
        job = HeldJob(claimed, self._keeper.tokenizer)
        if claimed.next_number > 1:
            log.info("resuming job_id=%s attempt=%d", job_id, claimed.attempt)
            job.replay(await self._lane.read_log(job_id, claimed.job.tenant))
        if self._engine.client is None:  # it died meanwhile
            await self._lane.release([Release(job_id, claimed.epoch, "drain")])
            return
        self._holding.jobs[job_id] = job
        if job.is_complete:
            self._publisher.note(job)
        else:
            self._engine.send([job.start_message()])

    # --- the end ------------------------------------------------------------------------------

    async def _drained(self) -> None:
        """Returns when the worker may go: asked to, and holding nothing or out of time."""
        await self._draining.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_s):
                await self._claims_over.wait()
                while self._holding.jobs:
                    self._holding.job_left.clear()
                    await self._holding.job_left.wait()

    async def _close(self) -> None:
        self._publisher.clear()
        held = self._holding.clear()
        if held:
            await self._give_back(held)
        if self._engine.client is not None:
            await self._engine.client.stop()
        with contextlib.suppress(BrokerUnavailable):
            await self._lane.say_goodbye()
        await self._lane.aclose()

    async def _give_back(self, jobs: list[HeldJob]) -> None:
        """Releases what could not be finished; where Redis is away, the leases will lapse."""
        releases = [Release(job.job.id, job.epoch, "drain") for job in jobs]
        for _ in range(_RELEASE_ATTEMPTS):
            with contextlib.suppress(BrokerUnavailable):
                await self._lane.release(releases)
                return
            await asyncio.sleep(_RETRY_S)
