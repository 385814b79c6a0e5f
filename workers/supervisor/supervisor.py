"""The supervisor process of a worker: Redis, leases, text and signals. Does not import torch.

Claims jobs while there is room and sends them to the engine process. Its other tasks are in
engine_keeper, publisher and leases.
"""

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Coroutine

from msgspec.structs import replace

from contract.connection import end_tasks
from contract.errors import BrokerUnavailable, BrokerUnfit, CommandDenied, ErrorCode, WireError
from contract.function_types import Claimed, Release
from contract.functions import poisoned
from contract.payloads import open_store
from contract.telemetry.tracing import Tracing
from workers import logs
from workers.configuration import ConfigurationError
from workers.ipc.channel import GRACE_S
from workers.ipc.messages import Reconfigure
from workers.settings import WorkerSettings, new_incarnation
from workers.supervisor.claims import POLL_S, Claims
from workers.supervisor.drain import Drain, SpotNotice
from workers.supervisor.engine_keeper import EngineKeeper, EngineRefused
from workers.supervisor.held_job import HeldJob
from workers.supervisor.holding import EngineLink, Holding
from workers.supervisor.leases import LeaseKeeper
from workers.supervisor.metrics import JobSpans, Meter, MetricsUnservable, serve_metrics
from workers.supervisor.prompts import PromptFetcher
from workers.supervisor.publisher import Publisher, ResultKeeper, tidy
from workers.supervisor.warming import Warming
from workers.supervisor.worker_broker import WorkerBroker

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_LOAD_FAILED = 3
EXIT_NEVER_READY = 128 + signal.SIGTERM  # ended while loading: who counts failures must see it

_RETRY_S = 0.2  # between attempts while Redis is unreachable
_MIN_GRACE_S = 0.5  # for releasing jobs, even if the budget is spent


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
    """One run of a worker. Raises ConfigurationError if batching.yaml is wrong, BadNoticeSource,
    and ValueError if the object store setting is wrong."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._broker = WorkerBroker(settings, new_incarnation())
        self._engine = EngineLink(settings.engine_options())
        logs.stamp(self._engine.options.batching_version)
        self._tracing = Tracing("batchway-worker")
        self._holding = Holding(self._engine, spans=JobSpans(self._tracing))
        self._store = open_store(settings.object_store)
        self._results = ResultKeeper(self._store, settings.object_min_bytes, self._broker)
        self._publisher = Publisher(self._broker, self._holding, self._results)
        self._prompts = PromptFetcher(
            self._store, self._broker, self._holding, self._publisher, self._run
        )
        self._drain = Drain(settings.drain_s, settings.drain_release_s)
        self._meter = Meter()
        self._warming = Warming(self._broker, self._holding)
        parts = (settings, self._broker, self._engine, self._holding, self._publisher, self._meter)
        self._keeper = EngineKeeper(*parts, self._warming)
        self._leases = LeaseKeeper(*parts, self._drain, lambda: self.drain("order"))
        self._notice = SpotNotice(settings.spot_notice) if settings.spot_notice else None
        self._claims_over = asyncio.Event()
        self._claims = Claims(settings, self._broker, self._holding)

    def drain(self, why: str = "signal") -> None:
        """Stops claiming. The worker ends when its jobs have ended or the budget is spent."""
        if self._drain.begin():
            num_held, budget_s = len(self._holding.jobs), self._drain.budget_s
            log.info("draining why=%s jobs_held=%d budget_s=%.1f", why, num_held, budget_s)
        self._holding.wake.set()

    def reload(self) -> None:
        """Reads batching.yaml again; keeps the old values if it is invalid."""
        try:
            options = self._settings.engine_options()
        except ConfigurationError as exc:
            log.error("batching.yaml not reloaded: %s", exc)
            return
        self._engine.options = options
        self._claims.read_terms()
        logs.stamp(options.batching_version)
        log.info("batching.yaml reloaded")
        self._engine.send([Reconfigure(options)])

    async def run(self) -> int:
        """Serves until drained, or until a task raises. Returns the exit status."""
        self._tracing.open()
        # The modules' permanent objects would make a collection take as long as a step.
        gc.collect()
        gc.freeze()
        duties: list[Coroutine[None, None, None]] = [
            self._keeper.run(),
            self._claim_jobs(),
            self._publisher.run(),
            *self._leases.duties(),
            self._watch_notice(),
            tidy(self._store, self._broker),
            serve_metrics(self._settings, self._meter),
            self._drained(),
        ]
        running = [asyncio.create_task(duty) for duty in duties]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        await end_tasks(*running)
        await self._close()
        try:
            for task in running:
                if not task.cancelled():
                    task.result()
        except (EngineRefused, BrokerUnfit, CommandDenied, MetricsUnservable) as refusal:
            log.error("%s", refusal)
            return EXIT_LOAD_FAILED
        return EXIT_OK if self._keeper.tokenizer is not None else EXIT_NEVER_READY

    # --- claiming -----------------------------------------------------------------------------

    async def _claim_jobs(self) -> None:
        while not self._drain.begun.is_set():
            await self._claims.wait_for_wake()
            try:
                await self._claims.claim_while_room(self._start_all, self._drain.begun.is_set)
                if not self._drain.begun.is_set():
                    await self._warming.begin()
            except BrokerUnavailable:
                await asyncio.sleep(_RETRY_S)
            except (WireError, CommandDenied) as exc:
                log.error("claim failed: %s", exc)
                await asyncio.sleep(POLL_S)
        self._claims_over.set()
        await asyncio.Event().wait()  # `run` ends with the first task that returns

    async def _start_all(self, claimed: list[Claimed]) -> None:
        for job in claimed:
            try:
                await self._start(job)
            except (BrokerUnavailable, CommandDenied, WireError):
                raise
            except Exception as exc:  # the record is readable, but the job cannot be started
                await self._poison(job, exc)

    async def _poison(self, claimed: Claimed, exc: Exception) -> None:
        job_id, epoch = claimed.job.id, claimed.epoch
        log.error(
            "job not started, failed as poison job_id=%s error=%s", job_id, type(exc).__name__
        )
        if (held := self._holding.get(job_id, epoch)) is not None:
            self._holding.drop(held)
        await self._broker.append([poisoned(job_id, epoch, claimed.next_number)])

    async def _start(self, claimed: Claimed) -> None:
        if self._holding.has_started(claimed.job.id, claimed.epoch):
            await self._release_known(claimed)
        elif claimed.job.stored_prompt is None and not claimed.job.images:
            await self._run(claimed)
        else:
            self._prompts.begin(claimed, self._keeper.hold(claimed))

    async def _run(self, claimed: Claimed) -> None:
        job_id = claimed.job.id
        job = self._keeper.hold(claimed)
        if claimed.next_number > 1:
            log.info("resuming job_id=%s attempt=%d", job_id, claimed.attempt)
            if not await self._replay(job):
                return
        if self._engine.client is None:  # the engine has died
            await self._broker.release([Release(job_id, claimed.epoch, "drain")])
            return
        self._warming.give_way(claimed.job)
        self._holding.start(job, is_first=claimed.attempt == 1 and claimed.next_number == 1)
        if job.is_complete:
            self._publisher.note(job)
        else:
            self._engine.send([job.start_message()])
            job.job = replace(job.job, image_data=())  # the engine has them

    async def _release_known(self, claimed: Claimed) -> None:
        """Releases a job that was claimed twice: Redis lost the first claim in a power cut, or this
        worker dropped the job while still owning it. The next claim gets a new epoch."""
        log.warning("claimed again under epoch=%d job_id=%s", claimed.epoch, claimed.job.id)
        held = self._holding.jobs.get(claimed.job.id)
        if held is not None:
            self._holding.drop(held)
        await self._broker.release([Release(claimed.job.id, claimed.epoch, "drain")])

    async def _replay(self, job: HeldJob) -> bool:
        """Replays a job's log; an unreadable log fails this job only."""
        try:
            job.replay(await self._broker.read_log(job.job.id, job.job.tenant))
        except (BrokerUnavailable, CommandDenied):
            raise
        except Exception as exc:
            log.error(
                "log could not be replayed job_id=%s error=%s", job.job.id, type(exc).__name__
            )
            message = "its log could not be read"
            release = Release(job.job.id, job.epoch, "error", ErrorCode.ENGINE_ERROR, message)
            await self._broker.release([release])
            return False
        return True

    # --- the end ------------------------------------------------------------------------------

    async def _watch_notice(self) -> None:
        if self._notice is not None:
            await self._notice.wait()
            self.drain("spot notice")
        await asyncio.Event().wait()  # `run` ends with the first task that returns

    async def _drained(self) -> None:
        """Returns when draining and either nothing is held or the time is up."""
        await self._drain.begun.wait()
        await _within(self._drain.running_s, self._all_left())

    async def _all_left(self) -> None:
        await self._leases.report_draining()
        await self._claims_over.wait()
        while self._holding.jobs:
            self._holding.job_left.clear()
            await self._holding.job_left.wait()

    async def _close(self) -> None:
        """Releases jobs, stops the engine and deregisters the worker, within the budget."""
        await self._prompts.aclose()
        await self._results.aclose()
        self._publisher.clear()
        held = self._holding.clear()
        client = self._engine.client
        stopping = asyncio.create_task(client.stop(self._grace_s())) if client else None
        await _within(max(_MIN_GRACE_S, self._drain.left_s), self._leave(held))
        if stopping is not None:
            await stopping
        await self._broker.aclose()
        await asyncio.to_thread(self._tracing.close)
        log.info(
            "ended jobs_released=%d tokens_after_cancel=%d",
            len(held),
            self._holding.tokens_after_cancel,
        )

    def _grace_s(self) -> float:
        """Seconds for the engine to finish its step."""
        return max(_MIN_GRACE_S, min(GRACE_S, self._drain.left_s))

    async def _leave(self, held: list[HeldJob]) -> None:
        """Releases unfinished jobs, also those of a claim whose reply was lost, and deregisters. If
        Redis stays unreachable, the leases expire."""
        claims = [(job.job.id, job.epoch) for job in held]
        while True:
            with contextlib.suppress(BrokerUnavailable, CommandDenied, WireError):
                unknown = await self._broker.mine([job_id for job_id, _ in claims])
                claims += [(claimed.job.id, claimed.epoch) for claimed in unknown]
                if claims:
                    items = [Release(i, epoch, "drain") for i, epoch in claims]
                    await self._broker.release(items)
                await self._broker.leave(self._leases.counted())
                return
            await asyncio.sleep(_RETRY_S)


async def _within(budget_s: float, work: Coroutine[None, None, None]) -> None:
    """Runs `work`; cancels it after `budget_s` seconds. Raises what `work` raises."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=budget_s)
    finally:
        await end_tasks(task)
    if not task.cancelled():
        task.result()
