"""A model's state at one moment and its totals, on a clock that stands still."""

import pytest
import redis.asyncio

from contract.function_types import Append, Release
from contract.functions import Functions
from contract.jobs import Job
from contract.keys import Keys
from contract.telemetry.metrics import LATENCY_BOUNDS_S
from tests.clock import clock_key
from tests.contract.some_calls import claim, make_job, make_submission, tokens

pytestmark = pytest.mark.anyio

START_MS = 1_700_000_000_000


async def stop_clock(client: redis.asyncio.Redis, keys: Keys, after_ms: int = 0) -> None:
    await client.set(clock_key(), f"={START_MS + after_ms}")


async def submitted(functions: Functions) -> Job:
    job = make_job()
    await functions.submit(job, make_submission())
    return job


@pytest.mark.parametrize(
    ("wait_ms", "bucket"),
    [
        (250, LATENCY_BOUNDS_S.index(0.25) + 1),
        (251, LATENCY_BOUNDS_S.index(0.25) + 2),
        (10**9, len(LATENCY_BOUNDS_S) + 1),
    ],
)
async def test_a_latency_is_in_the_first_bucket_that_holds_it(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys, wait_ms: int, bucket: int
) -> None:
    """A latency equal to a bucket's bound is in that bucket, as in Prometheus: less or equal."""
    await stop_clock(redis_client, keys)
    job = make_job()
    await functions.submit(job, make_submission(deadline_s=10**7))
    await stop_clock(redis_client, keys, wait_ms)
    [claimed] = await claim(functions)
    item = Append(job.id, claimed.epoch, 1, tokens(0, 97), 1)
    await functions.append("w1", [item], lease_s=10)
    totals = (await functions.snapshot(job.model, [])).totals
    for name in ("request_queue_time_seconds", "time_to_first_token_seconds"):
        assert totals[f"{name}:{job.lane}:{bucket}"] == 1
        assert totals[f"{name}:{job.lane}:sum"] == 1000 * wait_ms


async def test_the_oldest_wait_counts_waiting_jobs_only(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Not an older job that runs; for a released job, the time since it was submitted."""
    await stop_clock(redis_client, keys)
    first = await submitted(functions)
    [claimed] = await claim(functions, max_jobs=1)
    await stop_clock(redis_client, keys, 3000)
    await submitted(functions)
    await stop_clock(redis_client, keys, 5000)

    async def oldest_s() -> float:
        snapshot = await functions.snapshot(first.model, [first.lane])
        return snapshot.lanes[first.lane].oldest_wait_s

    assert await oldest_s() == 2.0
    await functions.release("w1", [Release(first.id, claimed.epoch, "drain")])
    assert await oldest_s() == 5.0
