"""Counters and lists beside the jobs' records are corrected when they drift, and each correction is
reported."""

import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

from contract.errors import JobRefused
from contract.function_types import Append, Claimed, Correction, TenantLimits, WorkerCapacity
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.contract.some_calls import (
    append,
    claim,
    make_job,
    make_submission,
    pass_time,
    tokens,
)
from tests.oracle.audit import Audit

pytestmark = pytest.mark.anyio

RECOUNT_JOBS = 50  # as contract/lua/_recount.lua has it


@pytest.fixture
def audit(redis_server: EmbeddedRedis, keys: Keys) -> Iterator[Audit]:
    with redis.Redis.from_url(redis_server.url) as client:
        yield Audit(client, keys)


async def sweep(
    functions: Functions, client: redis.asyncio.Redis, keys: Keys, times: int = 1
) -> list[Correction]:
    """The corrections of sweeps that are a little more than a second apart."""
    found: list[Correction] = []
    for _ in range(times):
        await pass_time(client, keys, 1.001)
        found += (await functions.sweep()).corrections
    return found


async def run_on(functions: Functions, item: Claimed, fin: Any = "") -> None:
    """Appends two tokens to a job that was just claimed."""
    output = tokens(item.num_logged_tokens, 1, 2)
    say = Append(item.job.id, item.epoch, item.next_number, output, 2, fin)
    await append(functions, "w1", say)


async def make_jobs(functions: Functions) -> dict[str, str]:
    """Ids of three jobs: ended, running and waiting."""
    jobs = [make_job() for _ in range(3)]
    for job in jobs:
        await functions.submit(job, make_submission())
    ended, running = await claim(functions, max_jobs=2)
    await run_on(functions, ended, JobStatus.SUCCEEDED)
    await run_on(functions, running)
    return {"ended": ended.job.id, "running": running.job.id, "waiting": jobs[2].id}


# Planted errors: commands, their keys without the tag; then of each correction its kind, key,
# field, wrong value and right value ('*': anything).
PLANTED: dict[str, tuple[list[str], list[tuple[str, ...]]]] = {
    "a lane's waiting jobs": (
        ["HSET counters:m:standard queued_jobs 4"],
        [("lane", "counters:m:standard", "queued_jobs", "4", "1")],
    ),
    "a lane's negative tokens": (
        ["HSET counters:m:standard running_tokens -8"],
        [("lane", "counters:m:standard", "running_tokens", "-8", "13")],
    ),
    "what running jobs have done": (
        ["HINCRBY counters:m:standard done_tokens 3"],
        [("lane", "counters:m:standard", "done_tokens", "8", "5")],
    ),
    "a lane that was lost": (
        ["DEL counters:m:standard"],
        [
            ("lane", "counters:m:standard", "queued_jobs", "nothing", "1"),
            ("lane", "counters:m:standard", "queued_tokens", "nothing", "13"),
            ("lane", "counters:m:standard", "running_jobs", "nothing", "1"),
            ("lane", "counters:m:standard", "running_tokens", "nothing", "13"),
            ("lane", "counters:m:standard", "done_tokens", "nothing", "5"),
        ],
    ),
    "a line": (
        ["HINCRBY line:m:standard:t tokens 5"],
        [("line", "line:m:standard:t", "tokens", "18", "13")],
    ),
    "a line that was lost": (
        ["DEL line:m:standard:t", "ZREM active:m:standard t"],
        [
            ("line", "line:m:standard:t", "jobs", "nothing", "1"),
            ("line", "line:m:standard:t", "tokens", "nothing", "13"),
            ("line", "active:m:standard", "t", "nothing", "*"),
        ],
    ),
    "a reservation": (
        ["HINCRBY tenant:t reserved 7"],
        [("tenant", "tenant:t", "reserved", "33", "26")],
    ),
    "a job that its tenant cannot list": (
        ["ZREM jobs:t {waiting}"],
        [("list", "jobs:t", "{waiting}", "nothing", "*")],
    ),
    "a job that never was, in a list": (
        ["ZADD jobs:t 1 job-0-none"],
        [("list", "jobs:t", "job-0-none", "1", "nothing")],
    ),
    "a job that would never expire": (
        ["ZREM deadlines {waiting}"],
        [("list", "deadlines", "{waiting}", "nothing", "*")],
    ),
    "a deadline of nothing": (
        ["ZADD deadlines 9999999999999 job-0-none"],
        [("list", "deadlines", "job-0-none", "9999999999999", "nothing")],
    ),
    "a deadline that is not the job's": (
        ["ZADD deadlines 9999999999999 {running}"],
        [("list", "deadlines", "{running}", "9999999999999", "*")],
    ),
    "an ended job that would be kept for ever": (
        ["DEL kept"],
        [("list", "kept", "{ended} 0 t", "nothing", "*")],
    ),
    "an open job that would be forgotten": (
        ["ZADD kept 9999999999999 '{running} 0 t'"],
        [("list", "kept", "{running} 0 t", "9999999999999", "nothing")],
    ),
    "a lease": (
        ["ZREM leases {running}"],
        [("list", "leases", "{running}", "nothing", "*")],
    ),
    "an owner's jobs": (
        ["SREM own:w1 {running}"],
        [("list", "own:w1", "{running}", "nothing", "{running}")],
    ),
    "a job that no worker would find": (
        ["DEL q:m:standard:t"],
        [("list", "q:m:standard:t", "{waiting}", "nothing", "*")],
    ),
}


@pytest.mark.parametrize("name", PLANTED)
async def test_drift_is_corrected_and_reported(
    name: str,
    functions: Functions,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    audit: Audit,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Within three sweeps: once in the log and once in the counter. Later sweeps find nothing."""
    jobs = await make_jobs(functions)
    assert await sweep(functions, redis_client, keys, 3) == []
    if name == "a job that no worker would find":  # the running one's entry lies there too
        await functions.cancel(jobs.pop("running"), "t")
    commands, wanted = PLANTED[name]
    for command in commands:
        verb, key, *words = command.split(maxsplit=3)
        words = [word.format(**jobs).strip("'") for word in words]
        planted: Any = redis_client.execute_command  # redis-py leaves it untyped
        await planted(verb, f"{keys.tag}:{key}", *words)
    with caplog.at_level(logging.ERROR):
        found = await sweep(functions, redis_client, keys, 3)
    assert len(found) == len(wanted), found
    for row in wanted:
        expected = tuple(part.format(**jobs) for part in row)
        assert any(
            all(part in ("*", held) for part, held in zip(expected, astuple(it), strict=True))
            for it in found
        ), (expected, found)
    assert len(caplog.messages) == len(found)
    for it in found:
        assert any(it.key in line and it.field in line for line in caplog.messages)
    totals = (await functions.snapshot("m", [])).totals
    assert totals[f"corrections_total:{found[0].kind}"] > 0
    assert sum(n for name, n in totals.items() if name.startswith("corrections_")) == len(found)
    if name != "a lease":  # it expires at once, which is another step
        audit.check()
    assert await sweep(functions, redis_client, keys, 3) == []
    audit.check()


def astuple(it: Correction) -> tuple[str, ...]:
    return it.kind, it.key, it.field, it.held, it.holds


async def test_a_refusal_agrees_with_the_records(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """The tenant has no job left, so only the refusal leads to its wrong reservation."""
    limits = TenantLimits(concurrent_tokens=20)
    await redis_client.hset(keys.of("tenant", "t"), "reserved", 19)
    with pytest.raises(JobRefused):
        await functions.submit(make_job(), make_submission(limits=limits))
    [found] = await sweep(functions, redis_client, keys, 2)
    assert astuple(found) == ("tenant", "tenant:t", "reserved", "19", "0")
    assert (await functions.submit(make_job(), make_submission(limits=limits))).is_new


async def test_half_a_record_is_forgotten(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys, audit: Audit
) -> None:
    """No function could use it, and sweeps would fail on it forever."""
    jobs = await make_jobs(functions)
    await redis_client.hdel(keys.job(jobs["waiting"]), "model", "lane")
    await sweep(functions, redis_client, keys, 6)
    assert not await redis_client.exists(keys.job(jobs["waiting"]))
    counted = await redis_client.hget(keys.of("counters", "m", "standard"), "queued_jobs")
    assert counted == b"0"
    await functions.submit(make_job(), make_submission())
    assert len(await claim(functions)) == 1, "its entry is passed over"
    assert await sweep(functions, redis_client, keys, 3) == []
    audit.check()


async def test_a_count_stays_right_while_jobs_change(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys, audit: Audit
) -> None:
    """One recount of 300 jobs takes six sweeps or more. Jobs are submitted, run, moved and ended
    meanwhile; only the planted errors are corrected."""
    rng = random.Random(7)
    waiting: list[str] = []

    async def submit() -> None:
        job = make_job(tenant=rng.choice("tuv"), lane=rng.choice(["interactive", "standard"]))
        terms = make_submission(deadline_s=rng.uniform(500, 5000), retention_s=9000)
        await functions.submit(job, terms)
        waiting.append(job.id)

    async def change() -> None:
        await submit()
        for item in await claim(functions, max_jobs=2):
            await run_on(functions, item, rng.choice(["", JobStatus.SUCCEEDED]))
        for change in (functions.cancel, move, detach):
            for tenant in "tuv":
                await change(rng.choice(waiting), tenant)

    async def move(job_id: str, tenant: str) -> None:
        lane, deadline_s = rng.choice(["", "interactive", "standard"]), rng.uniform(500, 5000)
        await functions.reprioritise(job_id, tenant, lane=lane, deadline_s=deadline_s)

    async def detach(job_id: str, tenant: str) -> None:
        await functions.detach(job_id, tenant, deadline_s=rng.uniform(500, 9000), retention_s=9000)

    for _ in range(300):
        await submit()
    await redis_client.hincrby(keys.of("counters", "m", "standard"), "queued_tokens", 11)
    await redis_client.hincrby(keys.of("tenant", "u"), "reserved", -4)
    found, num_under_way = [], 0
    for _ in range(60):
        await change()
        found += await sweep(functions, redis_client, keys)
        num_under_way += await redis_client.hexists(keys.of("recount", "place"), "deadline")
    assert {(it.key, it.field) for it in found} == {
        ("counters:m:standard", "queued_tokens"),
        ("tenant:u", "reserved"),
    }
    assert len(found) == 2
    assert num_under_way > 30, "most changes met a count that was under way"
    await functions.heartbeat(
        "w1", "m", [], lease_s=10.0, info="{}", capacity=WorkerCapacity(), state="up"
    )
    audit.check()


async def test_the_cost_of_a_sweep_does_not_grow_with_the_queue(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """The number of commands inside the most expensive sweep, of enough sweeps to visit every job:
    no more with ten times the jobs."""

    async def dearest(num_jobs: int) -> int:
        for _ in range(num_jobs):
            job, terms = make_job(tenant=f"t{rng.randrange(9)}"), make_submission(deadline_s=90_000)
            await functions.submit(job, terms)
            await pass_time(redis_client, keys, 0.001)
        costs = []
        for _ in range(2 * num_jobs // RECOUNT_JOBS + 4):
            await pass_time(redis_client, keys, 1.001)
            before = await commands_run(redis_client)
            swept = await functions.sweep()
            costs.append(await commands_run(redis_client) - before)
            assert swept.corrections == ()
        return max(costs)

    rng = random.Random(1)
    few, many = await dearest(150), await dearest(1500)
    assert many <= 1.2 * few
    assert many < 10 * RECOUNT_JOBS


async def commands_run(client: redis.asyncio.Redis) -> int:
    stats: Any = await client.info("commandstats")
    return sum(stat["calls"] for stat in stats.values())


async def test_sweeps_of_a_large_fleet_recount_once_a_second(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Whoever calls them: the limit is for the server, not for each caller."""
    await make_jobs(functions)
    await sweep(functions, redis_client, keys)
    before = await redis_client.hget(keys.of("recount", "place"), "next")
    await redis_client.hset(keys.of("tenant", "t"), "reserved", 1)
    for _ in range(20):
        assert (await functions.sweep()).corrections == ()
    assert await redis_client.hget(keys.of("recount", "place"), "next") == before
