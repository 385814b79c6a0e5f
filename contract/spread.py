"""Files, batches, operations, pauses and dead letters over all partitions, with the methods that
there are for one: an id leads to its partition, a list is merged from all that may have parts.

Each method raises BrokerUnavailable, and what the method of one partition raises.
Over 300 lines: one short method for each of theirs.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from contract.batches import Batch, Batches, BatchStatus, NewBatch, Part
from contract.callbacks import OutboxState
from contract.errors import BrokerUnavailable
from contract.events import LogEntry
from contract.files import Files, StoredFile, Upload
from contract.function_types import JobView, Wanted
from contract.ids import in_partition
from contract.operations import (
    MAX_LISTED,
    Operation,
    OperationKind,
    Operations,
    OperationsFull,
    OperationState,
    Step,
)
from contract.outbox import DeadLetter, DoneVerdict, Outbox, OutboxRecord, Outcome, Taken
from contract.pauses import Line, Pause, PausedBy, Pauses
from contract.shards import S, Shard, Shards

log = logging.getLogger("batchway.partitions")

T = TypeVar("T")
Row = TypeVar("Row", StoredFile, Batch)
P = TypeVar("P", Files, Batches, Operations, Pauses, Outbox)


class _Spread(Generic[S, P]):
    """The calls of one kind, over all partitions."""

    _part_of: Callable[[Shard], P]  # the calls of one partition

    def __init__(self, shards: Shards[S]) -> None:
        self._shards = shards
        self._turn = 0

    async def _ask(self, object_id: str, ask: Callable[[P], Awaitable[T]]) -> T:
        """Asks the partition that the id names."""
        shard = await self._shards.of(object_id)
        return await shard.call(lambda: ask(self._part_of(shard)))

    async def _in_turn(self) -> list[S]:
        """All partitions; each time another one is first."""
        shards = await self._shards.all()
        self._turn += 1
        first = self._turn % len(shards)
        return shards[first:] + shards[:first]


class SpreadFiles(_Spread[S, Files]):
    """Files. A tenant's quota counts what all partitions hold."""

    _part_of = attrgetter("files")

    async def begin(self, file_id: str) -> None:
        await self._ask(file_id, lambda files: files.begin(file_id))

    async def add(
        self, file: StoredFile, *, lifetime_s: float, max_tenant_bytes: int
    ) -> StoredFile:
        shard = await self._shards.of(file.id)
        if max_tenant_bytes:
            held = await self._bytes(file.tenant, lambda other: other is not shard)
            max_tenant_bytes = max(1, max_tenant_bytes - held)
        terms: dict[str, Any] = {"lifetime_s": lifetime_s, "max_tenant_bytes": max_tenant_bytes}
        return await shard.call(lambda: shard.files.add(file, **terms))

    async def find(self, file_id: str, tenant: str) -> StoredFile | None:
        return await self._ask(file_id, lambda files: files.find(file_id, tenant))

    async def find_upload(self, upload_id: str, tenant: str) -> Upload | None:
        return await self._ask(upload_id, lambda files: files.find_upload(upload_id, tenant))

    async def tenant_bytes(self, tenant: str) -> int:
        return await self._bytes(tenant, lambda _: True)

    async def _bytes(self, tenant: str, counts: Callable[[S], bool]) -> int:
        shards = [shard for shard in await self._shards.places(tenant) if counts(shard)]
        return sum([await s.call(partial(s.files.tenant_bytes, tenant)) for s in shards])

    async def page(
        self, tenant: str, *, purpose: str, after: str, is_oldest_first: bool, max_files: int
    ) -> Sequence[StoredFile] | None:
        shards = await self._shards.places(tenant)
        terms: dict[str, Any] = {"purpose": purpose, "is_oldest_first": is_oldest_first}
        if len(shards) == 1:
            [shard] = shards
            terms |= {"after": after, "max_files": max_files}
            return await shard.call(lambda: shard.files.page(tenant, **terms))
        files = list[StoredFile]()
        terms |= {"after": "", "max_files": 2**31}
        for shard in shards:  # a tenant that has moved: few do, and their lists are whole
            page = await shard.call(partial(shard.files.page, tenant, **terms))
            files += page or []
        files.sort(key=lambda file: (file.created_ms, file.id), reverse=not is_oldest_first)
        return _behind(files, after, max_files)

    async def drop(self, file_id: str, tenant: str = "") -> bool:
        return await self._ask(file_id, lambda files: files.drop(file_id, tenant))

    async def due(self) -> list[str]:
        found = list[str]()
        for shard in await self._shards.all():
            found += await shard.call(shard.files.due)
        return found

    async def deleted(self, object_id: str) -> None:
        await self._ask(object_id, lambda files: files.deleted(object_id))


class SpreadBatches(_Spread[S, Batches]):
    """Batches. A batch stays where it was made; its jobs run where its tenant lives."""

    _part_of = attrgetter("batches")

    async def add(self, batch_id: str, asked: NewBatch, **terms: Any) -> None:
        await self._ask(batch_id, lambda batches: batches.add(batch_id, asked, **terms))

    async def find(self, batch_id: str, tenant: str | None = None) -> Batch | None:
        return await self._ask(batch_id, lambda batches: batches.find(batch_id, tenant))

    async def page(self, tenant: str, *, after: str, max_batches: int) -> Sequence[Batch] | None:
        shards = await self._shards.places(tenant)
        if len(shards) == 1:
            [shard] = shards
            terms: dict[str, Any] = {"after": after, "max_batches": max_batches}
            return await shard.call(lambda: shard.batches.page(tenant, **terms))
        terms = {"after": "", "max_batches": 2**31}
        found = list[Batch]()
        for shard in shards:
            page = await shard.call(partial(shard.batches.page, tenant, **terms))
            found += page or []
        found.sort(key=lambda batch: (batch.created_ms, batch.id), reverse=True)
        return _behind(found, after, max_batches)

    async def cancel(self, batch_id: str, tenant: str) -> BatchStatus | None:
        return await self._ask(batch_id, lambda batches: batches.cancel(batch_id, tenant))

    async def take(
        self, token: str, *, lease_s: float, in_progress: bool, max_batches: int, max_more: int = 0
    ) -> list[str]:
        """Leases batches of all partitions; each time another one is asked first."""
        taken = list[str]()
        terms: dict[str, Any] = {"lease_s": lease_s, "in_progress": in_progress}
        for shard in await self._in_turn():
            room = max(0, max_batches - len(taken))
            more = max_more if len(taken) < max_batches + max_more else 0
            taken += await shard.call(
                partial(shard.batches.take, token, max_batches=room, max_more=more, **terms)
            )
        return taken

    async def are_fed(self) -> bool:
        return await self._shards.first.call(self._shards.first.batches.are_fed)

    async def save(self, batch_id: str, token: str, **progress: Any) -> tuple[BatchStatus, int]:
        return await self._ask(batch_id, lambda batches: batches.save(batch_id, token, **progress))

    async def parts(self, batch_id: str) -> dict[int, Part]:
        return await self._ask(batch_id, lambda batches: batches.parts(batch_id))

    async def job_states(self, job_ids: Sequence[str], tenant: str) -> list[str | None]:
        """The states of a batch's jobs. Where its tenant has moved, a job may be in any of its
        homes, under the same digits."""
        own = await self._shards.of(job_ids[0]) if job_ids else self._shards.first
        shards = [own, *(s for s in await self._shards.places(tenant) if s is not own)]
        states: list[str | None] = [None] * len(job_ids)
        for shard in shards:
            missing = [place for place, state in enumerate(states) if state is None]
            if not missing:
                break
            ids = [in_partition(job_ids[place], shard.number) for place in missing]
            found = await shard.call(partial(shard.batches.job_states, ids))
            for place, state in zip(missing, found, strict=True):
                states[place] = state
        return states


class SpreadOperations(_Spread[S, Operations]):
    """Operations. One has a part in each partition with jobs that it may mean, under the same
    digits; it is known by the id of partition 0."""

    _part_of = attrgetter("operations")

    async def add(
        self, operation_id: str, kind: OperationKind, wanted: Wanted, *, tenant: str, **terms: Any
    ) -> None:
        terms["tenant"] = tenant
        added = list[Callable[[], Awaitable[object]]]()
        for shard in await self._shards.places(tenant):
            part_id = in_partition(operation_id, shard.number)
            try:
                await shard.call(partial(shard.operations.add, part_id, kind, wanted, **terms))
            except OperationsFull:
                for stop in added:
                    await stop()
                raise
            added.append(partial(shard.call, partial(shard.operations.stop, part_id)))

    async def find(self, operation_id: str) -> Operation | None:
        """The whole operation, whichever part the id names."""
        parts = list[Operation]()
        for shard in await self._shards.all():
            part_id = in_partition(operation_id, shard.number)
            part = await shard.call(partial(shard.operations.find, part_id))
            parts += [] if part is None else [part]
        return _whole(parts) if parts else None

    async def of_owner(self, owner: str) -> list[Operation]:
        parts = dict[str, list[Operation]]()
        for shard in await self._shards.all():
            for part in await shard.call(partial(shard.operations.of_owner, owner)):
                parts.setdefault(in_partition(part.id, 0), []).append(part)
        found = sorted(map(_whole, parts.values()), key=lambda o: o.created_ms, reverse=True)
        return found[:MAX_LISTED]

    async def take(self, token: str, *, lease_s: float, only: str = "") -> str | None:
        """Leases a part that has not ended."""
        for shard in await self._shards.all():
            part_id = only and in_partition(only, shard.number)
            taken: str | None = await shard.call(
                partial(shard.operations.take, token, lease_s=lease_s, only=part_id)
            )
            if taken is not None:
                return taken
        return None

    async def step(self, operation_id: str, token: str, **terms: Any) -> Step:
        return await self._ask(operation_id, lambda o: o.step(operation_id, token, **terms))

    async def give_back(self, operation_id: str, token: str) -> None:
        await self._ask(operation_id, lambda o: o.give_back(operation_id, token))

    async def stop(self, operation_id: str) -> OperationState | None:
        states = list[OperationState]()
        for shard in await self._shards.all():
            part_id = in_partition(operation_id, shard.number)
            state = await shard.call(partial(shard.operations.stop, part_id))
            states += [] if state is None else [state]
        return (
            OperationState.CANCELLED
            if OperationState.CANCELLED in states
            else next(iter(states), None)
        )


class SpreadPauses(_Spread[S, Pauses]):
    """Pauses, which hold in every partition."""

    async def _all(self, ask: Callable[[Pauses], Awaitable[T]]) -> list[T]:
        shards = await self._shards.all()
        return [await s.call(partial(ask, s.pauses)) for s in shards]

    async def pause(self, line: Line, by: PausedBy) -> Pause:
        return (await self._all(lambda pauses: pauses.pause(line, by)))[0]

    async def resume(self, line: Line, by: PausedBy) -> bool:
        return any(await self._all(lambda pauses: pauses.resume(line, by)))

    async def all(self) -> list[Pause]:
        return await self._shards.first.call(self._shards.first.pauses.all)


class SpreadOutbox(_Spread[S, Outbox]):
    """The messages of callbacks."""

    _part_of = attrgetter("outbox")

    async def take(self, *, lease_s: float, max_messages: int, max_per_target: int) -> list[Taken]:
        """Leases due messages of all partitions that answer; each time another is asked first."""
        shards, taken = await self._in_turn(), list[Taken]()
        terms: dict[str, Any] = {"lease_s": lease_s, "max_per_target": max_per_target}
        for shard in shards:
            if room := max_messages - len(taken):
                take = partial(shard.outbox.take, max_messages=room, **terms)
                try:
                    taken += await shard.call(take)
                except BrokerUnavailable:
                    if len(shards) == 1:
                        raise
                    log.info("callbacks of partition %d wait: no answer", shard.number)
        return taken

    async def start(self, taken: Taken, *, lease_s: float) -> OutboxRecord | None:
        return await self._ask(taken.job_id, lambda outbox: outbox.start(taken, lease_s=lease_s))

    async def renew(self, taken: Taken, *, lease_s: float) -> bool:
        return await self._ask(taken.job_id, lambda outbox: outbox.renew(taken, lease_s=lease_s))

    async def done(
        self, taken: Taken, outcome: Outcome, *, delay_s: float = 0.0, note: str = ""
    ) -> DoneVerdict:
        terms: dict[str, Any] = {"delay_s": delay_s, "note": note}
        return await self._ask(taken.job_id, lambda outbox: outbox.done(taken, outcome, **terms))

    async def read(
        self, job_id: str, tenant: str, *, after: int = 0, max_events: int = 0
    ) -> tuple[JobView, list[LogEntry]] | None:
        """The job of a message, and its log."""
        shard = await self._shards.of(job_id)
        read = partial(shard.functions.read, job_id, tenant, after=after, max_events=max_events)
        return await shard.call(read)

    async def dead(
        self, tenant: str, *, job_id: str = "", limit: int = 100, before_ms: int | None = None
    ) -> list[DeadLetter]:
        if job_id:
            return await self._ask(job_id, lambda outbox: outbox.dead(tenant, job_id=job_id))
        found = list[DeadLetter]()
        for shard in await self._shards.places(tenant):
            found += await shard.call(
                partial(shard.outbox.dead, tenant, limit=limit, before_ms=before_ms)
            )
        return sorted(found, key=lambda letter: letter.died_ms, reverse=True)[:limit]

    async def replay(self, job_id: str, tenant: str) -> OutboxState | None:
        return await self._ask(job_id, lambda outbox: outbox.replay(job_id, tenant))


def _behind(rows: Sequence[Row], after: str, most: int) -> Sequence[Row] | None:
    """The rows behind one with this id; None where there is none."""
    if not after:
        return rows[:most]
    place = next((place for place, row in enumerate(rows) if row.id == after), None)
    return None if place is None else rows[place + 1 : place + 1 + most]


def _whole(parts: Sequence[Operation]) -> Operation:
    states = {part.state for part in parts}
    order = (OperationState.RUNNING, OperationState.CANCELLED, OperationState.EXPIRED)
    state = next((each for each in order if each in states), OperationState.COMPLETED)
    ended = [part.finished_ms for part in parts]
    return replace(
        parts[0],
        id=in_partition(parts[0].id, 0),
        state=state,
        matched=sum(part.matched for part in parts),
        done=sum(part.done for part in parts),
        failed=sum(part.failed for part in parts),
        created_ms=min(part.created_ms for part in parts),
        finished_ms=None if None in ended else max(each for each in ended if each is not None),
    )
