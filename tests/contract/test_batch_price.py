"""The price of a token in the lane `batch`, in a tenant's meter of tokens."""

from typing import Any

import pytest
import redis.asyncio

from contract.errors import JobRefused
from contract.function_types import Append, TenantLimits
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from tests.clock import clock_key
from tests.contract.some_calls import append, make_job, make_submission, tokens

pytestmark = pytest.mark.anyio


async def levels(client: redis.asyncio.Redis, keys: Keys) -> list[float]:
    """The tenant's meter of tokens, and its reserved tokens."""
    figures: Any = await client.hmget(keys.of("tenant", "t"), "tokens", "reserved")
    return [float(figure) for figure in figures]


async def test_a_price_counts_in_the_meter_alone(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """A limit of 20 has room for 40 tokens at half price; reservation and bill are of tokens."""
    await redis_client.set(clock_key(), "=1700000000000")
    half = make_submission(limits=TenantLimits(tokens_per_min=20), batch_price=0.5)
    jobs = [make_job(lane="batch") for _ in range(3)]
    for job in jobs:
        submitted = await functions.submit(job, half)
    assert submitted.rates.tokens is not None
    assert submitted.rates.tokens.remaining == 0
    assert await levels(redis_client, keys) == [19.5, 39.0]
    with pytest.raises(JobRefused) as refused:
        await functions.submit(make_job(lane="batch"), half)
    assert (refused.value.limit, refused.value.retry_after_s) == ("tokens_per_min", 18.0)
    await functions.claim("w1", "m", ["batch"], lease_s=10, max_jobs=1, max_tokens=99)
    await append(functions, "w1", Append(jobs[0].id, 1, 1, tokens(0, 7, 8), 2, JobStatus.SUCCEEDED))
    assert await levels(redis_client, keys) == [15.5, 26.0]
    bill = await redis_client.hmget(keys.of("job", jobs[0].id), "cost", "charge", "refund")
    assert bill == [b"13", b"5", b"8"]
    assert await functions.cancel(jobs[1].id, "t") is JobStatus.CANCELLED
    assert await levels(redis_client, keys) == [9.0, 13.0]


async def test_no_fraction_of_a_price_is_lost(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """500 jobs of 5 tokens each, reserved with 13: at half price exactly 1,250."""
    await redis_client.set(clock_key(), "=1700000000000")
    half = make_submission(limits=TenantLimits(tokens_per_min=10**6), batch_price=0.5)
    for _ in range(500):
        job = make_job(lane="batch")
        await functions.submit(job, half)
        await functions.claim("w1", "m", ["batch"], lease_s=10, max_jobs=1, max_tokens=99)
        output = tokens(0, 7, 8)
        await append(functions, "w1", Append(job.id, 1, 1, output, 2, JobStatus.SUCCEEDED))
    assert await levels(redis_client, keys) == [1250.0, 0.0]


async def test_a_job_that_leaves_the_lane_pays_the_difference(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Also where the meter has run empty since; back in the lane it has the price again."""
    await redis_client.set(clock_key(), "=1700000000000")
    half = make_submission(limits=TenantLimits(tokens_per_min=60), batch_price=0.5)
    job = make_job(lane="batch")
    await functions.submit(job, half)
    await redis_client.set(clock_key(), "=1700000030000")
    await functions.reprioritise(job.id, "t", lane="standard")
    assert await levels(redis_client, keys) == [6.5, 13.0]
    await functions.reprioritise(job.id, "t", lane="batch")
    assert await levels(redis_client, keys) == [0.0, 13.0]
    await functions.reprioritise(job.id, "t", lane="standard")
    await functions.claim("w1", "m", ["standard"], lease_s=10, max_jobs=1, max_tokens=99)
    await append(functions, "w1", Append(job.id, 1, 1, tokens(0, 7, 8), 2, JobStatus.SUCCEEDED))
    assert await levels(redis_client, keys) == [0.0, 0.0]  # 6.5 less 8 of unused cost
