"""The partitions as one gateway calls them, each with a circuit breaker: a partition that does not
answer stops no other one; and the bounds that they share."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from cachetools import LRUCache
from msgspec.structs import replace

from contract.connection import broker_errors, connect, now_ms, repeated
from contract.errors import (
    BrokerFull,
    BrokerReplica,
    BrokerUnavailable,
    BrokerUnfit,
    CommandDenied,
    ErrorCode,
    JobRefused,
    WireError,
    wire_errors,
)
from contract.function_types import Submission
from contract.jobs import Job
from contract.library import check_fitness, ensure_library
from contract.partitions import MapChanged
from contract.shards import Shard, Shards
from contract.shares import PERIOD_S, rebalanced
from gateway.redis.hints import Hints
from gateway.settings import GatewaySettings

log = logging.getLogger("batchway.gateway")

MAX_CALLS = 128  # concurrent calls of a partition, each on its own connection; others wait
_MAX_BOUNDS = 1000  # of lanes of models, that a gateway remembers

T = TypeVar("T")


class Breaker:
    """Opens when a call fails. After a while, one call at a time may try."""

    def __init__(self, open_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._open_s = open_s
        self._clock_s = clock_s
        self._open_until_s: float | None = None
        self._is_probing = False
        self._away_since_s: float | None = None
        self._reason = ""

    def check(self) -> None:
        """Raises BrokerUnavailable if a call would be rejected."""
        if self._open_until_s is not None and (
            self._is_probing or self._clock_s() < self._open_until_s
        ):
            raise BrokerUnavailable(f"{self._reason}, a moment ago")

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Surrounds one call. Raises BrokerUnavailable at once while open."""
        self.check()
        is_probe = self._is_probing = self._open_until_s is not None
        try:
            yield
        except (BrokerFull, BrokerReplica, BrokerUnfit, CommandDenied):
            self._note_answer()
            raise
        except BrokerUnavailable as exc:
            self._open_until_s, self._reason = self._clock_s() + self._open_s, str(exc)
            if self._away_since_s is None:
                self._away_since_s = self._clock_s()
                log.warning("no answer from Redis: %s", exc)
            raise
        else:
            self._note_answer()
        finally:
            if is_probe:
                self._is_probing = False

    def _note_answer(self) -> None:
        self._open_until_s = None
        if self._away_since_s is not None:
            log.info("Redis answers again after %.0f s", self._clock_s() - self._away_since_s)
            self._away_since_s = None


class GatewayShard(Shard):
    """One partition. All its parts but `hints` must be called through `call`."""

    def __init__(self, settings: GatewaySettings, number: int) -> None:
        super().__init__(settings.redis_url, settings.namespace, number)
        client = connect(settings.redis_url, self.keys)
        self.hints = Hints(client, max_bytes=settings.max_buffer_bytes)
        self.swept_s = 0.0
        self._breaker = Breaker(settings.breaker_open_s)
        self._slots = asyncio.Semaphore(MAX_CALLS)
        self._has_library = False
        self._loading = asyncio.Lock()

    async def aclose(self) -> None:
        await self.hints.aclose()
        await super().aclose()

    async def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Returns the function's result. Raises BrokerUnavailable, at once if Redis failed a moment
        ago; BrokerUnfit; CommandDenied, which it logs; and what the function raises."""
        self._breaker.check()
        async with self._slots:
            try:
                if not self._has_library:
                    await self._load_library()
                with self._breaker.guard():
                    return await function()
            except (CommandDenied, BrokerFull, BrokerReplica, BrokerUnfit) as exc:
                log.error("%s", exc)
                raise

    async def _load_library(self) -> None:
        """Loads the library once for all calls that wait for it: if it fails, they fail at once."""
        async with self._loading:
            with self._breaker.guard():
                if not self._has_library:
                    await check_fitness(self.client)
                    await ensure_library(self.client)
                    self._has_library = True


class GatewayShards(Shards[GatewayShard]):
    """All partitions of one gateway process. `clock`: monotonic seconds."""

    def __init__(self, settings: GatewaySettings, clock: Callable[[], float]) -> None:
        super().__init__(lambda number: GatewayShard(settings, number), settings.partitions, clock)
        self._bounds: LRUCache[tuple[str, str], int] = LRUCache(_MAX_BOUNDS)
        self._max_bytes = 0
        self._refusing: set[int] = set()
        self._balanced_s = float("-inf")

    def note(self, job: Job, submission: Submission) -> None:
        """The fleet's bounds, as a submission names them."""
        self._bounds[job.model, job.lane] = submission.lane_bound_tokens
        self._max_bytes = submission.max_stored_bytes

    async def note_refusal(self, number: int, refusal: JobRefused) -> None:
        """A partition has refused a job: if for its part of a bound, that is to become larger."""
        if refusal.limit == "lane_tokens" or refusal.code is ErrorCode.STORAGE_FULL:
            self._refusing.add(number)
            await self.rebalance()

    async def rebalance(self) -> None:
        """Shares the bounds out otherwise if the rule of contract/shares.py says so: one gateway of
        all, once a period. Does nothing where a partition does not answer."""
        if self._map.is_single or self._clock() - self._balanced_s < PERIOD_S:
            return
        self._balanced_s = self._clock()
        with suppress(BrokerUnavailable, CommandDenied, WireError, MapChanged):
            await self.refresh()
            known, refusing = self._map, frozenset(self._refusing)
            self._refusing.clear()
            time_ms = await self.first.call(lambda: now_ms(self.first.client))
            if time_ms - known.shared_ms < PERIOD_S * 1000:
                return
            used = {number: await self._used(self.at(number)) for number in known.numbers}
            parts = rebalanced(known, used, refusing)
            if parts is None:
                return
            entries = {n: replace(known.entries[n], share=part) for n, part in parts.items()}
            await self.ask(0, lambda homes: homes.chart(known, entries, time_ms))
            log.info("bounds shared out otherwise parts=%s", parts)
            await self.refresh()

    async def _used(self, shard: GatewayShard) -> float:
        """How much of the fleet's bounds a partition uses: of the lane, or of the storage, of which
        it uses most."""

        async def read() -> list[bytes | None]:
            with broker_errors(shard.client, "HGET"):
                async with shard.client.pipeline(transaction=False) as pipe:
                    pipe.hget(shard.keys.of("stored", "tenants"), "")
                    for model, lane in bounds:
                        pipe.hget(shard.keys.of("counters", model, lane), "queued_tokens")
                    return list(await repeated(pipe.execute))

        bounds = {names: bound for names, bound in self._bounds.items() if bound}
        limits = [self._max_bytes, *bounds.values()]
        with wire_errors("what waits in lanes"):
            found = zip(await shard.call(read), limits, strict=True)
            return max(0.0, *(int(value or 0) / limit for value, limit in found if limit), 0.0)
