"""Jobs that wait in the engine of a full worker go on at one that has room."""

from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from contract.events import Tokens
from contract.functions import Functions
from contract.jobs import Job
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions, expected_output
from tests.fleet import Caller, fleet, until
from tests.workers.test_supervisor import assert_exact

pytestmark = pytest.mark.anyio

NUM_PLACES = 4
MODEL = HashModelOptions(num_blocks=1024, max_model_len=2048, step_s=0.02, eos_rate=0.0)
BATCHING = f"max_num_seqs: {NUM_PLACES}\n"
LANES = """lanes:
  interactive: {priority: 0}
  batch: {priority: 2, minimum_share: 0}
"""


@pytest.fixture
def caller(functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys) -> Caller:
    return Caller(functions, redis_client, keys)


@pytest.fixture
def batching(tmp_path: Path) -> str:
    path = tmp_path / "batching.yaml"
    path.write_text(BATCHING + LANES)
    return str(path)


async def displaced(caller: Caller, num_jobs: int) -> tuple[list[Job], list[Job]]:
    """Batch jobs that run, and then as many long urgent ones in their places."""
    jobs: dict[str, list[Job]] = {"batch": [], "interactive": []}
    for lane, num_tokens in (("batch", 200), ("interactive", 1900)):
        for number in range(num_jobs):
            prompt = f"{lane} {number}"
            jobs[lane].append(await caller.submit(prompt, lane=lane, max_tokens=num_tokens))
        for job in jobs[lane]:
            await caller.has_output(job)
    return jobs["batch"], jobs["interactive"]


async def num_runs(caller: Caller, jobs: list[Job]) -> list[int]:
    return [len((await caller.view(job)).runs) for job in jobs]


async def offers_of(caller: Caller, lane: str) -> dict[bytes, float]:
    key = caller.keys.of("offers", "m", lane)
    rows: Any = await caller.client.zrange(key, 0, -1, withscores=True)
    return dict(rows)


@pytest.mark.e2e
async def test_displaced_jobs_go_on_at_a_worker_that_comes_up(
    caller: Caller, redis_server: EmbeddedRedis, batching: str
) -> None:
    """No token is lost or repeated, no attempt counted, and the urgent jobs stay where they are."""
    settings = {"batching_path": batching}
    async with fleet(redis_server.url, 1, MODEL, **settings):
        waiting, urgent = await displaced(caller, NUM_PLACES)
        async with fleet(redis_server.url, 1, MODEL, **settings):
            for job in waiting:
                assert_exact(job, await caller.answer(job), MODEL)
                view = await caller.view(job)
                first, second = [run.worker for run in view.runs]
                assert (first != second, view.attempt) == (True, 1)
            assert await num_runs(caller, urgent) == [1] * NUM_PLACES
            for job in urgent:
                tokens = [e.event for e in await caller.entries(job) if isinstance(e.event, Tokens)]
                found = [token_id for event in tokens for token_id in event.deltas[0].token_ids]
                expected, _ = expected_output(
                    job.prompt_ids, job.params, max_model_len=2048, eos_rate=0.0
                )
                assert found == expected[: len(found)]
                await caller.functions.cancel(job.id, caller.tenant)


@pytest.mark.e2e
@pytest.mark.parametrize("expected_tokens", [0, 300])
async def test_jobs_that_lack_kv_blocks_go_on_at_a_worker_that_comes_up(
    caller: Caller, redis_server: EmbeddedRedis, expected_tokens: int
) -> None:
    """There are places for both. Two of unknown length run, until one is preempted."""
    model = HashModelOptions(num_blocks=32, step_s=0.04, eos_rate=0.0)
    params: dict[str, Any] = {"max_tokens": 300, "expected_tokens": expected_tokens}
    async with fleet(redis_server.url, 1, model):
        jobs = [await caller.submit("a" * 180, **params)]
        await caller.has_output(jobs[0])
        jobs.append(await caller.submit("b" * 180, **params))

        async def is_offered() -> bool:
            return bool(await offers_of(caller, "standard"))

        await until(is_offered)
        async with fleet(redis_server.url, 1, model):
            for job in jobs:
                assert_exact(job, await caller.answer(job), model)
            assert await num_runs(caller, jobs) == [1, 2]


@pytest.mark.e2e
async def test_no_job_leaves_where_no_other_worker_has_room(
    caller: Caller, redis_server: EmbeddedRedis, batching: str
) -> None:
    """All are offered, several times, and none is taken. Once there is room, all end."""
    num_jobs = 2 * NUM_PLACES
    async with fleet(redis_server.url, 2, MODEL, batching_path=batching):
        await caller.num_workers(2)
        waiting, urgent = await displaced(caller, num_jobs)
        first: dict[bytes, float] = {}

        async def offered_again() -> bool:
            nonlocal first
            offers = await offers_of(caller, "batch")
            if len(offers) == num_jobs and not first:
                first = offers
            return bool(first) and all(
                offers.get(o, 0.0) > until_ms for o, until_ms in first.items()
            )

        await until(offered_again)
        assert await num_runs(caller, waiting + urgent) == [1] * (2 * num_jobs)
        for job in urgent:
            await caller.functions.cancel(job.id, caller.tenant)
        for job in waiting:
            assert_exact(job, await caller.answer(job), MODEL)
