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
    pass_time,
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


async def test_a_reader_sees_every_event_at_once(functions: Functions) -> None:
    """The record's sequence number and token count are those of the log, although other commands
    write them."""
    job_id = await running_job(functions, num_events=3)
    found = await functions.read(job_id, "t", max_events=100)
    assert found is not None
    view, entries = found
    assert (view.next_number, view.num_output_tokens) == (4, 3)
    assert [entry.number for entry in entries] == [1, 2, 3]


async def test_a_job_may_appear_twice_in_one_append(functions: Functions) -> None:
    """The second entry continues or repeats the first."""
    job_id = await running_job(functions)
    verdicts = await append(functions, "w1", said_by(job_id, 3), said_by(job_id, 4))
    assert verdicts == [(Verdict.OK, 4), (Verdict.OK, 5)]
    again = await append(functions, "w1", said_by(job_id, 5), said_by(job_id, 5))
    assert again == [(Verdict.OK, 6), (Verdict.OK, 6)]


async def test_an_older_claim_of_the_same_worker_is_fenced(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """A worker that lost a job and claimed it again cannot append with its former epoch."""
    job_id = await running_job(functions)
    await pass_time(redis_client, keys, 11)
    await functions.sweep()
    await claim(functions)
    assert await append(functions, "w1", said_by(job_id, 3, epoch=2)) == [(Verdict.OK, 4)]
    assert await append(functions, "w1", said_by(job_id, 4, epoch=1)) == [(Verdict.FENCED, 0)]


async def test_a_running_job_may_pass_its_former_deadline(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """After its caller detached in the middle of the output, the later deadline counts."""
    job_id = await running_job(functions)
    assert await functions.detach(job_id, "t", deadline_s=600, retention_s=600) is Verdict.OK
    await pass_time(redis_client, keys, 100)
    assert await append(functions, "w1", said_by(job_id, 3)) == [(Verdict.OK, 4)]


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
