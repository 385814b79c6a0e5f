"""Retry times of refused callers: one after another, as room becomes free.

The retry times are in the tables of tests/oracle; these tests check the promises to users.
"""

import math

import pytest
import redis.asyncio

from contract.errors import JobRefused
from contract.function_types import TenantLimits, WorkerCapacity
from contract.functions import Functions
from contract.keys import Keys
from tests.clock import clock_key
from tests.contract.some_calls import make_job, make_submission

pytestmark = pytest.mark.anyio

RATE = 26.0  # tokens a second: half of it is promised, which is a job of 13 tokens a second
FULL = {"lane_bound_tokens": 13}
NOW_MS = 1_700_000_000_000


@pytest.fixture
async def full_lane(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> Functions:
    """A lane where one job waits and no other may. The clock stands still."""
    await redis_client.set(clock_key(), f"={NOW_MS}")
    capacity = WorkerCapacity(tokens_per_s=RATE, max_tokens=100, max_jobs=1)
    await functions.heartbeat("w1", "m", [], lease_s=10, info="{}", capacity=capacity)
    await functions.submit(make_job(), make_submission(**FULL))
    return functions


async def retry_s(functions: Functions, tenant: str = "t", lane: str = "standard") -> float | None:
    """The retry time of a refused caller, in seconds."""
    with pytest.raises(JobRefused) as refused:
        await functions.submit(make_job(tenant=tenant, lane=lane), make_submission(**FULL))
    return refused.value.retry_after_s


async def test_refused_callers_return_one_after_another(full_lane: Functions) -> None:
    """The first when the waiting job has been taken, the others one second apart: half of the rate
    is promised."""
    assert [await retry_s(full_lane) for _ in range(4)] == [0.5, 1.5, 2.5, 3.5]


async def test_a_flood_of_refusals_does_not_delay_other_tenants(full_lane: Functions) -> None:
    """A tenant refused for the first time comes after one caller of the flood, not after all. From
    then on the two take turns."""
    for _ in range(50):
        await retry_s(full_lane, "flood")
    assert [await retry_s(full_lane) for _ in range(3)] == [1.5, 3.5, 5.5]


async def test_first_retries_are_spread(full_lane: Functions) -> None:
    """A hundred tenants, refused once each, get a hundred different times."""
    times = [await retry_s(full_lane, f"tenant-{number}") for number in range(100)]
    assert times == [0.5 + number for number in range(100)]


async def test_promises_expire(
    full_lane: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """A later caller is placed only behind those whose time has not come yet."""
    for _ in range(4):
        await retry_s(full_lane)
    await redis_client.set(clock_key(), f"={NOW_MS + 4000}")
    assert await retry_s(full_lane) == 0.5


async def test_a_quote_promises_nothing(full_lane: Functions) -> None:
    """Each quote returns the earliest possible retry time."""
    quotes = [await full_lane.quote(make_job(), make_submission(**FULL)) for _ in range(2)]
    assert [q.refusal and q.refusal.retry_after_s for q in quotes] == [0.5, 0.5]


async def test_a_job_admitted_at_once_clears_the_promises(full_lane: Functions) -> None:
    """None of the refused callers returned, and there is room: the next refusal gets the plain
    retry time."""
    for _ in range(20):
        await retry_s(full_lane)
    [claimed] = await full_lane.claim(
        "w1", "m", ["standard"], lease_s=10, max_jobs=1, max_tokens=99
    )
    await full_lane.cancel(claimed.job.id, "t")
    await full_lane.submit(make_job(), make_submission(**FULL))
    assert await retry_s(full_lane) == 0.5


async def test_retry_after_is_at_most_an_hour(full_lane: Functions) -> None:
    """However many callers were refused before."""
    latest = 0.0
    for _ in range(3700):
        latest = max(latest, await retry_s(full_lane) or math.inf)
    assert latest == 3600.0


async def test_limits_per_minute_stay_exact(full_lane: Functions) -> None:
    """They belong to one tenant: each refusal names the time when the limit has room."""
    limits = TenantLimits(requests_per_min=1)
    terms = {"limits": limits, "lane_bound_tokens": 0}
    await full_lane.submit(make_job(tenant="metered"), make_submission(**terms))
    for _ in range(2):
        with pytest.raises(JobRefused) as refused:
            await full_lane.submit(make_job(tenant="metered"), make_submission(**terms))
        assert refused.value.retry_after_s == 60.0
