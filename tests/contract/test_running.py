"""Progress of running jobs: packed in their worker's hash, and never different from the record."""

import pytest
import redis.asyncio

from contract.function_types import Append, Verdict
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from tests.contract.some_calls import (
    append,
    claim,
    make_job,
    make_submission,
    tokens,
)

pytestmark = pytest.mark.anyio


async def running_job(functions: Functions, num_events: int = 2) -> str:
    """A job of tenant `t` that worker `w1` holds, with this many tokens, each in its own event."""
    job = make_job()
    await functions.submit(job, make_submission())
    await claim(functions)
    for number in range(1, num_events + 1):
        verdicts = await append(functions, "w1", said_by(job.id, number))
        assert verdicts == [(Verdict.OK, number + 1)]
    return job.id


def said_by(job_id: str, number: int, epoch: int = 1) -> Append:
    return Append(job_id, epoch, number, tokens(number - 1, 7), 1)


async def test_a_job_may_appear_twice_in_one_append(functions: Functions) -> None:
    """The second entry continues or repeats the first."""
    job_id = await running_job(functions)
    verdicts = await append(functions, "w1", said_by(job_id, 3), said_by(job_id, 4))
    assert verdicts == [(Verdict.OK, 4), (Verdict.OK, 5)]
    again = await append(functions, "w1", said_by(job_id, 5), said_by(job_id, 5))
    assert again == [(Verdict.OK, 6), (Verdict.OK, 6)]


async def test_an_ended_job_leaves_no_packed_progress(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Its worker's hash is gone, and the record holds its progress."""
    job_id = await running_job(functions)
    assert await redis_client.exists(keys.of("run", "w1"))
    await append(functions, "w1", Append(job_id, 1, 3, fin=JobStatus.SUCCEEDED))
    assert not await redis_client.exists(keys.of("run", "w1"))
    record = await redis_client.hmget(keys.of("job", job_id), ["next", "tokens"])
    assert record == [b"4", b"2"]


async def test_a_job_claimed_before_the_library_was_replaced_goes_on(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Earlier versions kept the progress only in the record; the next append finds it there."""
    job_id = await running_job(functions)
    await redis_client.hset(keys.of("job", job_id), mapping={"next": 3, "tokens": 2})
    await redis_client.hset(keys.of("job", job_id), "hash", (await hashes(functions, job_id))[-1])
    await redis_client.delete(keys.of("run", "w1"))
    assert await append(functions, "w1", said_by(job_id, 3)) == [(Verdict.OK, 4)]
    assert await append(functions, "w1", said_by(job_id, 4)) == [(Verdict.OK, 5)]


async def hashes(functions: Functions, job_id: str) -> list[str]:
    """The hash of each event, in order."""
    found = await functions.read(job_id, "t", max_events=100)
    assert found is not None
    return [entry.hash for entry in found[1]]
