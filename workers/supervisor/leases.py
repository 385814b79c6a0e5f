"""Renews a worker's leases: heartbeats, self-fencing, sweeps and control messages."""

import asyncio
import contextlib
import importlib.metadata
import json
import logging
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from contract.connection import SWEEP_PAUSE_S
from contract.consumer import MAX_CONTROL, keep_leases
from contract.errors import BrokerFull, BrokerUnavailable, BrokerUnfit, CommandDenied, WireError
from contract.function_types import WorkerState
from workers.ipc.messages import EngineReady, Reprioritise
from workers.settings import WorkerSettings
from workers.supervisor.drain import Drain
from workers.supervisor.engine_keeper import RESTART_S
from workers.supervisor.gpu_use import GpuUse
from workers.supervisor.holding import EngineLink, Holding
from workers.supervisor.metrics import Meter
from workers.supervisor.publisher import Publisher
from workers.supervisor.worker_broker import WorkerBroker, make_card

log = logging.getLogger(__name__)

_SWEEP_S = 1.0
_MS = re.compile(r"-?[0-9]{1,16}", re.ASCII)


@dataclass(eq=False)
class LeaseKeeper:
    """The tasks by which this worker keeps, or drops, the leases of its jobs."""

    _settings: WorkerSettings
    _broker: WorkerBroker
    _engine: EngineLink
    _holding: Holding
    _publisher: Publisher
    _meter: Meter
    _drain: Drain
    _on_drain_order: Callable[[], None]

    def __post_init__(self) -> None:
        self._gpu_use = GpuUse(self._engine)
        self._is_published = False
        self._started_s: float | None = time.monotonic()  # None: its duration is reported
        self._control: asyncio.Queue[str] = asyncio.Queue(MAX_CONTROL)

    def duties(self) -> list[Coroutine[None, None, None]]:
        """The coroutines to run concurrently while the worker lives."""
        return [
            keep_leases(self._beat, every_s=self._settings.heartbeat_s, hurry=self._engine.changed),
            self._watch_fence(),
            self._sweep(),
            self._broker.listen(self._holding.wake, self._control),
            self._handle_control(),
            self._gpu_use.watch(),
        ]

    async def report_draining(self) -> None:
        """Sends a heartbeat at once, so that gateways stop counting this worker's capacity."""
        if self._engine.ready is not None and self._is_published:
            with contextlib.suppress(BrokerUnavailable, WireError):
                await self._beat_once()

    async def _beat(self) -> None:
        """From the first time that an engine is ready. While a lost engine is loaded again, the
        heartbeats say so: calls that wait for nothing are then refused, and told when to return."""
        if self._engine.changed.is_set():
            self._engine.changed.clear()
            self._is_published = False
        if self._engine.ready is None and self._started_s is not None:
            return
        try:
            await self._beat_once()
        except BrokerUnfit:
            raise  # this Redis must not hold jobs, so the worker ends
        except (BrokerUnavailable, WireError) as exc:
            log.warning("heartbeat failed: %s", exc)
            self._is_published = False  # Redis may have lost its data

    async def _beat_once(self) -> None:
        was_published, self._is_published = self._is_published, True
        terms = self._settings.lane_terms(self._engine.options)
        lanes = {name: lane.min_share for name, lane in terms.items()}
        ready = self._engine.ready
        if not was_published and ready is not None:
            await self._publish(ready, tuple(lanes))
        held = [(job.job.id, job.epoch) for job in self._holding.jobs.values()]
        epochs = dict(held)
        state = self._state()
        capacity = self._holding.capacity(time.monotonic(), lanes)
        report = (self._info(), state, capacity, self.counted())
        for job_id in await self._broker.heartbeat(held, *report):
            job = self._holding.get(job_id, epochs[job_id])
            if job is not None:
                self._holding.drop(job)
        if state != "draining" and await self._broker.is_to_drain():
            self._on_drain_order()
        if not was_published and self._is_published:
            await self._announce(ready)

    def _state(self) -> WorkerState:
        if self._drain.begun.is_set():
            return "draining"
        return "loading" if self._engine.ready is None else "up"

    async def _publish(self, ready: EngineReady, lanes: tuple[str, ...]) -> None:
        try:
            await self._broker.ensure_library()
            settings = self._settings
            name, path = settings.served_model_name, settings.engine.model_path
            card = make_card(name, ready, lanes, truncates=settings.auto_truncate, path=path)
            await self._broker.publish_model(card, ready.tokenizer)
        except BrokerUnfit:
            raise
        except (BrokerFull, BrokerUnavailable) as exc:  # leases are renewed all the same
            log.warning("model not published: %s", exc)
            self._is_published = False

    async def _announce(self, ready: EngineReady | None) -> None:
        """Tells about the engine's state once after each change."""
        if ready is None:
            await self._broker.announce_start(RESTART_S + self._engine.load_s)
            log.info("loading again load_s=%.1f", self._engine.load_s)
            return
        if self._started_s is not None:
            await self._broker.report_start(time.monotonic() - self._started_s)
            self._started_s = None
        log.info(
            "ready model=%s incarnation=%s kv_tokens=%d",
            self._settings.served_model_name,
            self._broker.incarnation,
            ready.num_blocks * ready.block_size,
        )

    async def _watch_fence(self) -> None:
        """Drops all jobs before their leases expire, if Redis has not renewed them: another worker
        may run them then."""
        while True:
            silent_s = time.monotonic() - self._broker.last_contact_s
            jobs = list(self._holding.jobs.values())
            if jobs and silent_s > self._settings.self_fence_s:
                log.warning("self-fence silent_s=%.1f jobs_held=%d", silent_s, len(jobs))
                self._publisher.clear()
                for job in jobs:
                    self._holding.drop(job)
            await asyncio.sleep(self._settings.lease_s / 20)

    async def _sweep(self) -> None:
        while True:
            try:
                await self._broker.sweep()
                if offers := self._holding.offers():
                    await self._broker.release(offers)
            except BrokerFull:
                await asyncio.sleep(SWEEP_PAUSE_S)
                continue
            except BrokerUnavailable:
                pass
            except (WireError, CommandDenied) as exc:
                log.error("sweep failed: %s", exc)
            await asyncio.sleep(_SWEEP_S)

    async def _handle_control(self) -> None:
        """Handles control messages: changes of held jobs arrive here earlier than in the reply to
        an append. Ignores unknown messages."""
        while True:
            match (await self._control.get()).split():
                case ["ended", job_id, status] if job_id in self._holding.jobs:
                    self._holding.end(self._holding.jobs[job_id], status)
                case ["taken", job_id, number] if number.isdecimal():  # by another worker
                    if (held := self._holding.get(job_id, int(number))) is not None:
                        self._holding.drop(held, "taken")
                case ["moved", job_id, lane, deadline_ms] if (
                    job_id in self._holding.jobs and _MS.fullmatch(deadline_ms)
                ):
                    job = self._holding.jobs[job_id]
                    job.lane, epoch = lane, job.epoch
                    deadline_s = int(deadline_ms) / 1000
                    self._engine.send([Reprioritise(job_id, epoch, lane, deadline_s)])
                case ["warm"]:
                    self._holding.has_warm_offer = True
                    self._holding.wake.set()
                case ["drain"]:
                    self._on_drain_order()

    def counted(self) -> dict[str, int]:
        """Totals for metrics since this worker started."""
        counts = self._meter.counts
        counts.set_total("tokens_after_cancel_total", self._holding.tokens_after_cancel)
        return dict(counts.fields)

    def _info(self) -> str:
        load, ready, settings = self._engine.load, self._engine.ready, self._settings
        is_candidate = settings.candidate_path is not None
        return json.dumps(
            {
                **({"candidate_share": settings.candidate_share} if is_candidate else {}),
                "jobs_held": len(self._holding.jobs),
                "num_running": load.num_running,
                "num_waiting": load.num_waiting,
                "num_free_blocks": load.num_free_blocks,
                "num_blocks": ready.num_blocks if ready else 0,
                "num_cached_blocks": load.num_cached_blocks,
                "num_retained_blocks": load.num_retained_blocks,
                "block_size": ready.block_size if ready else 0,
                "device": ready.device if ready else "",
                "notice": settings.notice,
                "gpu_share": self._gpu_use.share,
                "step_tokens": ready.num_step_tokens if ready else 0,
                "batching": self._engine.options.batching_version,
                "places": self._engine.num_places,
                "version": _version(),
                "step_s": round(load.step_s, 6),
                "tokens_after_cancel": self._holding.tokens_after_cancel,
            }
        )


def _version() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("batchway")
    return ""
