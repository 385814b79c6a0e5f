"""Unreadable job records, and records that cannot be run: each fails its own job."""

from itertools import chain

import msgspec
import pytest
import redis.asyncio

from contract.codec import encode
from contract.function_types import Append, Verdict
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.contract.some_calls import append, claim, make_job, make_submission, pass_time, tokens
from tests.fleet import Caller, fleet, until

pytestmark = pytest.mark.anyio

DAMAGED = [b"", b"\xff\xfe", b"\x91" * 5000, b"nan", msgspec.msgpack.encode({"id": 1})]


def absurd() -> list[bytes]:
    """Records with valid encoding and impossible values, and a truncated one."""
    job = make_job()
    many = msgspec.structs.replace(job.params, n=2**30)
    other = msgspec.structs.replace(job, params=many)
    return [encode(job), encode(other), encode(other)[:-3]]


async def test_an_unreadable_record_fails_as_poison_and_the_next_job_runs(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys, redis_server: EmbeddedRedis
) -> None:
    """With a gateway's permissions, before any worker runs. Both workers live on, and the jobs
    queued behind succeed."""
    caller = Caller(functions, redis_client, keys)
    damaged = []
    for record in [*DAMAGED, *absurd()]:
        job = make_job()
        await functions.submit(job, make_submission())
        await redis_client.hset(keys.of("job", job.id), "job", record)
        damaged.append(keys.of("job", job.id))
    async with fleet(redis_server.url, 2) as workers:
        sound = [await caller.submit(f"prompt {number}") for number in range(4)]
        for job in sound:
            assert (await caller.answer(job)).ends[0].status is JobStatus.SUCCEEDED
        for key in damaged:

            async def has_failed(key: str = key) -> bool:
                return await redis_client.hget(key, "state") == b"failed"

            await until(has_failed)
            assert await redis_client.hget(key, "code") == b"poison"
        await caller.num_workers(len(workers))


async def test_a_record_without_a_required_field_is_removed(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """For each field that load_job needs, and a key of another type. The next job is claimed, and
    sweeps continue."""
    for field in ("tenant", "model", "lane", "stream", "entry", "owner", "hash"):
        job = make_job()
        await functions.submit(job, make_submission())
        await redis_client.hdel(keys.of("job", job.id), field)
    retyped = make_job()
    await functions.submit(retyped, make_submission())
    await redis_client.delete(keys.of("job", retyped.id))
    await redis_client.set(keys.of("job", retyped.id), "x")
    sound = make_job()
    await functions.submit(sound, make_submission())
    calls = [await claim(functions) for _ in range(4)]  # each meets a few
    [claimed] = chain(*calls)
    assert claimed.job.id == sound.id
    await pass_time(redis_client, keys, 100)
    await functions.sweep()
    left = [key async for key in redis_client.scan_iter(match=keys.of("job", "*"))]
    assert left == [keys.of("job", sound.id).encode()]
    assert await redis_client.hkeys(keys.of("stored", "jobs")) == [sound.id.encode()]
    sums = await redis_client.hgetall(keys.of("stored", "tenants"))
    assert sums[b"t"] == sums[b""]
    assert int(sums[b""]) > 0
    await redis_client.hset(keys.of("stored", "tenants"), mapping={"t": "x", "": "x"})
    await functions.submit(make_job(), make_submission(max_tenant_stored_bytes=10**6))


async def test_a_log_of_another_type_is_replaced(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """The job continues, as does the other job of the same call. The correction is counted."""
    jobs = [make_job(), make_job()]
    for job in jobs:
        await functions.submit(job, make_submission())
    claims = await claim(functions)
    await redis_client.set(keys.of("log", jobs[0].id), "x")
    items = [Append(c.job.id, c.epoch, 1, tokens(0, 7), 1) for c in claims]
    assert await append(functions, "w1", *items) == [(Verdict.OK, 2), (Verdict.OK, 2)]
    for job in jobs:
        found = await functions.read(job.id, "t", max_events=9)
        assert found is not None
        assert [entry.number for entry in found[1]] == [1]
    assert await redis_client.hget(keys.of("corrections"), "type") == b"1"
