"""The output of one step in one call of `append`, packed and mixed."""

from collections import Counter

import pytest
import redis.asyncio

from contract.connection import connect
from contract.function_types import Append, Verdict
from contract.functions import Functions
from contract.jobs import JobStatus, ObjectRef
from contract.keys import Keys
from contract.library import ensure_library
from infra.embedded_redis import EmbeddedRedis
from tests.contract.some_calls import (
    LEASE_S,
    append,
    claim,
    make_job,
    make_submission,
    pass_time,
    tokens,
)
from tests.contract.test_running import running_job, said_by

pytestmark = pytest.mark.anyio


async def running_jobs(functions: Functions, num_jobs: int) -> list[str]:
    """Jobs of worker `w1` with one token each."""
    job_ids = []
    for _ in range(num_jobs):
        job = make_job()
        await functions.submit(job, make_submission())
        job_ids.append(job.id)
    await claim(functions, max_jobs=num_jobs, max_tokens=100 * num_jobs)
    for job_id in job_ids:
        await append(functions, "w1", said_by(job_id, 1))
    return job_ids


async def test_each_job_of_an_append_gets_its_own_verdict(functions: Functions) -> None:
    """Appended, repeated, with a gap, with too much output, unknown, ended, with an older epoch."""
    goes_on, repeats, leaps, talks, ends, says_and_ends, is_late = await running_jobs(functions, 7)
    await functions.cancel(is_late, "t")
    verdicts = await append(
        functions,
        "w1",
        said_by(leaps, 3),
        said_by(goes_on, 2),
        said_by(repeats, 1),
        Append(talks, 1, 2, tokens(1, *range(10)), 10),
        Append("job-0-none", 1, 2, tokens(1, 7), 1),
        Append(ends, 1, 2, fin=JobStatus.SUCCEEDED),
        Append(says_and_ends, 1, 2, tokens(1, 7), 1, JobStatus.SUCCEEDED),
        said_by(is_late, 2),
        said_by(goes_on, 3, epoch=2),
    )
    assert verdicts == [
        (Verdict.GAP, 2),
        (Verdict.OK, 3),
        (Verdict.OK, 2),
        (Verdict.OVER, 1),
        (Verdict.GONE, 0),
        (Verdict.OK, 3),
        (Verdict.OK, 4),
        (JobStatus.CANCELLED, 0),
        (Verdict.FENCED, 0),
    ]


async def test_an_end_keeps_its_message_and_the_key_of_its_log(functions: Functions) -> None:
    """Whatever bytes they contain, also with other jobs before and after in the call."""
    first, fails, succeeds, last = await running_jobs(functions, 4)
    message, ref = "it broke: Ünglück\0\n", ObjectRef("store", "key\0", "0" * 64, 1 << 33)
    verdicts = await append(
        functions,
        "w1",
        said_by(first, 2),
        Append(fails, 1, 2, None, 0, JobStatus.FAILED, "engine_error", message),
        Append(succeeds, 1, 2, None, 0, JobStatus.SUCCEEDED, result=ref),
        said_by(last, 2),
    )
    assert verdicts == [(Verdict.OK, 3)] * 4
    failed, succeeded = await functions.read(fails, "t"), await functions.read(succeeds, "t")
    assert failed is not None
    assert succeeded is not None
    assert (failed[0].code, failed[0].message) == ("engine_error", message)
    assert succeeded[0].result == ref


async def test_an_append_without_renewal_keeps_leases(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """On the fast path, and on the slow path of a first token."""
    goes_on = await running_job(functions)
    begins = make_job()
    await functions.submit(begins, make_submission())
    await claim(functions)
    before = await redis_client.zrange(keys.of("leases"), 0, -1, withscores=True)
    await pass_time(redis_client, keys, 5)
    items = [said_by(goes_on, 3), said_by(begins.id, 1)]
    assert await functions.append("w1", items, lease_s=0) == [(Verdict.OK, 4), (Verdict.OK, 2)]
    assert await redis_client.zrange(keys.of("leases"), 0, -1, withscores=True) == before


async def test_one_append_serves_many_jobs(functions: Functions) -> None:
    """More jobs than a Redis command may have arguments: reads and writes are split."""
    job_ids = await running_jobs(functions, 1100)
    verdicts = await append(functions, "w1", *(said_by(job_id, 2) for job_id in job_ids))
    assert verdicts == [(Verdict.OK, 3)] * len(job_ids)
    found = await functions.read(job_ids[-1], "t", max_events=9)
    assert found is not None
    assert found[0].num_output_tokens == 2


async def test_a_worker_s_progress_is_stored_as_a_hash_table(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """With values of 64 bytes or less, Redis would store the worker's hash as a list, which it
    searches from the start for each job. Also with short names of lane and model."""
    job = make_job(lane="a")
    await functions.submit(job, make_submission())
    await functions.claim("w1", "m", ["a"], lease_s=LEASE_S, max_jobs=1, max_tokens=100)
    await append(functions, "w1", said_by(job.id, 1))
    assert await redis_client.object("encoding", keys.of("run", "w1")) == b"hashtable"


async def test_a_step_needs_two_redis_commands_per_job(keys: Keys) -> None:
    """Append and publish. Progress, leases and counters are read and written for all jobs at once.
    The server is the test's own, because it counts what all clients do."""

    async def commands(client: redis.asyncio.Redis, num_jobs: int) -> Counter[str]:
        functions = Functions(client, keys)
        job_ids = await running_jobs(functions, num_jobs)
        await client.config_resetstat()
        await append(functions, "w1", *(said_by(job_id, 2) for job_id in job_ids))
        stats: dict[str, dict[str, int]] = await client.info("commandstats")
        return Counter({name: found["calls"] for name, found in stats.items()})

    with EmbeddedRedis() as server:
        async with connect(server.url, keys) as client:
            await ensure_library(client)
            few, many = await commands(client, 4), await commands(client, 12)

    assert many - few == {"cmdstat_xadd": 8, "cmdstat_publish": 8}
