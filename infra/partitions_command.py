"""`batchway partitions`: lists, adds and drains partitions, and moves tenants, while all serves.

Each action may be repeated where it was interrupted; what has been done is not done again.
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from contract.connection import broker_errors, repeated
from contract.partitions import (
    MAX_PARTITIONS,
    Entry,
    Home,
    MapChanged,
    PartitionInUse,
    PartitionMap,
    move_tenant,
)
from contract.shards import OpenShards, Shard
from infra import options as opts
from infra.option_values import integer, number
from infra.options import Option, Value
from infra.preconditions import UsageError
from infra.tables import table, write

PARTITIONS_ACTIONS = ("list", "add", "drain", "move")
EXIT_LEFT = 1
_HEADING = ("partition", "state", "weight", "share", "tenants", "unfinished jobs", "kept jobs")
_POLL_S = 0.5


def add_partitions_options(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    opts.add_action(kinds, "list", "list partitions and what each holds")
    add = opts.add_action(kinds, "add", "add a partition, and move the tenants that fall to it")
    weight = Value(number(may_be_zero=False), "WEIGHT")
    opts.add_options(add, {"weight": Option("its part of the tenants, beside 1", weight, 1.0)})
    drain = opts.add_action(kinds, "drain", "move a partition's tenants away, and remove it")
    _add_number(drain)
    move = opts.add_action(kinds, "move", "move a tenant; its unfinished jobs end where they are")
    move.add_argument("tenant", metavar="TENANT")
    _add_number(move)


def _add_number(parser: argparse.ArgumentParser) -> None:
    what = f"its number, up to {MAX_PARTITIONS - 1}"
    parser.add_argument("partition", metavar="PARTITION", type=integer(0), help=what)


def run_partitions(options: argparse.Namespace, redis_url: str) -> int:
    """Runs one action; returns the exit status. Raises BrokerUnavailable, WireError, UsageError."""
    return asyncio.run(_run(options, redis_url))


async def _run(options: argparse.Namespace, redis_url: str) -> int:
    async with OpenShards(redis_url, options.namespace) as shards:
        match options.kind:
            case "list":
                return await _list(shards, options)
            case "add":
                return await _add(shards, options)
            case "drain":
                return await _drain(shards, options)
        return await _move(shards, options)


async def _list(shards: OpenShards, options: argparse.Namespace) -> int:
    known = await shards.current()
    homes = await shards.first.homes.tenants()
    found = [await _row(shard, known, homes) for shard in await shards.all()]
    rows = [_HEADING, *(tuple(str(value) for value in row.values()) for row in found)]
    write({"version": known.version, "partitions": found}, table(rows), options.json)
    return 0


async def _row(shard: Shard, known: PartitionMap, homes: Mapping[str, Home]) -> dict[str, Any]:
    entry = known.entries[shard.number]
    num_open, num_kept = await _num_jobs(shard)
    return {
        "partition": shard.number,
        "state": entry.state,
        "weight": entry.weight,
        "share": round(known.share(shard.number), 3),  # of the fleet's bounds
        "tenants": sum(home.number == shard.number for home in homes.values()),
        "unfinished_jobs": num_open,
        "kept_jobs": num_kept,
    }


async def _num_jobs(shard: Shard) -> tuple[int, int]:
    """Unfinished and kept jobs; batches that have not ended count as unfinished."""
    with broker_errors(shard.client, "ZCARD or HLEN"):
        async with shard.client.pipeline(transaction=False) as pipe:
            pipe.zcard(shard.keys.of("deadlines"))
            pipe.zcard(shard.keys.of("batches_open"))
            pipe.hlen(shard.keys.of("stored", "jobs"))
            num_open, num_batches, num_stored = await repeated(pipe.execute)
    return num_open + num_batches, num_stored - num_open


async def _add(shards: OpenShards, options: argparse.Namespace) -> int:
    before = await shards.current()
    homes = await shards.first.homes.tenants()
    added = next(n for n in range(MAX_PARTITIONS + 1) if n not in before.entries)
    if added >= MAX_PARTITIONS:
        raise UsageError(f"there are {MAX_PARTITIONS} partitions, and may be no more")
    shard = shards.at(added)
    for pause in await shards.first.pauses.all():  # which hold in every partition
        await shard.pauses.pause(pause.line, pause.by)
    changes = {added: Entry(options.weight)}
    if before.is_single:
        changes[0] = Entry()
    await _chart(shards, before, changes)
    known = await shards.current()
    falling = [
        tenant
        for tenant, home in homes.items()
        if home.number == before.choose(tenant) and known.choose(tenant) == added
    ]
    for tenant in falling:
        await _moved(shards, tenant, added)
    text = f"partition {added} takes tenants; {len(falling)} have moved to it"
    write({"partition": added, "moved_tenants": len(falling)}, text, options.json)
    return 0


async def _drain(shards: OpenShards, options: argparse.Namespace) -> int:
    drained = options.partition
    known = await _with(shards, drained)
    if drained == 0:
        raise UsageError("partition 0 holds the map, the models and the API keys: it stays")
    entry = known.entries[drained]
    if entry.state != "draining":
        await _chart(shards, known, {drained: Entry(entry.weight, "draining")})
        known = await shards.current()
    num_moved = 0
    homes = await shards.first.homes.tenants()
    for tenant in [tenant for tenant, home in homes.items() if home.number == drained]:
        await _moved(shards, tenant, known.choose(tenant))
        num_moved += 1
    print(f"tenants moved: {num_moved}", file=sys.stderr)
    num_kept = await _ended(shards.at(drained))
    if num_kept:
        text = f"partition {drained} has no tenants; kept jobs: {num_kept}. Drain it again once "
        text += "they are forgotten"
    else:
        await _chart(shards, known, {drained: None})
        text = f"partition {drained} is removed"
    write({"partition": drained, "kept_jobs": num_kept}, text, options.json)
    return EXIT_LEFT if num_kept else 0


async def _ended(shard: Shard) -> int:
    """Waits until no job is unfinished; returns the number of those that are kept."""
    before = -1
    while True:
        num_open, num_kept = await _num_jobs(shard)
        if not num_open:
            return num_kept
        if num_open != before:
            print(f"unfinished jobs: {num_open}", file=sys.stderr)
        before = num_open
        await asyncio.sleep(_POLL_S)


async def _move(shards: OpenShards, options: argparse.Namespace) -> int:
    await _with(shards, options.partition)
    await _moved(shards, options.tenant, options.partition)
    text = f"{options.tenant} lives in partition {options.partition}"
    write({"tenant": options.tenant, "partition": options.partition}, text, options.json)
    return 0


async def _with(shards: OpenShards, number: int) -> PartitionMap:
    """The map. Raises UsageError if it lacks the partition."""
    known = await shards.current()
    if known.is_single or number not in known.entries:
        numbers = ", ".join(map(str, known.numbers))
        raise UsageError(f"there is no partition {number}; there are: {numbers}")
    return known


async def _moved(shards: OpenShards, tenant: str, target: int) -> None:
    await shards.home(tenant)  # of a new one
    if await move_tenant(shards.ask, tenant, target) is None:
        raise UsageError(f"partition {target} takes no tenants")


async def _chart(
    shards: OpenShards, known: PartitionMap, changes: Mapping[int, Entry | None]
) -> None:
    try:
        await shards.first.homes.chart(known, changes)
    except (MapChanged, PartitionInUse) as exc:
        raise UsageError(f"{exc}; repeat the command") from exc
    await shards.refresh()
