"""Operations over the partitions of a namespace. One on a tenant's jobs is in the tenant's
partition; one on all jobs has a part in each, under the same digits, and is known by the id of
partition 0. Every call raises what those of contract/operations.py raise."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from contract.function_types import Wanted
from contract.keys import in_partition
from contract.operations import (
    MAX_LISTED,
    Operation,
    OperationKind,
    OperationsFull,
    OperationState,
)
from contract.shards import S, Shards


async def add(
    shards: Shards[S], operation_id: str, kind: OperationKind, wanted: Wanted, **terms: Any
) -> str:
    """Records an operation; returns its id in the partition of its tenant. Raises
    OperationsFull."""
    added = list[tuple[S, str]]()
    for shard in await shards.of_list(terms["tenant"]):
        part_id = in_partition(operation_id, shard.number)
        try:
            await shard.call(shard.operations.add, part_id, kind, wanted, **terms)
        except OperationsFull:
            for other, other_id in added:
                await other.call(other.operations.stop, other_id)
            raise
        added.append((shard, part_id))
    return added[0][1]


async def find(shards: Shards[S], operation_id: str) -> Operation | None:
    """The whole operation, whichever part the id names."""
    shard = await shards.of(operation_id)
    part = await shard.call(shard.operations.find, operation_id)
    if part is None or part.tenant:
        return part
    found = await shards.each(lambda s: s.operations.find(in_partition(operation_id, s.number)))
    return _whole([each for each in found if each is not None])


async def of_owner(shards: Shards[S], owner: str) -> list[Operation]:
    """A tenant's operations of the last week, the youngest first."""
    parts = dict[str, list[Operation]]()
    for found in await shards.each(lambda shard: shard.operations.of_owner(owner)):
        for part in found:
            parts.setdefault(part.id if part.tenant else in_partition(part.id, 0), []).append(part)
    whole = sorted(map(_whole, parts.values()), key=lambda each: each.created_ms, reverse=True)
    return whole[:MAX_LISTED]


async def stop(shards: Shards[S], operation_id: str) -> OperationState | None:
    """Ends an operation where it is; returns its state afterwards, None if there is none."""
    found = await find(shards, operation_id)
    for shard in [] if found is None else await shards.of_list(found.tenant):
        part_id = in_partition(operation_id, shard.number)
        await shard.call(shard.operations.stop, part_id)
    found = await find(shards, operation_id)
    return None if found is None else found.state


def _whole(parts: Sequence[Operation]) -> Operation:
    if len(parts) == 1:
        return parts[0]
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
