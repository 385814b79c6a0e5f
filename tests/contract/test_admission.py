"""Admission on a real Redis: exact quotas over many gateways, predicted waits, and fair shares.
The tables of decisions are in tests/oracle; these tests check the promises to users.
"""

import asyncio
import sys

import pytest
from msgspec import structs

from contract.errors import ErrorCode, JobRefused
from contract.function_types import Append, TenantLimits, WorkerCapacity
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.contract.some_calls import (
    append,
    claim,
    make_job,
    make_submission,
    tokens,
)
from tests.contract.submitter import COST, hammer

pytestmark = pytest.mark.anyio

NUM_TASKS, NUM_PROCESSES, NUM_TRIES, QUOTA_JOBS = 25, 2, 8, 137


async def beat(functions: Functions, capacity: WorkerCapacity) -> None:
    await functions.heartbeat("w1", "m", [], lease_s=10, info="{}", capacity=capacity)


async def refusal(functions: Functions, **terms: object) -> JobRefused:
    with pytest.raises(JobRefused) as refused:
        await functions.submit(make_job(), make_submission(**terms))
    return refused.value


async def test_fifty_gateways_admit_exactly_the_quota(
    redis_server: EmbeddedRedis, functions: Functions, keys: Keys
) -> None:
    """25 tasks in this process and 25 in two others, each with its own connection, try 400 times.
    The quota is 137 unfinished jobs."""
    limit = QUOTA_JOBS * COST
    num_tasks = NUM_TASKS // NUM_PROCESSES + 1
    numbers = [str(n) for n in (keys.partition, num_tasks, NUM_TRIES, limit)]
    command = ("-m", "tests.contract.submitter", redis_server.url, keys.namespace, *numbers)
    others = [
        await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.PIPE
        )
        for _ in range(NUM_PROCESSES)
    ]
    limits = TenantLimits(concurrent_tokens=limit)
    here = await hammer(redis_server.url, keys, NUM_TASKS, NUM_TRIES, limits)
    there = [int((await other.communicate())[0]) for other in others]

    assert here + sum(there) == QUOTA_JOBS


async def test_earlier_outputs_refuse_nobody_whom_nothing_precedes(functions: Functions) -> None:
    """Five outputs of 8 tokens at one per second: a deadline of 5 s is tried on an idle worker, so
    that a faster step or a shorter output is seen, and refused behind others."""
    capacity = WorkerCapacity(13.0, 1.0, max_tokens=13, max_jobs=1, lanes=("standard",))
    await beat(functions, capacity)
    for _ in range(5):
        job = make_job()
        await functions.submit(job, make_submission())
        await functions.claim("w1", "m", ["standard"], lease_s=10, max_jobs=1, max_tokens=99)
        output = tokens(0, *range(8))
        await append(functions, "w1", Append(job.id, 1, 1, output, 8, JobStatus.SUCCEEDED))
    alone = await functions.quote(make_job(), make_submission(deadline_s=5.0))
    assert (alone.refusal, alone.service_s) == (None, 8.0)
    for _ in range(2):
        await functions.submit(make_job(), make_submission())
    behind = await functions.quote(make_job(), make_submission(deadline_s=5.0))
    assert behind.refusal is not None
    assert behind.refusal.code is ErrorCode.DEADLINE_INFEASIBLE


@pytest.mark.parametrize(
    ("heavy", "light", "is_below"), [(1.0, 1.0, True), (4.0, 1.0, False), (4.0, 4.0, True)]
)
async def test_a_tenant_below_its_share_has_no_predicted_wait(
    functions: Functions, heavy: float, light: float, is_below: bool
) -> None:
    """One tenant has four running and four waiting jobs of 13 tokens each. Another tenant's job
    that will get a place starts at once and passes the lane's bound. If its weight is too small, it
    waits."""
    capacity = WorkerCapacity(tokens_per_s=13.0, max_jobs=4, max_tokens=1000, lanes=("standard",))
    await beat(functions, capacity)
    for _ in range(8):
        await functions.submit(make_job("heavy", weight=heavy), make_submission())
    assert len(await claim(functions, max_jobs=4)) == 4
    first, second = make_job("light", weight=light), make_job("light", weight=light)

    if not is_below:
        with pytest.raises(JobRefused):
            await functions.submit(first, make_submission(lane_bound_s=0.5))
        assert (await functions.submit(first, make_submission())).position.eta_s == 4.0
        return
    quote = await functions.quote(first, make_submission(lane_bound_s=0.5))
    assert (quote.refusal, quote.position.eta_s) == (None, 0.0)
    submitted = await functions.submit(first, make_submission(lane_bound_s=0.5))
    assert submitted.position.eta_s == 0.0
    await functions.submit(second, make_submission())
    for job, eta_s in ((first, 0.0), (second, 4.0)):
        found = await functions.read(job.id, "light")
        assert found is not None
        assert found[0].position is not None
        assert (found[0].position.eta_s == 0.0) == (eta_s == 0.0), found[0].position


async def test_a_cold_start_does_not_count_against_the_lane_s_bound(functions: Functions) -> None:
    """Otherwise a pool that starts on demand would never start. Jobs ahead in the queue still
    count."""
    await beat(functions, WorkerCapacity(tokens_per_s=13.0, max_jobs=1, lanes=("standard",)))
    await functions.heartbeat("w1", "m", [], lease_s=10, info="{}", state="gone")
    terms = {"lane_bound_s": 2.5, "cold_start_s": 40.0}
    for _ in range(3):
        last = await functions.submit(make_job(), make_submission(**terms))
    assert last.position.eta_s == 42.0
    assert (await refusal(functions, **terms)).limit == "lane_wait"


@pytest.mark.parametrize(("max_jobs", "max_tokens"), [(3, 1000), (1000, 30)])
async def test_before_a_rate_is_measured_as_much_may_wait_as_workers_hold(
    functions: Functions, max_jobs: int, max_tokens: int
) -> None:
    """Three jobs, or 30 tokens. Then a bound in seconds refuses the next job for ten seconds, until
    a second worker adds as much again. Without a bound no job is refused."""
    capacity = WorkerCapacity(max_jobs=max_jobs, max_tokens=max_tokens, lanes=("standard",))
    await beat(functions, capacity)
    for _ in range(3):
        await functions.submit(make_job(), make_submission(lane_bound_s=1.0))
    refused = await refusal(functions, lane_bound_s=1.0)
    assert (refused.limit, refused.retry_after_s) == ("lane_wait", 10.0)
    await functions.submit(make_job(), make_submission())
    await functions.heartbeat("w2", "m", [], lease_s=10, info="{}", capacity=capacity)
    await functions.submit(make_job(), make_submission(lane_bound_s=1.0))


async def test_a_flood_on_one_model_refuses_nobody_of_another(functions: Functions) -> None:
    """Lanes, their bounds and rates, and places are each model's own."""
    capacity = WorkerCapacity(tokens_per_s=13.0, max_jobs=1, max_tokens=20, lanes=("standard",))
    await beat(functions, capacity)
    await functions.heartbeat("w2", "n", [], lease_s=10, info="{}", capacity=capacity)
    terms = {"lane_bound_s": 2.5, "lane_bound_tokens": 100}
    for _ in range(3):
        await functions.submit(make_job(), make_submission(**terms))
    for _ in range(50):
        assert (await refusal(functions, **terms)).code is ErrorCode.LANE_FULL
    other = structs.replace(make_job(), model="n")
    submitted = await functions.submit(other, make_submission(**terms))
    assert (submitted.position.num_jobs_ahead, submitted.position.eta_s) == (0, 0.0)
