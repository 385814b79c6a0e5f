"""Admission on a real Redis: exact quotas over many gateways, predicted waits, and fair shares.
The tables of decisions are in tests/oracle; these tests check the promises to users.
"""

import asyncio
import sys
from typing import Any

import pytest
from msgspec import structs

from contract.errors import ErrorCode, JobRefused
from contract.function_types import QueuePosition, TenantLimits, WorkerCapacity
from contract.functions import Functions
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.contract.conftest import on_one_server
from tests.contract.some_calls import make_job, make_submission
from tests.contract.submitter import COST, submit_from_many
from tests.oracle.scripts import Calls, scripts
from tests.oracle.world import World

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
    here = await submit_from_many(redis_server.url, keys, NUM_TASKS, NUM_TRIES, limits)
    there = [int((await other.communicate())[0]) for other in others]

    assert here + sum(there) == QUOTA_JOBS


@on_one_server
@scripts("""
an idle worker tries what earlier outputs predict too late, so that a faster step is seen
  beat rate=13 stream=1 jobs=1 tokens=13; outputs 8 8 8 8 8; quote t9 deadline_s=5 cap=10 -> OK
  service_s -> 8.0
and others before it are a reason
  beat rate=13 stream=1 jobs=1 tokens=13; outputs 8 8 8 8 8; submit t5 t6 cost=13
  move t5 deadline_s=4; move t6 deadline_s=4
  quote t9 deadline_s=5 cap=10 -> deadline_infeasible - None
a tenant below its share starts at once, and the second of its jobs does not
  beat rate=13 jobs=4 tokens=1000; eight_of h; place t1 lane_bound_s=0.5 cost=13 -> 0 0 0.0
  place t2 cost=13 -> 2 26 4.0
one that has too small a weight for a place waits
  beat rate=13 jobs=4 tokens=1000; eight_of h weight=4
  ask t1 lane_bound_s=0.5 cost=13 -> lane_full lane_wait 3.5
  place t1 cost=13 -> 0 0 4.0
one of the same weight has a place
  beat rate=13 jobs=4 tokens=1000; eight_of h weight=4
  place t1 lane_bound_s=0.5 cost=13 weight=4 -> 0 0 0.0
a cold start does not count against a lane's bound, but what is ahead does
  beat rate=13 jobs=1; beat state=gone
  submit t1 t2 t3 lane_bound_s=2.5 cold_start_s=40 cost=13; ahead -> 2 26 42.0
  submit t4 lane_bound_s=2.5 cold_start_s=40 cost=13 -> lane_full lane_wait 0.5
before a rate is measured as many jobs wait as workers hold
  beat jobs=3 tokens=1000; submit t1 t2 t3 lane_bound_s=1 -> new
  submit t4 lane_bound_s=1 -> lane_full lane_wait 10.0
  submit t4 -> new
  beat x jobs=3 tokens=1000; submit t5 lane_bound_s=1 -> new
or as many tokens
  beat jobs=1000 tokens=30; submit t1 t2 t3 lane_bound_s=1 cost=13 -> new
  submit t4 lane_bound_s=1 cost=13 -> lane_full lane_wait 10.0
  submit t4 cost=13 -> new
  beat x jobs=1000 tokens=30; submit t5 lane_bound_s=1 cost=13 -> new
""")
def test_predicted_waits(world: World, script: list[str]) -> None:
    AdmissionCalls(world).run(script)


class AdmissionCalls(Calls):
    """A worker with four places."""

    def eight_of(self, tenant: str, **terms: Any) -> None:
        """Jobs of which four run."""
        self._world.submit(*(f"{tenant}{n}" for n in range(8)), cost=13, **terms)
        assert len(self._world.claim(jobs=4)) == 4

    def service_s(self) -> float | None:
        """Of the last quote."""
        found: float | None = self._world.reply.service_s
        return found


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
    assert submitted.position == QueuePosition(0, 0, 0.0)
