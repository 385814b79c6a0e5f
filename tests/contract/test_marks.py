"""What a worker's engine did with a job is kept with the claim by that worker."""

from typing import Literal

import pytest
import redis.asyncio

from contract.function_types import Append, JobMark, JobRun, JobView
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from tests.clock import clock_key
from tests.contract.some_calls import append, claim, make_job, make_submission, tokens

pytestmark = pytest.mark.anyio

Fin = Literal["", JobStatus.SUCCEEDED, JobStatus.FAILED]
NOW_MS = 1_700_000_000_000
PREFILL = JobMark("prefill", 900, 100, 3, 1500)
DISPLACED = JobMark("displaced", 50, 50, 1, 700)


async def viewed(functions: Functions, job_id: str) -> JobView:
    found = await functions.read(job_id, "t")
    assert found is not None
    return found[0]


@pytest.mark.parametrize("fin", ["", JobStatus.SUCCEEDED, JobStatus.FAILED])
async def test_marks_come_with_output_and_with_the_end(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys, fin: Fin
) -> None:
    """At the times that the worker tells of; a repeated append adds none twice, and an event
    without marks changes none."""
    await redis_client.set(clock_key(), f"={NOW_MS}")
    job = make_job()
    await functions.submit(job, make_submission())
    [claimed] = await claim(functions)
    first = Append(job.id, claimed.epoch, 1, tokens(0, 97), 1, marks=(PREFILL, DISPLACED))
    for _ in range(2):
        await append(functions, "w1", first)
    await append(functions, "w1", Append(job.id, claimed.epoch, 2, tokens(1, 97), 1))
    last = Append(
        job.id, claimed.epoch, 3, tokens(2, 97), 1, fin, "a_code", "why", marks=(PREFILL,)
    )
    assert await append(functions, "w1", last) == [("OK", 5 if fin else 4)]
    prefill = JobMark("prefill", NOW_MS - 900, NOW_MS - 100, 3, 1500)
    displaced = JobMark("displaced", NOW_MS - 50, NOW_MS - 50, 1, 700)
    view = await viewed(functions, job.id)
    assert view.runs == (JobRun("w1", NOW_MS, 1, (prefill, displaced, prefill)),)
    assert (view.status, view.num_output_tokens) == (fin or JobStatus.STREAMING, 3)
    if fin:
        assert (view.code, view.message) == ("a_code", "why")


async def test_marks_take_bounded_room(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """A job that loses its place a hundred times keeps its claim and the first marks."""
    job = make_job()
    await functions.submit(job, make_submission(max_output_tokens=200))
    [claimed] = await claim(functions)
    for number in range(1, 101):
        item = Append(job.id, claimed.epoch, number, tokens(number - 1, 97), 1, marks=(DISPLACED,))
        assert await append(functions, "w1", item) == [("OK", number + 1)]
    assert await redis_client.hstrlen(keys.of("job", job.id), "runs") <= 1024
    [run] = (await viewed(functions, job.id)).runs
    assert run.worker == "w1"
    assert 10 < len(run.marks) < 30


async def test_a_fenced_worker_marks_nothing(functions: Functions) -> None:
    """It no longer holds the job."""
    job = make_job()
    await functions.submit(job, make_submission())
    [claimed] = await claim(functions)
    late = Append(job.id, claimed.epoch + 1, 1, tokens(0, 97), 1, marks=(PREFILL,))
    assert await append(functions, "w2", late) == [("FENCED", 0)]
    [run] = (await viewed(functions, job.id)).runs
    assert run.marks == ()
