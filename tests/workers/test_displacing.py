"""A worker full of batch jobs displaces some for urgent jobs: over Redis, supervisor and engine."""

from pathlib import Path

import pytest
import redis.asyncio

from contract.functions import Functions
from contract.jobs import Job
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions
from tests.fleet import Caller, fleet
from tests.workers.test_supervisor import assert_exact

pytestmark = [pytest.mark.anyio, pytest.mark.e2e]

NUM_PLACES = 4
SLOW = HashModelOptions(num_blocks=256, step_s=0.02, eos_rate=0.0)
BATCHING = f"""
max_num_seqs: {NUM_PLACES}
lanes:
  interactive: {{priority: 0}}
  batch: {{priority: 2, minimum_share: 0.2}}
"""
NUM_OUT = 150


@pytest.fixture
def caller(functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys) -> Caller:
    return Caller(functions, redis_client, keys)


@pytest.fixture
def batching(tmp_path: Path) -> str:
    """The worker's batching.yaml, with its lanes and its number of places."""
    path = tmp_path / "batching.yaml"
    path.write_text(BATCHING)
    return str(path)


async def fill(caller: Caller) -> list[Job]:
    """Runs batch jobs in all places until each has output."""
    jobs = [
        await caller.submit(f"soak {number}", lane="batch", max_tokens=NUM_OUT)
        for number in range(NUM_PLACES)
    ]
    for job in jobs:
        await caller.has_output(job)
    return jobs


async def end_ms(caller: Caller, job: Job) -> int:
    """Waits for the job's end and returns its time on the clock of Redis."""
    assert_exact(job, await caller.answer(job), SLOW)
    finished_ms = (await caller.view(job)).finished_ms
    assert finished_ms is not None
    return finished_ms


async def test_an_urgent_job_does_not_wait_for_a_batch_job_s_end(
    caller: Caller, redis_server: EmbeddedRedis, batching: str
) -> None:
    """All places are taken. It ends before any batch job, and the output of all jobs is
    complete."""
    async with fleet(redis_server.url, 1, SLOW, batching_path=batching):
        soaking = await fill(caller)
        urgent = await caller.submit("now", lane="interactive", max_tokens=5)
        urgent_ms = await end_ms(caller, urgent)
        assert urgent_ms < min([await end_ms(caller, job) for job in soaking])


async def test_batch_keeps_its_share_under_an_urgent_flood(
    caller: Caller, redis_server: EmbeddedRedis, batching: str
) -> None:
    """Three urgent jobs, longer than those of batch, run at once. They cannot take the place of
    batch's share, so its job ends before them, and the fourth urgent job waits for another urgent
    job."""
    async with fleet(redis_server.url, 1, SLOW, batching_path=batching):
        soaking = await fill(caller)
        flood = [
            await caller.submit(f"flood {number}", lane="interactive", max_tokens=NUM_OUT + 50)
            for number in range(NUM_PLACES - 1)
        ]
        for job in flood:
            await caller.has_output(job)
        last = await caller.submit("last", lane="interactive", max_tokens=5)
        flood_ms = min([await end_ms(caller, job) for job in flood])
        await end_ms(caller, last)
        assert min([await end_ms(caller, job) for job in soaking]) < flood_ms
        first_token_ms = (await caller.view(last)).first_token_ms
        assert first_token_ms is not None
        assert first_token_ms >= flood_ms
