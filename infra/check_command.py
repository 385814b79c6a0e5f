"""`batchway check`: compares counters and lists of jobs in Redis with the jobs' records.

The functions keep them equal. They can differ after half of a function was executed
(docs/decisions/append-only-file.md) or another program has written. Jobs move while this reads, so
a difference counts if two readings show the same one.
"""

import argparse
import asyncio
import struct
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from contract.catalogue import Catalogue
from contract.connection import broker_errors
from contract.jobs import TERMINAL_STATUSES
from contract.keys import Keys
from contract.shards import OpenShards
from infra import options as opts

EXIT_DIFFERENT = 1
Contents = dict[str, dict[str, int]]  # key without the tag -> field or member -> number or score
Differences = dict[tuple[str, str], tuple[int | None, int | None]]  # held, by the records

_GAP_S = 1.0  # between the readings
_FIELDS = (
    *("state", "tenant", "model", "lane", "stream", "entry", "owner", "cost", "prompt_tokens"),
    *("tokens", "deadline", "created", "start", "finished", "ttl_ms", "has_objects", "part"),
)
_SETS, _ZSETS = ("own", "alone"), ("deadlines", "kept", "later", "leases", "jobs")
_HASHES = {
    "counters": ["queued_jobs", "queued_tokens", "running_jobs", "running_tokens", "done_tokens"],
    "line": ["jobs", "tokens"],
    "tenant": ["reserved"],
    "later_tokens": [],  # all fields
}
_PROGRESS = struct.Struct("<xddd")  # epoch, next, tokens: contract/lua/_running.lua


def expected(jobs: Mapping[str, Mapping[str, str]]) -> Contents:
    """What counters and lists hold by the records. The number is 0 in sets, and where the records
    do not tell a score."""
    contents: Contents = defaultdict(lambda: defaultdict(int))
    for job_id, job in jobs.items():
        tenant, lane, cost = job["tenant"], f"{job['model']}:{job['lane']}", int(job["cost"])
        contents[f"jobs:{tenant}"][job_id] = int(job["created"])
        if job["state"] in TERMINAL_STATUSES:
            entry = f"{job_id} {job['has_objects'] or '0'} {tenant}"
            contents["kept"][entry] = int(job["finished"]) + int(job["ttl_ms"])
            continue
        contents["deadlines"][job_id] = int(job["deadline"])
        is_call = job.get("part") in ("child", "nested")
        contents[f"tenant:{tenant}"]["reserved"] += int(job.get("grown", 0)) if is_call else cost
        if job["stream"] == f"q:{job['model']}:later":
            contents["later"][f"{int(job['created']):015} {job_id}"] = int(job["start"])
            for name in (tenant, ""):
                contents[f"later_tokens:{lane}"][name] += cost
            continue
        counters, kind = contents[f"counters:{lane}"], "running" if job["owner"] else "queued"
        counters[f"{kind}_jobs"] += 1
        counters[f"{kind}_tokens"] += cost
        if kind == "running":
            tokens = int(job["tokens"])
            counters["done_tokens"] += min(cost, int(job["prompt_tokens"]) + tokens) * (tokens > 0)
            contents["leases"][job_id] = contents[f"own:{job['owner']}"][job_id] = 0
            if job["stream"].endswith(":suspect"):
                contents[f"alone:{job['model']}"][job_id] = 0
        elif job["stream"].removesuffix(" candidate") == f"q:{lane}:{tenant}":
            contents[f"line:{lane}:{tenant}"]["jobs"] += 1
            contents[f"line:{lane}:{tenant}"]["tokens"] += cost
    return contents


def add_check_options(parser: argparse.ArgumentParser) -> None:
    repair = opts.Option(
        "set what differs as the records say, but for queue entries", None, shown="only show it"
    )
    opts.add_options(parser, {"repair": repair})
    opts.add_shared_options(parser, redis_default=opts.OF_RUNNING_UP)


def run_check(options: argparse.Namespace, redis_url: str) -> int:
    """Returns the exit status. Raises BrokerUnavailable, WireError."""
    return asyncio.run(_run(options, redis_url))


async def _run(options: argparse.Namespace, redis_url: str) -> int:
    num_found = 0
    async with OpenShards(redis_url, options.namespace) as shards:
        known = await shards.all()
        for shard in known:
            where = f"partition {shard.number}: " if len(known) > 1 else ""
            num_found += await _check(shard.client, shard.keys, options, where)
    print(f"differences: {num_found}")
    return EXIT_DIFFERENT if num_found else 0


async def _check(client: Any, keys: Keys, options: argparse.Namespace, where: str) -> int:
    """Shows the differences in one partition, and repairs them where asked; their number."""
    found = Differences()
    with broker_errors(client, "HGETALL", record="records"):
        if before := await differences(client, keys):
            await asyncio.sleep(_GAP_S)
            again = await differences(client, keys)
            found = {place: it for place, it in again.items() if before.get(place) == it}
        for (key, field), (held, wanted) in sorted(found.items()):
            print(f"{where}{key} {field}: holds {held}, the records say {wanted}")
            if options.repair:
                await repair(client, keys, key, field, held, wanted)
    return len(found)


async def differences(client: Any, keys: Keys) -> Differences:
    """What differs at the moment. Raises WireError and the errors of redis-py."""
    notes = await client.hgetall(keys.of("stored", "jobs"))
    listed = [await _read(client, keys, name) for name in ("deadlines", "leases")]
    stored = {raw_id.decode() for raw_id in notes}
    jobs = await _records(client, keys, sorted({*stored, *listed[0], *listed[1]}))
    wanted = expected(jobs)
    names = {*wanted, "deadlines", "kept", "later", "leases"}
    for tenant in {note.decode().split()[-1] for note in notes.values()}:
        names |= {f"jobs:{tenant}", f"tenant:{tenant}"}
    for card in await Catalogue(client, keys).models():
        kinds = "counters", "later_tokens"
        names |= {f"{kind}:{card.name}:{lane}" for kind in kinds for lane in card.lanes}
    held = {name: await _read(client, keys, name) for name in names}
    for job in jobs.values():
        if job["state"] not in TERMINAL_STATUSES:
            stream, entry = job["stream"], job["entry"]
            wanted.setdefault(stream, {})[entry] = 0
            there = await client.xrange(keys.of(stream), entry, entry)
            held.setdefault(stream, {}).update({entry: 0} if there else {})
    # Until the next sweep an expired record is in lists.
    expired = {entry.split()[0] for entry in held["kept"]} - jobs.keys()
    found: Differences = {}
    for key, values in held.items():
        missing = 0 if key.split(":")[0] in _HASHES else None
        by_records = wanted.get(key, {})
        for field in values.keys() | by_records.keys():
            pair = values.get(field, missing), by_records.get(field, missing)
            if pair[0] != pair[1] and field.partition(" ")[0] not in expired:
                found[key, field] = pair
    return found


async def _records(client: Any, keys: Keys, ids: list[str]) -> dict[str, dict[str, str]]:
    """The records by id, of running jobs with their progress."""
    async with client.pipeline(transaction=False) as pipe:
        for job_id in ids:
            pipe.hmget(keys.of("job", job_id), _FIELDS)
        replies = await pipe.execute()
    jobs = {
        job_id: {name: (raw or b"").decode() for name, raw in zip(_FIELDS, values, strict=True)}
        for job_id, values in zip(ids, replies, strict=True)
        if values[0] is not None
    }
    for owner in {job["owner"] for job in jobs.values()} - {""}:
        packed = await client.hgetall(keys.of("run", owner))
        for raw_id, raw in packed.items():
            if raw_id.decode() in jobs:
                jobs[raw_id.decode()]["tokens"] = str(int(_PROGRESS.unpack_from(raw)[2]))
    return jobs


async def _read(client: Any, keys: Keys, name: str) -> dict[str, int]:
    """A set, a sorted set with its scores, or the counters of a hash."""
    key, kind = keys.of(name), name.split(":")[0]
    if kind in _SETS:
        return {raw.decode(): 0 for raw in await client.smembers(key)}
    if kind in _ZSETS:
        rows = await client.zrange(key, 0, -1, withscores=True)
        return {raw.decode(): 0 if kind == "leases" else int(score) for raw, score in rows}
    fields = _HASHES[kind] or [raw.decode() for raw in await client.hkeys(key)]
    if not fields:
        return {}
    values = await client.hmget(key, fields)
    return {field: int(value or 0) for field, value in zip(fields, values, strict=True)}


async def repair(
    client: Any, keys: Keys, name: str, field: str, held: int | None, wanted: int | None
) -> None:
    """Sets one value. A lease that was missing has lapsed. Leaves streams as they are."""
    key, kind = keys.of(name), name.split(":")[0]
    if kind in _SETS:
        await (client.srem if wanted is None else client.sadd)(key, field)
    elif kind in _ZSETS and wanted is None:
        await client.zrem(key, field)
    elif kind in _ZSETS:
        await client.zadd(key, {field: wanted})
    elif kind in _HASHES:
        await client.hincrby(key, field, (wanted or 0) - (held or 0))
