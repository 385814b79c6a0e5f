"""Two batching configurations on one model's jobs: assignment, claims by arm, what is kept."""

import json
from collections import Counter
from typing import Any

import pytest
import redis.asyncio

from contract.ab import AbJob, read_ab
from contract.function_types import Append
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from infra.check_command import differences
from tests.contract.conftest import on_one_server
from tests.contract.some_calls import LEASE_S, append, make_job, make_submission, pass_time, tokens
from tests.oracle.scripts import Calls, scripts
from tests.oracle.world import LANES, World

pytestmark = pytest.mark.anyio

CONTROL, CANDIDATE = "aaaa", "bbbb"


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


class ArmCalls(Calls):
    """Of two workers, `a` with the control and `b` with the candidate."""

    def live(self, *arms: str) -> None:
        for arm in arms:
            share = {"candidate_share": 0.5} if arm == "b" else {}
            self._world.beat(arm, info=json.dumps({"batching": arm, **share}))

    def take(self, arm: str) -> list[str]:
        version = f"{arm} candidate" if arm == "b" else arm
        return self._world.claim(arm, config_version=version)

    def oldest_s(self) -> float:
        found = self._world.run(self._world.functions.snapshot("m", LANES))
        return found.lanes[LANES[0]].oldest_wait_s


@on_one_server
@scripts("""
a candidate alone serves all, and nothing is assigned
  live b; submit t0 t1; take b -> t0 t1
  field t0 arm -> None
a job is assigned by a hash of its id
  live b a; submit t0 t1 t2 t3; field t0 arm -> control a
  field t1 arm -> candidate b
  take a -> t0 t2
  take b -> t1 t3
jobs of an arm without workers go to the candidate
  live b a; submit t0 t1 t2 t3; pass_time 10; live b; take b -> t1 t3
  take b -> -
  pass_time 6; take b -> t0 t2
  live b; submit t4; field t4 arm -> None
jobs of an arm without workers go to the control
  live b a; submit t0 t1 t2 t3; pass_time 10; live a; take a -> t0 t2
  take a -> -
  pass_time 6; take a -> t1 t3
a returned job may go to either arm, and stays assigned
  live b a; submit t0 t1; take b; release t1 drain b; take a -> t1 t0
  field t1 arm -> candidate b
a job that waits in an engine stays with its arm
  live b a; submit t0 t1; take b; release t1 offer b; take a -> t0
  take a -> -
  beat b -> -
a job that changes its lane keeps its arm
  live b a; submit t0 t1 t2 t3 lane=batch; move t0 interactive; move t1 interactive
  take a -> t0 t2
  take b -> t1 t3
the oldest wait is of both arms
  live b a; submit t0 t1; take a; pass_time 3; oldest_s -> 3.0
""")
def test_an_arm_gets_its_jobs(world: World, script: list[str]) -> None:
    ArmCalls(world).run(script)


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
