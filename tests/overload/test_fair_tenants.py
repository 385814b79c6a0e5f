"""Tenants of one lane with more work than fits: shares by weight over a fleet, and a light
tenant's calls beside another's queued jobs. Checked by counts and order, not by time."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import redis.asyncio

from contract.function_types import JobView
from contract.functions import Functions
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions
from tests.fleet import Caller, fleet

pytestmark = [pytest.mark.e2e, pytest.mark.anyio, pytest.mark.campaign]

SLOW = HashModelOptions(num_blocks=512, step_s=0.005, eos_rate=0.0)
NUM_PLACES = 14
WEIGHTS = {"one": 1.0, "two": 2.0, "four": 4.0}
JOBS_BY_WEIGHT = 120  # a worker that pauses on a busy machine costs up to half of what is measured
TOLERANCE = 0.15  # of each share


@pytest.fixture
def caller(functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys) -> Caller:
    return Caller(functions, redis_client, keys)


@pytest.fixture
def batching(tmp_path: Path) -> str:
    path = tmp_path / "batching.yaml"
    path.write_text(f"max_num_seqs: {NUM_PLACES}\n")
    return str(path)


def shares_of(views: dict[str, list[JobView]]) -> dict[str, float]:
    """Shares of tokens of the jobs that ended while all tenants had work: from the end of all
    jobs that began before the last tenant's first, to when the first tenant had no queued job."""
    claimed = [[v.claimed_ms or 0 for v in all_] for all_ in views.values()]
    came_ms, to_ms = max(map(min, claimed)), min(map(max, claimed))
    every = [view for all_ in views.values() for view in all_]
    from_ms = max(v.finished_ms or 0 for v in every if (v.claimed_ms or 0) < came_ms)
    num_tokens: Counter[str] = Counter()
    for tenant, jobs in views.items():
        for view in jobs:
            if from_ms < (view.finished_ms or 0) <= to_ms:
                num_tokens[tenant] += view.num_output_tokens
    return {tenant: num_tokens[tenant] / num_tokens.total() for tenant in views}


async def test_a_fleet_serves_tenants_by_their_weights(
    caller: Caller, redis_server: EmbeddedRedis, batching: str
) -> None:
    """Weights 1, 2 and 4, on two workers. The tenant with the least weight comes first and fills
    all places."""
    callers = {
        tenant: dataclasses.replace(caller, tenant=tenant, weight=weight)
        for tenant, weight in WEIGHTS.items()
    }
    jobs = {}
    async with fleet(redis_server.url, 2, SLOW, batching_path=batching):
        for tenant, own in callers.items():
            jobs[tenant] = [
                await own.submit(f"{tenant} {i}", max_tokens=20 + 10 * (i % 4))
                for i in range(int(JOBS_BY_WEIGHT * own.weight))
            ]
            await own.has_output(jobs[tenant][0])
        for tenant, own in callers.items():
            for job in jobs[tenant]:
                await own.answer(job)
        views = {t: [await callers[t].view(job) for job in jobs[t]] for t in jobs}
    shares = shares_of(views)
    print(shares)

    for tenant, weight in WEIGHTS.items():
        fair = weight / sum(WEIGHTS.values())
        assert abs(shares[tenant] - fair) <= TOLERANCE * fair, shares


async def test_light_calls_do_not_wait_for_a_flood_s_jobs(
    caller: Caller, redis_server: EmbeddedRedis, batching: str
) -> None:
    """Ten calls end, one after another, before any job of a flood that filled all places. Each
    displaces at most one sequence."""
    light = dataclasses.replace(caller, tenant="light")
    async with fleet(redis_server.url, 1, SLOW, batching_path=batching, drain_s=0.0):
        flood = [await caller.submit(f"flood {i}", max_tokens=480) for i in range(200)]
        for job in flood[:NUM_PLACES]:
            await caller.has_output(job)
        for number in range(10):
            answer = await light.answer(await light.submit(f"call {number}", max_tokens=4))
            assert len(answer.token_ids[0]) == 4
        views = [await caller.view(job) for job in flood]
        assert not any(view.is_terminal for view in views)
        num_started = sum(view.claimed_ms is not None for view in views)
        assert num_started == NUM_PLACES
