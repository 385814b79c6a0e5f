"""Faults, drawn at random from a seed, and inflicted on a running fleet.

The draw is reproducible; when a fault strikes a process is not. A fault counts once it has taken
effect.

To add faults for another kind of process, give the fleet its parts, and add a row to `_KINDS` with
a weight and a method.
"""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from contract.connection import end_tasks
from tests.chaos.cluster import ChaosCluster
from tests.chaos.fleet import Fleet
from tests.chaos.parts import LEASE_S, Part, WorkerPart
from tests.chaos.proxy import Doom

ENGINE_CORE = "engine core kill -9"  # of vLLM only
REDIS_FAILOVER = "redis failover"
FAILOVERS = ("primary kill -9", "replica promoted")
_ONLY_BY_NAME = (ENGINE_CORE, REDIS_FAILOVER, *FAILOVERS)
_MAX_AT_ONCE = 4
_REDIS_REST_S = 3.0  # between two faults of Redis: each of its restarts grants leases a grace
_STRIKE_TIMEOUT_S = 3.0  # for a doomed link to be used


@dataclass
class Injector:
    """Inflicts this many faults. `counts` holds those that took effect, by kind."""

    fleet: Fleet
    rng: random.Random
    mean_gap_s: float
    kinds: Sequence[str] = ()  # (): all that meet an engine of one process

    def __post_init__(self) -> None:
        self._draws = random.Random(self.rng.random())  # the same ones, whenever they take effect
        self.counts: Counter[str] = Counter()
        self.is_over = False  # draws no more once it is set
        self.num_bytes_lost = 0  # in power cuts
        self._under_way: set[asyncio.Task[None]] = set()

    @property
    def num_done(self) -> int:
        return self.counts.total()

    async def run(self, number: int) -> None:
        """Returns once this many faults have taken effect and all killed processes run again."""
        try:
            while self.num_done < number and not self.is_over:
                while self.num_done + len(self._under_way) < number and not self.is_over:
                    await asyncio.sleep(self.rng.expovariate(1 / self.mean_gap_s))
                    if len(self._under_way) < _MAX_AT_ONCE:
                        self._begin(self._draw())
                await asyncio.gather(*self._under_way)
        finally:
            await end_tasks(*self._under_way)

    def _draw(self) -> str:
        names = list(self.kinds or (name for name in KINDS if name not in _ONLY_BY_NAME))
        return self._draws.choices(names, [_KINDS[name][0] for name in names])[0]

    def _begin(self, name: str) -> None:
        async def inflict() -> None:
            if await _KINDS[name][1](self):
                self.counts[name] += 1

        task = asyncio.create_task(inflict(), name=name)
        self._under_way.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fleet.failed.set_exception(error)

    # --- processes ----------------------------------------------------------------------------

    async def kill_worker(self) -> bool:
        return await self._replace(self._idle_worker(), signal.SIGKILL)

    async def drain_worker(self) -> bool:
        return await self._replace(self._idle_worker(), signal.SIGTERM)

    async def kill_gateway(self) -> bool:
        return await self._replace(self._idle_gateway(), signal.SIGKILL)

    async def drain_gateway(self) -> bool:
        return await self._replace(self._idle_gateway(), signal.SIGTERM)

    async def stop_worker(self) -> bool:
        return await self._pause(self._idle_worker(), self.rng.uniform(0.2, 2 * LEASE_S))

    async def stop_gateway(self) -> bool:
        return await self._pause(self._idle_gateway(), self.rng.uniform(0.2, 2 * LEASE_S))

    async def kill_callbacks(self) -> bool:
        return await self._replace(self._idle_callbacks(), signal.SIGKILL)

    async def drain_callbacks(self) -> bool:
        return await self._replace(self._idle_callbacks(), signal.SIGTERM)

    async def stop_callbacks(self) -> bool:
        return await self._pause(self._idle_callbacks(), self.rng.uniform(0.2, 2 * LEASE_S))

    async def kill_engine(self) -> bool:
        return await self._kill_engine(WorkerPart.engine_pid)

    async def kill_engine_core(self) -> bool:
        return await self._kill_engine(WorkerPart.engine_core_pid)

    async def stop_engine(self) -> bool:
        seconds = self.rng.uniform(0.2, 2 * LEASE_S)
        part = self._idle_worker()
        if part is None:
            return False
        with part.busy():
            pid = await part.engine_pid()
            if pid is None:
                return False
            await self._stop_for(part, pid, seconds)
        return True

    async def _replace(self, part: Part | None, number: signal.Signals) -> bool:
        """Ends one process and starts its successor after a while."""
        if part is None:
            return False
        with part.busy():
            part.send(number)
            status = await part.wait(30.0)
            if number == signal.SIGTERM:
                assert status == 0, f"{part.name} ended with status {status} on SIGTERM"
            await asyncio.sleep(self.rng.uniform(0, 0.5))
            part.start()
            await part.until_ready()
        return True

    async def _pause(self, part: Part | None, seconds: float) -> bool:
        if part is None:
            return False
        with part.busy():
            await self._stop_for(part, part.pid, seconds)
        return True

    async def _kill_engine(
        self, pid_of: Callable[[WorkerPart], Coroutine[Any, Any, int | None]]
    ) -> bool:
        """Kills one process of an engine; its worker starts another engine."""
        part = self._idle_worker()
        if part is None:
            return False
        with part.busy():
            pid = await pid_of(part)
            if pid is None:
                return False
            times_ready = part.times_ready()
            part.send_to(pid, signal.SIGKILL)
            await part.until_ready(times_ready + 1)
        return True

    async def _stop_for(self, part: Part, pid: int, seconds: float) -> None:
        part.send_to(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            part.send_to(pid, signal.SIGCONT)

    def _idle_worker(self) -> WorkerPart | None:
        """A worker without a fault; None if at most one is left without a fault."""
        idle = [part for part in self.fleet.workers if not part.is_busy]
        return self.rng.choice(idle) if len(idle) > 1 else None

    def _idle_gateway(self) -> Part | None:
        return self._idle(self.fleet.gateways)

    def _idle_callbacks(self) -> Part | None:
        return self._idle(self.fleet.callbacks)

    def _idle(self, parts: Sequence[Part]) -> Part | None:
        idle = [part for part in parts if not part.is_busy]
        return self.rng.choice(idle) if idle else None

    # --- Redis --------------------------------------------------------------------------------

    async def kill_redis(self) -> bool:
        away_s = self.rng.uniform(0, 1.5)
        return await self._at_redis(lambda: self.fleet.redis.kill(away_s))

    async def stop_redis(self) -> bool:
        seconds = self.rng.uniform(0.1, 2.5)
        return await self._at_redis(lambda: self.fleet.redis.pause(seconds))

    async def fill_redis(self) -> bool:
        seconds = self.rng.uniform(0.3, 2.0)
        return await self._at_redis(lambda: self.fleet.redis.fill(seconds))

    async def cut_power(self) -> bool:
        async def cut() -> None:
            links = [part.link for part in self.fleet.parts]
            away_s = self.rng.uniform(0, 1.0)
            self.num_bytes_lost += await self.fleet.redis.cut_power(links, away_s)

        return await self._at_redis(cut)

    async def fail_over(self) -> bool:
        async def fail() -> None:
            links = [part.link for part in self.fleet.parts]
            load_s = self.rng.uniform(0.2, 1.5)
            self.num_bytes_lost += await self.fleet.redis.fail_over(links, load_s)

        return await self._at_redis(fail)

    async def at_cluster(self, fault: Callable[[ChaosCluster], Awaitable[bool]]) -> bool:
        assert self.fleet.cluster is not None, "a fault of clusters"
        return await fault(self.fleet.cluster)

    async def _at_redis(self, fault: Callable[[], Awaitable[None]]) -> bool:
        redis = self.fleet.redis
        if redis.is_busy:
            return False
        redis.is_busy = True
        try:
            await fault()
            await asyncio.sleep(_REDIS_REST_S)
        finally:
            redis.is_busy = False
        return True

    # --- links between processes and Redis ----------------------------------------------------

    async def lose_reply(self) -> bool:
        return await self._doom_link("lose")

    async def cut_reply(self) -> bool:
        return await self._doom_link("cut")

    async def _doom_link(self, kind: Doom) -> bool:
        link = self.rng.choice(self.fleet.parts).link
        link.doom(kind)
        try:
            async with asyncio.timeout(_STRIKE_TIMEOUT_S):
                await link.struck.wait()
        except TimeoutError:
            link.dooms.clear()
            return False
        return True

    async def delay_replies(self) -> bool:
        link = self.rng.choice(self.fleet.parts).link
        before = link.effects["delayed"]
        link.delay_s = self.rng.uniform(0.02, 1.5)  # the timeout of a command is 1 s
        try:
            await asyncio.sleep(self.rng.uniform(0.5, 2.0))
        finally:
            link.delay_s = 0.0
        return link.effects["delayed"] > before

    async def part_link(self) -> bool:
        """Cuts the link to Redis for a while, sometimes for longer than a lease."""
        link = self.rng.choice(self.fleet.parts).link
        with link.refused():
            await asyncio.sleep(self.rng.uniform(0.1, 1.5 * LEASE_S))
        return True


_KINDS: dict[str, tuple[float, Callable[[Injector], Awaitable[bool]]]] = {
    "worker kill -9": (3, Injector.kill_worker),
    "worker SIGSTOP": (3, Injector.stop_worker),
    "worker SIGTERM": (2, Injector.drain_worker),
    "engine kill -9": (3, Injector.kill_engine),
    ENGINE_CORE: (3, Injector.kill_engine_core),
    "engine SIGSTOP": (2, Injector.stop_engine),
    "gateway kill -9": (3, Injector.kill_gateway),
    "gateway SIGSTOP": (2, Injector.stop_gateway),
    "gateway SIGTERM": (1, Injector.drain_gateway),
    "callbacks kill -9": (3, Injector.kill_callbacks),
    "callbacks SIGSTOP": (2, Injector.stop_callbacks),
    "callbacks SIGTERM": (1, Injector.drain_callbacks),
    "redis kill -9": (1.5, Injector.kill_redis),
    "redis SIGSTOP": (1, Injector.stop_redis),
    "redis power cut": (1.5, Injector.cut_power),
    REDIS_FAILOVER: (1, Injector.fail_over),
    "primary kill -9": (10, lambda i: i.at_cluster(ChaosCluster.kill_primary)),
    "replica promoted": (6, lambda i: i.at_cluster(ChaosCluster.promote_replica)),
    "redis memory full": (1, Injector.fill_redis),
    "reply lost": (5, Injector.lose_reply),
    "reply cut": (4, Injector.cut_reply),
    "replies delayed": (3, Injector.delay_replies),
    "link parted": (3, Injector.part_link),
}
KINDS = tuple(_KINDS)
# An asynchronous failover loses writes, which the ledger excuses with `everysec` alone.
_OF_PROCESSES = ("worker ", "engine ", "gateway ", "callbacks ")
CLUSTER_KINDS = (
    *(kind for kind in KINDS if kind.startswith(_OF_PROCESSES) and kind != ENGINE_CORE),
    *FAILOVERS,
)
VLLM_KINDS = tuple(kind for kind in KINDS if kind == ENGINE_CORE or kind not in _ONLY_BY_NAME)
