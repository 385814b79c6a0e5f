"""The partitions as one process calls them: for each a client and its calls; the map of partitions
and the homes of tenants, cached."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Generic, Self, TypeVar

import redis.asyncio
from cachetools import LRUCache

from contract.batches import Batches
from contract.connection import connect
from contract.errors import BrokerUnavailable, WireError
from contract.files import Files
from contract.functions import Functions
from contract.ids import partition_of
from contract.keys import Keys
from contract.operations import Operations
from contract.outbox import Outbox
from contract.partitions import (
    MAX_PARTITIONS,
    Home,
    Homes,
    PartitionMap,
    home_of,
    lower_rests,
    open_partitions,
)
from contract.pauses import Pauses

log = logging.getLogger("batchway.partitions")

MAP_TTL_S = 1.0
SINGLE_TTL_S = 10.0  # without a map: a partition tells if there is one now
_MAX_HOMES = 100_000

T = TypeVar("T")


class Shard:
    """One partition."""

    def __init__(self, redis_url: str, namespace: str, number: int) -> None:
        self.number = number
        self.keys = Keys(namespace, number)
        self.client: redis.asyncio.Redis = connect(redis_url, self.keys)
        parts = self.client, self.keys
        self.functions = Functions(*parts)
        self.outbox = Outbox(*parts)
        self.files = Files(*parts)
        self.batches = Batches(*parts)
        self.operations = Operations(*parts)
        self.pauses = Pauses(*parts)
        self.homes = Homes(*parts)

    async def aclose(self) -> None:
        await self.client.aclose()

    async def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Returns the function's result; raises what it raises. All calls are made through it."""
        return await function()


S = TypeVar("S", bound=Shard)


class Shards(Generic[S]):
    """All partitions. `make`: of a number; `num_partitions`: made if there is no map; `clock`:
    monotonic seconds."""

    def __init__(
        self,
        make: Callable[[int], S],
        num_partitions: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._num_partitions = num_partitions
        self._clock = clock
        self._shards: dict[int, S] = {}
        self._homes: LRUCache[str, Home] = LRUCache(_MAX_HOMES)
        self._map = PartitionMap()
        self._read_s = float("-inf")
        self._closing: set[asyncio.Task[None]] = set()
        self.first = self.at(0)
        # A gateway of one partition starts without reading: if there are more, they say so.
        self.reads_first = num_partitions > 1

    async def aclose(self) -> None:
        await asyncio.gather(*(shard.aclose() for shard in self._shards.values()))

    def at(self, number: int) -> S:
        """A partition, whether the map has it or not."""
        if (shard := self._shards.get(number)) is None:
            shard = self._shards[number] = self._make(number)
        return shard

    async def of(self, object_id: str) -> S:
        """The partition of a job, file, batch or operation. An id of none that there is leads to
        partition 0, which does not know it either. Raises BrokerUnavailable."""
        number = partition_of(object_id)
        if 0 < number < MAX_PARTITIONS and number not in self._map.entries:
            await self.refresh()  # another gateway may know a partition that was added just now
        return self.at(number) if number in self._map.entries else self.first

    async def all(self) -> list[S]:
        """All partitions, 0 first. Raises BrokerUnavailable until the map was read."""
        known = await self.current()
        return [self.at(number) for number in known.numbers]

    async def current(self) -> PartitionMap:
        """The map, about a second old. Raises BrokerUnavailable until it was read."""
        is_first = self._read_s == float("-inf")
        if is_first and not self.reads_first:
            self._read_s = self._clock()
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
        self._note(await open_partitions(self.ask, self._num_partitions))
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
            home, now = await home_of(self.ask, tenant, known)
            self._note(now)
            self._homes[tenant] = home
        return home

    async def places(self, tenant: str) -> list[S]:
        """The partitions that may hold something of a tenant ('': of any), its home first."""
        if not tenant:
            return await self.all()
        home = await self.home(tenant)
        known = await self.current()
        return [self.at(n) for n in reversed(home.partitions) if n in known.entries]

    def share(self, number: int) -> float:
        """A partition's part of the fleet's bounds."""
        return self._map.share(number)

    async def lower_rests(self, shard: S) -> None:
        """Brings what the tenants of a partition have left in others up to date. Raises
        BrokerUnavailable, WireError."""
        await lower_rests(self.ask, shard.number)

    async def forget(self, tenant: str) -> None:
        """A partition has refused a tenant, because it has moved or the map is new."""
        self._homes.pop(tenant, None)
        with suppress(WireError):
            await self.refresh()

    async def ask(self, number: int, call: Callable[[Homes], Awaitable[T]], /) -> T:
        shard = self.at(number)
        return await shard.call(lambda: call(shard.homes))


class OpenShards(Shards[Shard]):
    """The partitions of a command, which reads the map first and closes its clients."""

    def __init__(self, redis_url: str, namespace: str) -> None:
        super().__init__(lambda number: Shard(redis_url, namespace, number))
        self.reads_first = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
