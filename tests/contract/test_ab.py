"""Two batching configurations on one model's jobs: assignment, claims by arm, what is kept."""

import json
from collections import Counter
from typing import Any

import pytest
import redis.asyncio

from contract.ab import AbJob, read_ab
from contract.function_types import Append, Release
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from infra.check_command import differences
from tests.contract.some_calls import LEASE_S, append, make_job, make_submission, pass_time, tokens

pytestmark = pytest.mark.anyio

CONTROL, CANDIDATE = "aaaa", "bbbb"
LIVE_S = 15.0  # from a heartbeat on, an arm counts as live


async def beat(functions: Functions, version: str, share: float | None = None) -> None:
    """A heartbeat of a worker of one arm; only the candidate's has a share."""
    said: dict[str, object] = {"batching": version}
    if share is not None:
        said["candidate_share"] = share
    await functions.heartbeat(version, "m", [], lease_s=LEASE_S, info=json.dumps(said))


async def start(functions: Functions, share: float = 0.5) -> None:
    await beat(functions, CANDIDATE, share)
    await beat(functions, CONTROL)


async def submit(functions: Functions, num: int, tenant: str = "t") -> None:
    for _ in range(num):
        await functions.submit(make_job(tenant), make_submission())


async def claim(functions: Functions, version: str, max_jobs: int = 1000) -> list[tuple[str, int]]:
    """Claims as a worker of an arm. Returns ids and epochs."""
    claimed = await functions.claim(
        version,
        "m",
        ["standard"],
        lease_s=LEASE_S,
        max_jobs=max_jobs,
        max_tokens=10**6,
        config_version=version + " candidate" * (version == CANDIDATE),
    )
    return [(job.job.id, job.epoch) for job in claimed]


async def arm_of(client: redis.asyncio.Redis, keys: Keys, job_id: str) -> str:
    raw: Any = await client.hget(keys.of("job", job_id), "arm")
    return "" if raw is None else str(raw.decode())


async def test_each_arm_claims_the_jobs_assigned_to_it(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """A hash of the id divides the jobs by the share. Neither arm claims the other's."""
    await start(functions, share=0.25)
    await submit(functions, 200)
    mine = [job_id for job_id, _ in await claim(functions, CANDIDATE)]
    theirs = [job_id for job_id, _ in await claim(functions, CONTROL)]
    assert len(mine) + len(theirs) == 200
    assert 30 <= len(mine) <= 70  # within 3.3 standard deviations of 50
    arms = Counter([await arm_of(redis_client, keys, job_id) for job_id in (*mine, *theirs)])
    assert arms == {f"candidate {CANDIDATE}": len(mine), f"control {CONTROL}": len(theirs)}


async def test_a_slow_arm_does_not_hide_the_jobs_of_the_other(functions: Functions) -> None:
    """However many of its jobs wait in front, and in however many tenants' queues."""
    await start(functions)
    for number in range(100):
        await submit(functions, 2, tenant=f"t{number}")
    await submit(functions, 60, tenant="t0")
    num_control = 0
    while claimed := await claim(functions, CONTROL, max_jobs=3):
        num_control += len(claimed)
    assert num_control + len(await claim(functions, CANDIDATE)) == 260


async def test_without_two_live_arms_no_job_is_assigned(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """A candidate alone serves everything, as a worker without an A/B does."""
    await beat(functions, CANDIDATE, 0.5)
    await submit(functions, 4)
    claimed = await claim(functions, CANDIDATE)
    assert [await arm_of(redis_client, keys, job_id) for job_id, _ in claimed] == [""] * 4


@pytest.mark.parametrize("survivor", [CONTROL, CANDIDATE])
async def test_the_jobs_of_an_arm_without_workers_go_to_the_other(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys, survivor: str
) -> None:
    """No job waits for a worker that does not come back."""
    await start(functions)
    await submit(functions, 40)
    num_own = len(await claim(functions, survivor))
    assert 0 < num_own < 40
    await pass_time(redis_client, keys, LIVE_S - 5)
    await beat(functions, survivor, 0.5 if survivor == CANDIDATE else None)
    assert await claim(functions, survivor) == []
    await pass_time(redis_client, keys, 6)
    assert len(await claim(functions, survivor)) == 40 - num_own


async def test_a_returned_job_may_go_to_either_arm(functions: Functions) -> None:
    """It stays assigned as it was; its sample says who served it."""
    await start(functions)
    await submit(functions, 20)
    claimed = await claim(functions, CANDIDATE)
    await functions.release(CANDIDATE, [Release(*job, "drain") for job in claimed])
    assert len(await claim(functions, CONTROL)) == 20


async def test_a_job_that_waits_in_an_engine_stays_with_its_arm(functions: Functions) -> None:
    """Also if a worker of either arm has room."""
    await start(functions)
    await submit(functions, 20)
    claimed = await claim(functions, CANDIDATE)
    await functions.release(CANDIDATE, [Release(*job, "offer") for job in claimed])
    await claim(functions, CONTROL)
    assert await claim(functions, CONTROL) == []
    assert await functions.heartbeat(CANDIDATE, "m", claimed, lease_s=LEASE_S, info="{}") == []


async def test_a_job_that_changes_its_lane_keeps_its_arm(functions: Functions) -> None:
    """It waits in the other lane for workers of the same arm."""
    await start(functions)
    jobs = [make_job(lane="batch") for _ in range(20)]
    for job in jobs:
        await functions.submit(job, make_submission())
        await functions.reprioritise(job.id, job.tenant, lane="standard")
    num_control = len(await claim(functions, CONTROL))
    assert 0 < num_control < 20
    assert num_control + len(await claim(functions, CANDIDATE)) == 20


async def test_the_check_finds_nothing_wrong_in_either_arm(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Counters and lists include the jobs of both; what a lost stream of the candidate's held is
    shown."""
    await start(functions)
    await submit(functions, 40)
    assert len(await claim(functions, CONTROL, max_jobs=5)) == 5
    assert await differences(redis_client, keys) == {}
    await redis_client.delete(keys.of("q", "m", "standard", "t candidate"))
    found = await differences(redis_client, keys)
    assert {key for key, _ in found} == {"q:m:standard:t candidate"}


async def test_the_oldest_wait_is_of_both_arms(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """The control may have served all of its own."""
    await start(functions)
    await submit(functions, 20)
    await claim(functions, CONTROL)
    await pass_time(redis_client, keys, 3)
    found = await functions.snapshot("m", ["standard"])
    assert found.lanes["standard"].oldest_wait_s == pytest.approx(3, abs=0.5)


async def test_an_ended_job_leaves_sizes_and_times_without_text(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """In milliseconds of the Redis clock, with the version that served it."""
    await start(functions, share=1.0)
    await submit(functions, 1)
    await pass_time(redis_client, keys, 1)
    [(job_id, epoch)] = await claim(functions, CANDIDATE)
    await pass_time(redis_client, keys, 2)
    await append(functions, CANDIDATE, Append(job_id, epoch, 1, tokens(0, 1), 1))
    await pass_time(redis_client, keys, 3)
    await append(
        functions, CANDIDATE, Append(job_id, epoch, 2, tokens(1, 2, 3), 2, JobStatus.SUCCEEDED)
    )
    found = await read_ab(redis_client, keys, "m")
    assert found is not None
    assert found.versions == {"control": CONTROL, "candidate": CANDIDATE}
    assert (found.share, found.num_open) == (1.0, {"control": 0, "candidate": 0})
    assert found.num_workers == {"control": 1, "candidate": 1}
    [job] = found.jobs
    assert (job.arm, job.version, job.served_by) == ("candidate", CANDIDATE, CANDIDATE)
    assert (job.lane, job.status, job.num_attempts) == ("standard", JobStatus.SUCCEEDED, 1)
    assert (job.num_prompt_tokens, job.num_output_tokens) == (3, 3)
    assert job.ttft_s == pytest.approx(3, abs=0.2)
    assert job.itl_s == pytest.approx(1.5, abs=0.1)
    assert job.e2e_s == pytest.approx(6, abs=0.2)


async def test_counts_by_version_are_bounded(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """With a ninth version, all but the present two are dropped."""
    await start(functions)
    for number in range(9):
        await beat(functions, f"c{number}", 0.99)
        await submit(functions, 3)
    totals: Any = await redis_client.hgetall(keys.of("totals", "m"))
    names = {name.decode().split(":")[1] for name in totals if name.startswith(b"config_")}
    assert "c8" in names
    assert len(names) <= 8


async def test_a_malformed_status_is_no_arm(functions: Functions) -> None:
    """Whatever a heartbeat says of itself, it renews leases."""
    for info in ("", "[]", "null", "{", '{"candidate_share": "x"}', '{"batching": 5}'):
        assert await functions.heartbeat("w", "m", [], lease_s=LEASE_S, info=info) == []


def test_a_job_without_output_has_no_latencies() -> None:
    """It expired while it waited."""
    job = AbJob("control", "a", "", "batch", JobStatus.EXPIRED, 3, 0, 1, 0, 1000, 0, 0, 9000)
    assert (job.ttft_s, job.itl_s, job.e2e_s) == (None, None, 8.0)
