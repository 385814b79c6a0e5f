"""The output of one step in one call of `append`, packed and mixed. Progress of running jobs is in
their worker's hash, and never different from the record."""

import asyncio
import contextlib
from collections import Counter

import pytest
import redis.asyncio
from msgspec.structs import replace

from contract.connection import connect
from contract.events import LogEntry
from contract.function_types import Append, Verdict
from contract.functions import Functions
from contract.jobs import JobStatus, ObjectRef
from contract.keys import Keys
from contract.library import ensure_library
from gateway.redis.hints import Hints
from infra.embedded_redis import EmbeddedRedis
from tests.contract.some_calls import LEASE_S, append, claim, make_job, make_submission, tokens

pytestmark = pytest.mark.anyio


def said_by(job_id: str, number: int) -> Append:
    return Append(job_id, 1, number, tokens(number - 1, 7), 1)


async def running_jobs(functions: Functions, num_jobs: int, channel: str = "") -> list[str]:
    """Jobs of worker `w1` with one token each."""
    job_ids = []
    for _ in range(num_jobs):
        job = replace(make_job(), channel=channel)
        await functions.submit(job, make_submission())
        job_ids.append(job.id)
    await claim(functions, max_jobs=num_jobs, max_tokens=100 * num_jobs)
    for job_id in job_ids:
        await append(functions, "w1", said_by(job_id, 1))
    return job_ids


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


@pytest.mark.parametrize("channel", ["", "gateway"])
async def test_a_step_needs_at_most_two_redis_commands_per_job(keys: Keys, channel: str) -> None:
    """Append and publish, once for the jobs of a channel. Progress, leases and counters are read
    and written for all jobs at once. The server is the test's own, because it counts what all
    clients do."""

    async def commands(client: redis.asyncio.Redis, num_jobs: int) -> Counter[str]:
        functions = Functions(client, keys)
        job_ids = await running_jobs(functions, num_jobs, channel)
        await client.config_resetstat()
        await append(functions, "w1", *(said_by(job_id, 2) for job_id in job_ids))
        stats: dict[str, dict[str, int]] = await client.info("commandstats")
        return Counter({name: found["calls"] for name, found in stats.items()})

    with EmbeddedRedis() as server:
        async with connect(server.url, keys) as client:
            await ensure_library(client)
            few, many = await commands(client, 4), await commands(client, 12)

    told = {} if channel else {"cmdstat_publish": 8}
    assert many - few == {"cmdstat_xadd": 8} | told


async def test_a_channel_of_several_jobs_has_all_their_events_in_order(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """In the log's order for each job, with its end; a job without the channel keeps its own."""
    followed = await running_jobs(functions, 3, "gateway")
    [alone] = await running_jobs(functions, 1)
    hints = Hints(redis_client, max_bytes=2**20)
    channels = [(keys.of("ev", "gateway"), job_id) for job_id in followed]
    async with contextlib.AsyncExitStack() as stack:
        boxes = [
            await stack.enter_async_context(hints.listen(*names))
            for names in [*channels, (keys.of("ev", alone), alone)]
        ]
        job_ids = [*followed, alone]
        ends = [Append(job_id, 1, 3, None, 0, JobStatus.SUCCEEDED) for job_id in job_ids[:2]]
        said = [said_by(job_id, 2) for job_id in job_ids]
        await append(functions, "w1", *said, *ends)
        await functions.cancel(followed[2], "t")
        await append(functions, "w1", said_by(alone, 3))
        for job_id, mailbox in zip(job_ids, boxes, strict=True):
            found = await functions.read(job_id, "t", after=1, max_events=9)
            assert found is not None
            heard = list[LogEntry]()
            async with asyncio.timeout(20):
                while len(heard) < 2:
                    heard += await mailbox.take(20.0) or ()
            assert heard == found[1]
    await hints.aclose()


async def test_a_job_may_appear_twice_in_one_append(functions: Functions) -> None:
    """The second entry continues or repeats the first."""
    [job_id] = await running_jobs(functions, 1)
    verdicts = await append(functions, "w1", said_by(job_id, 2), said_by(job_id, 3))
    assert verdicts == [(Verdict.OK, 3), (Verdict.OK, 4)]
    again = await append(functions, "w1", said_by(job_id, 4), said_by(job_id, 4))
    assert again == [(Verdict.OK, 5), (Verdict.OK, 5)]


async def test_a_job_claimed_before_the_library_was_replaced_goes_on(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Earlier versions kept the progress only in the record; the next append finds it there."""
    [job_id] = await running_jobs(functions, 1)
    _, entries = await functions.read(job_id, "t", max_events=9) or (None, [])
    record = keys.of("job", job_id)
    await redis_client.hset(record, mapping={"next": 2, "tokens": 1, "hash": entries[-1].hash})
    await redis_client.delete(keys.of("run", "w1"))
    for number in (2, 3):
        assert await append(functions, "w1", said_by(job_id, number)) == [(Verdict.OK, number + 1)]
