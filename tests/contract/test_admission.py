"""Admission on a real Redis: exact quotas over many gateways, predicted waits, and fair shares.
The tables of decisions are in tests/oracle; these tests check the promises to users.

Over 300 lines: a test for each bound of admission.
"""

import asyncio
import sys
from typing import Any

import pytest
import redis.asyncio
from msgspec import structs

from contract.errors import ErrorCode, JobRefused
from contract.function_types import Append, TenantLimits, WorkerCapacity
from contract.functions import Functions
from contract.jobs import Job, JobStatus
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.clock import clock_key
from tests.contract.some_calls import (
    append,
    claim,
    make_job,
    make_submission,
    pass_time,
    tokens,
)
from tests.contract.submitter import COST, hammer

pytestmark = pytest.mark.anyio

MAX_PASSED = 8  # of contract/lua/_queue.lua

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


async def test_a_refused_job_leaves_nothing_behind(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """No record, no idempotency key, no charge: the same call counts as new when it is repeated."""
    limits = TenantLimits(requests_per_min=1)
    await functions.submit(make_job(), make_submission(limits=limits))
    before = {
        await redis_client.hget(keys.of("tenant", "t"), name) for name in ("requests", "reserved")
    }
    again = make_submission(limits=limits, idempotency_key="k", body_hash="b")
    with pytest.raises(JobRefused):
        await functions.submit(make_job(), again)

    assert not await redis_client.exists(keys.of("idem", "t", "k"))
    after = {
        await redis_client.hget(keys.of("tenant", "t"), name) for name in ("requests", "reserved")
    }
    assert after == before
    await pass_time(redis_client, keys, 60)
    assert (await functions.submit(make_job(), again)).is_new


async def test_a_rate_limit_reports_exactly_when_it_has_room(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """60 requests at once are within a limit of 60 per minute; the next must wait exactly one
    second."""
    await redis_client.set(clock_key(), "=1700000000000")
    limits = TenantLimits(requests_per_min=60)
    for left in reversed(range(60)):
        submitted = await functions.submit(make_job(), make_submission(limits=limits))
        assert submitted.rates.requests is not None
        assert submitted.rates.requests.remaining == left
    refused = await refusal(functions, limits=limits)
    assert (refused.limit, refused.retry_after_s) == ("requests_per_min", 1.0)
    await redis_client.set(clock_key(), "=1700000000999")
    await refusal(functions, limits=limits)
    await redis_client.set(clock_key(), "=1700000001000")
    await functions.submit(make_job(), make_submission(limits=limits))


async def test_unused_cost_is_refunded(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """13 tokens are reserved and 5 are used: 8 return to the rate limit, and all 13 to the
    reservation."""
    await redis_client.set(clock_key(), "=1700000000000")
    limits = TenantLimits(tokens_per_min=100, concurrent_tokens=100)
    job = make_job()
    await functions.submit(job, make_submission(limits=limits))
    assert await redis_client.hget(keys.of("tenant", "t"), "reserved") == b"13"
    await functions.claim("w1", "m", ["standard"], lease_s=10, max_jobs=1, max_tokens=99)
    await append(functions, "w1", Append(job.id, 1, 1, tokens(0, 7, 8), 2, JobStatus.SUCCEEDED))

    figures: Any = await redis_client.hmget(keys.of("tenant", "t"), "tokens", "reserved")
    assert [float(figure) for figure in figures] == [5.0, 0.0]
    assert await redis_client.hmget(keys.of("job", job.id), "cost", "charge", "refund") == [
        b"13",
        b"5",
        b"8",
    ]


async def test_waits_come_from_the_measured_rate(functions: Functions) -> None:
    """130 waiting tokens at 13 per second take ten seconds. The lane's bound, the deadline and the
    ETA use this figure."""
    unknown = (await functions.submit(make_job(), make_submission())).position
    assert unknown.eta_s is not None  # nothing is ahead, but no worker lives: a cold start
    await beat(functions, WorkerCapacity(tokens_per_s=13.0, lanes=("standard",)))
    jobs = [make_job() for _ in range(10)]
    for job in jobs:
        last = await functions.submit(job, make_submission())
    assert (last.position.num_jobs_ahead, last.position.eta_s) == (10, 10.0)
    found = await functions.read(jobs[-1].id, "t")
    assert found is not None
    assert found[0].position == last.position

    late = await functions.quote(make_job(), make_submission(deadline_s=10.0))
    assert late.refusal is not None
    assert late.refusal.code is ErrorCode.DEADLINE_INFEASIBLE
    assert (late.position.eta_s, late.refusal.retry_after_s) == (11.0, 1.0)
    bound = await refusal(functions, lane_bound_s=8.0)
    assert (bound.code, bound.retry_after_s) == (ErrorCode.LANE_FULL, 3.0)


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


async def test_the_predicted_wait_respects_weights(functions: Functions) -> None:
    """Two jobs of the same tenant wait before its third, and four of a tenant with twice the
    weight."""
    for _ in range(8):
        await functions.submit(make_job("u", weight=2.0), make_submission())
    for num_ahead in (0, 3, 6):
        found = await functions.submit(make_job("t"), make_submission())
        assert found.position.num_jobs_ahead == num_ahead


async def test_without_a_worker_the_wait_includes_the_cold_start(functions: Functions) -> None:
    """The first job waits until a worker has started. If a submission requires a running worker, it
    is refused."""
    submitted = await functions.submit(make_job(), make_submission(cold_start_s=40.0))
    assert submitted.position.eta_s == 40.0
    assert (await refusal(functions, needs_worker=True)).code is ErrorCode.NO_WORKERS


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


async def test_an_unknown_lane_is_refused_by_name(functions: Functions) -> None:
    """The message lists the known lanes."""
    await beat(functions, WorkerCapacity(lanes=("fast", "slow")))
    refused = await refusal(functions)
    assert refused.code is ErrorCode.UNKNOWN_LANE
    assert "fast, slow" in refused.message


async def test_short_jobs_go_before_a_long_one_eight_times(functions: Functions) -> None:
    """A job that does not fit does not block others, and is passed a limited number of times."""
    long = make_job()
    await functions.submit(long, make_submission(max_output_tokens=500))
    for _ in range(MAX_PASSED + 3):
        await functions.submit(make_job(), make_submission())

    async def claimed(max_tokens: int) -> list[str]:
        found = await functions.claim(
            "w1", "m", ["standard"], lease_s=10, max_jobs=1, max_tokens=max_tokens
        )
        return [item.job.id for item in found]

    for _ in range(MAX_PASSED):
        [short] = await claimed(100)
        assert short != long.id
    assert await claimed(100) == []
    assert await claimed(1000) == [long.id]
    assert len(await claimed(100)) == 1


def with_choices(num_prompts: int, n: int) -> Job:
    """A job with prompts of three tokens each."""
    job = make_job()
    params = structs.replace(job.params, n=n)
    if num_prompts == 1:
        return structs.replace(job, params=params)
    return structs.replace(
        job, params=params, prompt_ids=(), prompt_list=(job.prompt_ids,) * num_prompts
    )


async def test_a_claim_fills_a_place_for_each_choice(functions: Functions) -> None:
    """A job with 2 prompts and n = 2 takes four of five places. The next job gets the last place
    although it has more choices: the rest wait in the engine, as those of a job larger than any
    worker do."""
    for job in (with_choices(2, 2), with_choices(8, 1), with_choices(1, 1)):
        await functions.submit(job, make_submission())
    sizes = [
        [item.job.num_choices for item in await claim(functions, max_jobs=5)] for _ in range(2)
    ]
    assert sizes == [[4, 8], [1]]


async def test_a_job_fits_if_one_of_its_choices_fits(functions: Functions) -> None:
    """A list larger than any worker does not wait for an empty worker, and no job passes it."""
    large, small = with_choices(8, 1), with_choices(1, 1)
    await functions.submit(large, make_submission(max_output_tokens=80))
    await functions.submit(small, make_submission())
    assert await claim(functions, max_tokens=12) == []
    assert [item.job.id for item in await claim(functions, max_tokens=13)] == [large.id]
    assert [item.job.id for item in await claim(functions, max_tokens=13)] == [small.id]


async def test_output_is_predicted_for_each_choice(functions: Functions) -> None:
    """After jobs whose four choices had two tokens each, two tokens are predicted for one choice
    and six for three prompts, up to the cap."""
    for _ in range(5):
        job = with_choices(2, 2)
        await functions.submit(job, make_submission(max_output_tokens=40))
        await claim(functions)
        event = tokens(0, *range(8))
        await append(functions, "w1", Append(job.id, 1, 1, event, 8, JobStatus.SUCCEEDED))
    quotes = [
        await functions.quote(with_choices(num_prompts, 1), make_submission(max_output_tokens=cap))
        for num_prompts, cap in ((1, 10), (3, 30), (3, 5))
    ]
    assert [quote.cost_tokens for quote in quotes] == [3 + 2, 9 + 6, 9 + 5]
