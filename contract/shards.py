"""The partitions as one process that answers for all of them calls them: for each a client and its
calls; which one an id or a tenant leads to."""

import time
from collections.abc import Awaitable, Callable
from typing import Generic, ParamSpec, Self, TypeVar

import redis.asyncio

from contract.batches import Batches
from contract.connection import connect
from contract.files import Files
from contract.functions import Functions
from contract.keys import Keys, partition_of
from contract.operations import Operations
from contract.outbox import Outbox
from contract.partitions import known_number, made_number, partition_of_tenant
from contract.pauses import Pauses

_LOOK_S = 1.0  # between two looks whether the namespace is made

P = ParamSpec("P")
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

    async def aclose(self) -> None:
        await self.client.aclose()

    async def call(
        self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Returns the function's result; raises what it raises. All calls are made through it."""
        return await function(*args, **kwargs)


S = TypeVar("S", bound=Shard)


class Shards(Generic[S]):
    """All partitions. `make`: of a number; `num_partitions`: as this process was given it; `makes`:
    whether it makes a namespace that is not. Each method raises BrokerUnavailable until the number
    was read, and PartitionsDiffer."""

    def __init__(
        self, make: Callable[[int], S], num_partitions: int | None = None, *, makes: bool = False
    ) -> None:
        self._make = make
        self._given = num_partitions
        self._makes = makes
        self.first = make(0)
        self._all = [self.first]
        self._is_known = False
        self._look_at_s = float("-inf")

    async def aclose(self) -> None:
        for shard in self._all:
            await shard.aclose()

    async def all(self) -> list[S]:
        """All partitions, in the order of their numbers. Of a namespace that nobody has made, the
        first."""
        if not self._is_known and time.monotonic() >= self._look_at_s:
            find = made_number if self._makes else known_number
            first = self.first
            number = await first.call(find, first.client, first.keys, self._given)
            self._look_at_s = time.monotonic() + _LOOK_S
            self._is_known = number is not None
            self._all += [self._make(n) for n in range(len(self._all), number or 1)]
        return self._all

    async def of(self, object_id: str) -> S:
        """The partition of a job, file, batch or operation. An id of none that there is leads to
        partition 0, which does not know it either."""
        shards, number = await self.all(), partition_of(object_id)
        return shards[number] if number < len(shards) else self.first

    async def home(self, tenant: str) -> S:
        """The partition of a tenant."""
        shards = await self.all()
        return shards[0] if len(shards) == 1 else shards[partition_of_tenant(tenant, len(shards))]

    async def of_list(self, tenant: str) -> list[S]:
        """The partitions with what a tenant has; '': with what all have."""
        return [await self.home(tenant)] if tenant else await self.all()

    async def each(self, ask: Callable[[S], Awaitable[T]]) -> list[T]:
        """Asks all partitions, one after another."""
        return [await shard.call(ask, shard) for shard in await self.all()]


class OpenShards(Shards[Shard]):
    """The partitions of a command, which closes its clients."""

    def __init__(self, redis_url: str, namespace: str) -> None:
        super().__init__(lambda number: Shard(redis_url, namespace, number))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
