"""The partitions as one gateway calls them: for each a client, a circuit breaker, and the calls;
and the map of partitions and the homes of tenants, cached.

Does not know what is asked of a partition. A partition that does not answer stops no other one.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import redis.asyncio
from cachetools import LRUCache

from contract.batches import Batches
from contract.connection import connect
from contract.errors import BrokerFull, BrokerUnavailable, BrokerUnfit, CommandDenied, WireError
from contract.files import Files
from contract.functions import Functions
from contract.ids import partition_of
from contract.keys import Keys
from contract.library import check_fitness, ensure_library
from contract.operations import Operations
from contract.outbox import Outbox
from contract.partitions import Home, Homes, PartitionMap, home_of, lower_rests, open_partitions
from contract.pauses import Pauses
from gateway.redis.hints import Hints
from gateway.settings import GatewaySettings

log = logging.getLogger("batchway.gateway")

MAX_CALLS = 128  # concurrent calls of a partition, each on its own connection; others wait
MAP_TTL_S = 1.0
SINGLE_TTL_S = 10.0  # without a map: a partition tells if there is one now
_MAX_HOMES = 100_000

T = TypeVar("T")


class Breaker:
    """Opens when a call fails. After a while, one call at a time may try."""

    def __init__(self, open_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._open_s = open_s
        self._clock_s = clock_s
        self._open_until_s: float | None = None
        self._is_probing = False
        self._away_since_s: float | None = None

    def check(self) -> None:
        """Raises BrokerUnavailable if a call would be rejected."""
        if self._open_until_s is not None and (
            self._is_probing or self._clock_s() < self._open_until_s
        ):
            raise BrokerUnavailable("Redis did not answer a moment ago")

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Surrounds one call. Raises BrokerUnavailable at once while open."""
        self.check()
        is_probe = self._is_probing = self._open_until_s is not None
        try:
            yield
        except (BrokerFull, BrokerUnfit, CommandDenied):
            self._note_answer()
            raise
        except BrokerUnavailable as exc:
            self._open_until_s = self._clock_s() + self._open_s
            self._note_absence(exc)
            raise
        else:
            self._note_answer()
        finally:
            if is_probe:
                self._is_probing = False

    def _note_absence(self, exc: BrokerUnavailable) -> None:
        if self._away_since_s is None:
            self._away_since_s = self._clock_s()
            log.warning("no answer from Redis: %s", exc)

    def _note_answer(self) -> None:
        self._open_until_s = None
        if self._away_since_s is not None:
            log.info("Redis answers again after %.0f s", self._clock_s() - self._away_since_s)
            self._away_since_s = None


class Shard:
    """One partition. Its parts must be called through `call`, but `hints`."""

    def __init__(self, settings: GatewaySettings, number: int) -> None:
        self._settings = settings
        self.number = number
        self.keys = Keys(settings.namespace, number)
        self.client: redis.asyncio.Redis = connect(settings.redis_url, self.keys)
        parts = self.client, self.keys
        self.functions = Functions(*parts)
        self.outbox = Outbox(*parts)
        self.files = Files(*parts)
        self.batches = Batches(*parts)
        self.operations = Operations(*parts)
        self.pauses = Pauses(*parts)
        self.homes = Homes(*parts)
        self.hints = Hints(
            connect(settings.redis_url, self.keys), max_bytes=settings.max_buffer_bytes
        )
        self.swept_s = 0.0
        self._breaker = Breaker(settings.breaker_open_s)
        self._slots = asyncio.Semaphore(MAX_CALLS)
        self._has_library = False

    async def aclose(self) -> None:
        await self.hints.aclose()
        await self.client.aclose()

    async def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Returns the function's result. Raises BrokerUnavailable, at once if Redis failed a moment
        ago; BrokerUnfit; CommandDenied, which it logs; and what the function raises."""
        self._breaker.check()
        async with self._slots:
            try:
                with self._breaker.guard():
                    if not self._has_library:
                        await self._load_library()
                    return await function()
            except CommandDenied as exc:
                log.error("%s", exc)
                raise

    async def _load_library(self) -> None:
        await check_fitness(self.client)
        await ensure_library(self.client)
        self._has_library = True


class Shards:
    """All partitions. `clock`: monotonic seconds."""

    def __init__(self, settings: GatewaySettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._shards: dict[int, Shard] = {}
        self._homes: LRUCache[str, Home] = LRUCache(_MAX_HOMES)
        self._map = PartitionMap()
        self._read_s = float("-inf")
        self._closing: set[asyncio.Task[None]] = set()
        self.first = self.at(0)

    async def aclose(self) -> None:
        await asyncio.gather(*(shard.aclose() for shard in self._shards.values()))

    def at(self, number: int) -> Shard:
        """A partition, whether the map has it or not."""
        if (shard := self._shards.get(number)) is None:
            shard = self._shards[number] = Shard(self._settings, number)
        return shard

    async def of(self, object_id: str) -> Shard:
        """The partition of a job, file, batch or operation. An id of none that there is leads to
        partition 0, which does not know it either. Raises BrokerUnavailable."""
        number = partition_of(object_id)
        if number and number not in self._map.entries:
            await self.refresh(MAP_TTL_S)
        return self.at(number) if number in self._map.entries else self.first

    async def all(self) -> list[Shard]:
        """All partitions, 0 first. Raises BrokerUnavailable until the map was read."""
        known = await self.current()
        return [self.at(number) for number in known.numbers]

    async def current(self) -> PartitionMap:
        """The map, about a second old. Raises BrokerUnavailable until it was read."""
        is_first = self._read_s == float("-inf")
        if is_first and self._settings.partitions == 1:
            self._read_s = self._clock()  # a gateway of one partition starts without reading
            return self._map
        try:
            await self.refresh(SINGLE_TTL_S if self._map.is_single else MAP_TTL_S)
        except BrokerUnavailable:
            if is_first:
                raise
        return self._map

    async def refresh(self, ttl_s: float = 0.0) -> None:
        """Reads the map, unless it was read within `ttl_s`. Raises BrokerUnavailable."""
        now_s = self._clock()
        if ttl_s and now_s - self._read_s < ttl_s:
            return
        self._note(await open_partitions(self._ask, self._settings.partitions))
        self._read_s = now_s

    def _note(self, known: PartitionMap) -> None:
        if known.version == self._map.version:
            return
        log.info("partitions version=%d numbers=%s", known.version, known.numbers)
        self._map = known
        for number in self._shards.keys() - known.entries.keys() - {0}:
            task = asyncio.create_task(self._shards.pop(number).aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def home(self, tenant: str) -> Home:
        """The home of a tenant, which may be out of date: then the partition refuses it. Raises
        BrokerUnavailable."""
        known = await self.current()
        if known.is_single:
            return Home()
        if (home := self._homes.get(tenant)) is None:
            home, now = await home_of(self._ask, tenant, known)
            self._note(now)
            self._homes[tenant] = home
        return home

    async def places(self, tenant: str) -> list[Shard]:
        """The partitions that may hold something of a tenant ('': of any), its home first."""
        if not tenant:
            return await self.all()
        home = await self.home(tenant)
        known = await self.current()
        return [self.at(n) for n in reversed(home.partitions) if n in known.entries]

    def share(self, number: int) -> float:
        """A partition's part of the fleet's bounds."""
        return self._map.share(number)

    async def lower_rests(self, shard: Shard) -> None:
        """Brings what the tenants of a partition have left in others up to date. Raises
        BrokerUnavailable, WireError."""
        await lower_rests(self._ask, shard.number)

    async def forget(self, tenant: str) -> None:
        """A partition has refused a tenant, because it has moved or the map is new."""
        self._homes.pop(tenant, None)
        with suppress(WireError):
            await self.refresh()

    async def _ask(self, number: int, call: Callable[[Homes], Awaitable[T]], /) -> T:
        shard = self.at(number)
        return await shard.call(lambda: call(shard.homes))
