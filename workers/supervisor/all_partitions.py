"""A worker's calls of Redis over all partitions. Each goes to the partition that its job's id
names; a partition that does not answer stops no other one.

The worker is a worker of every partition, under one incarnation. Partition 0 has what is not a
tenant's: the model's card, the metrics, the order to drain.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import redis.asyncio
from msgspec.structs import replace

from contract.connection import end_tasks
from contract.errors import BatchwayError, BrokerUnavailable
from contract.events import LogEntry
from contract.function_types import Append, Blame, Release, Verdict, WorkerCapacity, WorkerState
from contract.ids import partition_of
from contract.jobs import JobStatus
from contract.partitions import Homes, lower_rests
from contract.payloads.store import ObjectStore
from workers.settings import WorkerSettings
from workers.supervisor.worker_broker import WorkerBroker

log = logging.getLogger(__name__)

_MAP_S, _SINGLE_MAP_S = 1.0, 5.0  # between two looks at the map; while there is none

T = TypeVar("T")
Item = TypeVar("Item", Append, Release, Blame)
Verdicts = list[tuple[Verdict | JobStatus, int]]
_Report = tuple[str, WorkerState, WorkerCapacity]  # of a heartbeat


class AllPartitions(WorkerBroker):
    """The broker of partition 0, and through it those of the others. `on_wake` is told in which
    partition a job waits; `share_of` tells which part of the worker a partition may count on."""

    def __init__(
        self,
        settings: WorkerSettings,
        incarnation: str,
        clock: Callable[[], float] = time.monotonic,
        client: redis.asyncio.Redis | None = None,
    ) -> None:
        super().__init__(settings, incarnation, clock, client)
        self._others: dict[int, WorkerBroker] = {}
        self._changed = asyncio.Event()  # the partitions have
        self._read_s = -math.inf
        self._report: _Report | None = None
        self.on_wake: Callable[[int], None] = lambda _: None
        self.share_of: Callable[[int], float] = lambda _: 1.0

    def parts(self) -> list[WorkerBroker]:
        """The brokers of all partitions, each of which makes the calls of one."""
        return [self, *self._others.values()] if self._others else [self]

    def part(self, number: int) -> WorkerBroker:
        """The broker of a partition, whether the map has it yet or not."""
        if number == self.partition:
            return self
        if (found := self._others.get(number)) is None:
            found = WorkerBroker(self._settings, self.incarnation, self._clock, partition=number)
            self._others[number] = found
            self._changed.set()
        return found

    async def aclose(self) -> None:
        await asyncio.gather(*(part.aclose() for part in self._others.values()))
        await super().aclose()

    # --- the map

    async def refresh(self) -> None:
        """Reads the map, and begins to serve new partitions. Raises BrokerUnavailable."""
        now_s = self._clock()
        if now_s - self._read_s < (_MAP_S if self._others else _SINGLE_MAP_S):
            return
        known = await self.homes.map()
        self._read_s = now_s
        for number in known.entries.keys() - self._others.keys() - {0}:
            part = self.part(number)
            log.info("partition served number=%d", number)
            if self._report is not None:
                await self._beat(part, [], self._report, {})
        for number in self._others.keys() - known.entries.keys():
            gone = self._others.pop(number)
            self._changed.set()
            await gone.aclose()

    # --- calls about jobs

    async def read_log(self, job_id: str, tenant: str) -> list[LogEntry]:
        part = self.part(partition_of(job_id))
        own = super().read_log
        return await (own if part is self else part.read_log)(job_id, tenant)

    async def append(self, items: Sequence[Append]) -> Verdicts:
        return await self._spread(items, super().append, lambda part: part.append)

    async def release(self, items: Sequence[Release]) -> Verdicts:
        return await self._spread(items, super().release, lambda part: part.release)

    async def blame(self, items: Sequence[Blame]) -> Verdicts:
        return await self._spread(items, super().blame, lambda part: part.blame)

    async def _spread(
        self,
        items: Sequence[Item],
        own: Callable[[Sequence[Item]], Awaitable[Verdicts]],
        call_of: Callable[[WorkerBroker], Callable[[Sequence[Item]], Awaitable[Verdicts]]],
    ) -> Verdicts:
        """One call for each partition that has jobs in it. Raises BrokerUnavailable if one does not
        answer, after the others did: the calls may be repeated."""
        if not self._others:
            return await own(items)
        groups = dict[int, list[int]]()
        for place, item in enumerate(items):
            groups.setdefault(partition_of(item.job_id), []).append(place)

        async def ask(number: int, places: list[int]) -> Verdicts:
            part = self.part(number)
            call = own if part is self else call_of(part)
            return await call([items[place] for place in places])

        replies = await _all(ask(number, places) for number, places in groups.items())
        found = dict[int, tuple[Verdict | JobStatus, int]]()
        for places, reply in zip(groups.values(), replies, strict=True):
            found |= dict(zip(places, reply, strict=True))
        return [found[place] for place in range(len(items))]

    # --- calls about the worker

    async def heartbeat(
        self,
        held: Sequence[tuple[str, int]],
        info: str,
        state: WorkerState,
        capacity: WorkerCapacity,
        counted: Mapping[str, int],
    ) -> list[str]:
        report = self._report = info, state, capacity
        if not self._others:
            return await self._beat(self, held, report, counted)
        parts = list(self._others.values())
        own, *others = await asyncio.gather(
            self._beat(self, held, report, counted),
            *(self._beat(part, held, report, {}) for part in parts),
            return_exceptions=True,
        )
        lost = list[str]()
        for part, reply in zip(parts, others, strict=True):
            if isinstance(reply, BatchwayError):
                log.warning("heartbeat failed partition=%d: %s", part.partition, reply)
            elif isinstance(reply, BaseException):
                raise reply
            else:
                lost += reply
        if isinstance(own, BaseException):
            raise own
        return lost + own

    async def _beat(
        self,
        part: WorkerBroker,
        held: Sequence[tuple[str, int]],
        report: _Report,
        counted: Mapping[str, int],
    ) -> list[str]:
        info, state, capacity = report
        own = [pair for pair in held if partition_of(pair[0]) == part.partition]
        if self._others:
            capacity = self._capacity(part.partition, capacity, len(held) - len(own))
        call = super().heartbeat if part is self else part.heartbeat
        return await call(own, info, state, capacity, counted)

    def _capacity(self, number: int, whole: WorkerCapacity, num_other: int) -> WorkerCapacity:
        """What jobs of a partition may count on: its part of the rate, and the places that jobs of
        others do not take."""
        places = max(1, whole.max_jobs - num_other) if whole.max_jobs else 0
        tokens = whole.max_tokens * places // whole.max_jobs if whole.max_jobs else 0
        rate = round(whole.tokens_per_s * self.share_of(number), 3)
        return replace(whole, tokens_per_s=rate, max_jobs=places, max_tokens=tokens)

    async def report_start(self, took_s: float) -> None:
        await super().report_start(took_s)
        await self._tell_others(lambda part: part.report_start(took_s))

    async def announce_start(self, ready_in_s: float) -> None:
        await super().announce_start(ready_in_s)
        await self._tell_others(lambda part: part.announce_start(ready_in_s))

    async def _tell_others(self, tell: Callable[[WorkerBroker], Awaitable[None]]) -> None:
        for part in list(self._others.values()):
            try:
                await tell(part)
            except BatchwayError as exc:
                log.warning("not told partition=%d: %s", part.partition, exc)

    async def delete_orphaned_objects(self, store: ObjectStore) -> None:
        await super().delete_orphaned_objects(store)
        await _all(part.delete_orphaned_objects(store) for part in self._others.values())

    async def sweep(self) -> None:
        with contextlib.suppress(BrokerUnavailable):
            await self.refresh()
        others = list(self._others.values())
        await _all((super().sweep(), *(part.sweep() for part in others)))
        if others:
            await _all(lower_rests(self._ask, part.partition) for part in self.parts())

    async def _ask(self, number: int, call: Callable[[Homes], Awaitable[T]], /) -> T:
        return await call(self.part(number).homes)

    async def listen(self, wake: asyncio.Event, control: "asyncio.Queue[str]") -> None:
        own = super().listen
        tasks = dict[int, asyncio.Task[None]]()
        try:
            while True:
                self._changed.clear()
                numbers = {part.partition for part in self.parts()}
                for number in numbers - tasks.keys():
                    heard = _Wake(wake, lambda number=number: self.on_wake(number))  # type: ignore[misc]
                    listen = own if number == self.partition else self.part(number).listen
                    tasks[number] = asyncio.create_task(listen(heard, control))
                await end_tasks(*(tasks.pop(number) for number in tasks.keys() - numbers))
                await self._changed.wait()
        finally:
            await end_tasks(*tasks.values())


class _Wake(asyncio.Event):
    """Passes on that jobs wait, after `note`."""

    def __init__(self, wake: asyncio.Event, note: Callable[[], None]) -> None:
        super().__init__()
        self._wake = wake
        self._note = note

    def set(self) -> None:
        self._note()
        self._wake.set()


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Runs calls at once, to their ends, and then raises the first error."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    found = list[T]()
    for result in results:
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found
