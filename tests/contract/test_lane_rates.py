"""Drain rates and predicted waits of lanes while other lanes have work, on a real Redis.

The clock stands still.
"""

from collections.abc import Mapping

import pytest
import redis.asyncio

from contract.errors import ErrorCode, JobRefused
from contract.function_types import WorkerCapacity
from contract.functions import Functions
from contract.keys import Keys
from tests.clock import clock_key
from tests.contract.some_calls import make_job, make_submission

pytestmark = pytest.mark.anyio

LANES = ("interactive", "standard", "batch")
SHARES = {"standard": 0.2, "batch": 0.1}
RATE = 13.0  # one job's cost a second
START_MS = 1_700_000_000_000  # the start of a window


@pytest.fixture(autouse=True)
async def still_clock(redis_client: redis.asyncio.Redis, keys: Keys) -> None:
    """Time passes only when a test advances it."""
    await redis_client.set(clock_key(), f"={START_MS}")


async def beat(functions: Functions, shares: Mapping[str, float]) -> None:
    """Sends the heartbeat of a worker with one place."""
    capacity = WorkerCapacity(
        tokens_per_s=RATE, max_tokens=1000, max_jobs=1, lanes=LANES, min_shares=shares
    )
    await functions.heartbeat("w", "m", [], lease_s=600, info="{}", capacity=capacity)


async def fill(functions: Functions, lane: str, num_jobs: int) -> None:
    for _ in range(num_jobs):
        await functions.submit(make_job("t", lane), make_submission())


async def hand_out(functions: Functions, lane: str, num_jobs: int) -> None:
    claimed = await functions.claim(
        "w", "m", [lane], lease_s=600, max_jobs=num_jobs, max_tokens=10**6
    )
    assert len(claimed) == num_jobs


async def eta_s(functions: Functions, lane: str, **terms: object) -> float:
    quote = await functions.quote(make_job("t", lane), make_submission(**terms))
    assert quote.position.eta_s is not None
    return quote.position.eta_s


async def test_the_most_urgent_lane_has_the_rate_not_guaranteed_to_others(
    functions: Functions,
) -> None:
    """Seven jobs at 13 tokens per second take seven seconds, and ten while the other lanes have
    work."""
    await beat(functions, SHARES)
    await fill(functions, "interactive", 7)
    assert await eta_s(functions, "interactive") == 7.0
    await fill(functions, "batch", 1)
    await fill(functions, "standard", 1)
    assert await eta_s(functions, "interactive") == pytest.approx(10.0, abs=0.001)


async def test_a_bound_in_seconds_holds_for_the_lane_itself(functions: Functions) -> None:
    """A job that would start within eight seconds alone would not do so beside other lanes, and is
    refused."""
    await beat(functions, SHARES)
    await fill(functions, "interactive", 7)
    await functions.submit(make_job("t", "interactive"), make_submission(lane_bound_s=8.0))
    await fill(functions, "standard", 1)
    with pytest.raises(JobRefused) as refused:
        await functions.submit(make_job("t", "interactive"), make_submission(lane_bound_s=8.0))
    assert (refused.value.code, refused.value.limit) == (ErrorCode.LANE_FULL, "lane_wait")
    assert (
        refused.value.retry_after_s == 2.0
    )  # eight jobs at four fifths of the rate, less the bound


async def test_a_lower_lane_has_the_rate_that_urgent_lanes_leave(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Half of the rate went to lanes above it, so waiting takes twice as long. After twenty seconds
    without such jobs it does not."""
    await beat(functions, {})
    await fill(functions, "interactive", 5)
    await hand_out(
        functions, "interactive", 5
    )  # 65 tokens in a window of ten seconds: 6.5 a second
    await fill(functions, "standard", 4)
    rest_s = 1.0  # of a running job, on average
    assert await eta_s(functions, "standard") == 2 * (4 + rest_s)
    await redis_client.set(clock_key(), f"={START_MS + 15_000}")
    assert await eta_s(functions, "standard") == pytest.approx((4 + rest_s) / 0.75, abs=0.001)
    await redis_client.set(clock_key(), f"={START_MS + 20_000}")
    await beat(functions, {})
    assert await eta_s(functions, "standard") == 4 + rest_s


async def test_jobs_that_began_together_end_together(functions: Functions) -> None:
    """Ten running jobs without any output take ten seconds, and each wait is at least as long. Jobs
    of less urgent lanes give up their places; a lane with a share waits only for its own jobs."""
    await beat(functions, {})
    await fill(functions, "standard", 10)
    await hand_out(functions, "standard", 10)
    assert await eta_s(functions, "standard") == 10.0
    assert await eta_s(functions, "interactive") == 1.0
    await fill(functions, "interactive", 10)
    await hand_out(functions, "interactive", 10)
    assert await eta_s(functions, "standard") == 20.0
    await beat(functions, {"standard": 0.5})
    assert await eta_s(functions, "standard") == 10.0


async def test_a_flooded_lane_above_leaves_a_guaranteed_share(functions: Functions) -> None:
    """However many jobs wait above it, the lane has a fifth of the rate. A lane without a share is
    predicted a twentieth, because its real rate is unknown."""
    await beat(functions, {"standard": 0.2})
    await fill(functions, "interactive", 60)
    await hand_out(functions, "interactive", 20)
    await fill(functions, "standard", 2)
    rest_s = 1.0
    assert await eta_s(functions, "standard") == 5 * (2 + rest_s)
    assert await eta_s(functions, "batch", deadline_s=10_000.0) == 20 * (40 + 2 + rest_s)
