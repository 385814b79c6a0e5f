"""Who gets the places of full workers: urgent jobs, what arrives in a last step, and, at a worker
that comes up, jobs that wait in another's engine. Over Redis, supervisor and engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contract.events import Tokens
from contract.jobs import Job
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions, expected_output
from tests.fleet import Caller, fleet, until
from tests.workers.test_supervisor import assert_exact

pytestmark = [pytest.mark.anyio, pytest.mark.e2e]

NUM_PLACES = 4
MODEL = HashModelOptions(num_blocks=1024, max_model_len=2048, step_s=0.02, eos_rate=0.0)
NUM_OUT = 150
Batching = Callable[..., str]


@pytest.fixture
def batching(tmp_path: Path) -> Batching:
    """Writes a worker's batching.yaml, with its number of places and its lanes."""

    def write(num_places: int, **lanes: str) -> str:
        path = tmp_path / "batching.yaml"
        text = "".join(f"  {name}: {{{terms}}}\n" for name, terms in lanes.items())
        path.write_text(f"max_num_seqs: {num_places}\nlanes:\n{text}")
        return str(path)

    return write


async def run(caller: Caller, lane: str, number: int, num_tokens: int) -> list[Job]:
    """Jobs of a lane, each of which has output."""
    jobs = [
        await caller.submit(f"{lane} {each}", lane=lane, max_tokens=num_tokens)
        for each in range(number)
    ]
    for job in jobs:
        await caller.has_output(job)
    return jobs


async def end_ms(caller: Caller, job: Job) -> int:
    """Waits for the job's end and returns its time on the clock of Redis."""
    assert_exact(job, await caller.answer(job), MODEL)
    finished_ms = (await caller.view(job)).finished_ms
    assert finished_ms is not None
    return finished_ms


async def num_runs(caller: Caller, jobs: list[Job]) -> list[int]:
    return [len((await caller.view(job)).runs) for job in jobs]


async def test_urgent_jobs_take_all_places_but_the_share_of_batch(
    caller: Caller, redis_server: EmbeddedRedis, batching: Batching
) -> None:
    """One does not wait for a batch job's end. Of more that are longer than those of batch, three
    run at once; they cannot take the place of batch's share, so its job ends before them, and the
    fourth waits for one of them. The output of all is complete."""
    path = batching(NUM_PLACES, interactive="priority: 0", batch="priority: 2, minimum_share: 0.2")
    async with fleet(redis_server.url, 1, MODEL, batching_path=path):
        soaking = await run(caller, "batch", NUM_PLACES, NUM_OUT)
        urgent = await caller.submit("now", lane="interactive", max_tokens=5)
        urgent_ms = await end_ms(caller, urgent)
        flood = await run(caller, "interactive", NUM_PLACES - 1, NUM_OUT + 50)
        last = await caller.submit("last", lane="interactive", max_tokens=5)
        flood_ms = min([await end_ms(caller, job) for job in flood])
        await end_ms(caller, last)
        assert urgent_ms < min([await end_ms(caller, job) for job in soaking]) < flood_ms
        first_token_ms = (await caller.view(last)).first_token_ms
        assert first_token_ms is not None
        assert first_token_ms >= flood_ms


async def test_a_job_claimed_in_the_last_step_joins_the_next(
    caller: Caller, redis_server: EmbeddedRedis, batching: Batching
) -> None:
    """The one place holds a job in its last step, and another job waits. A job of a lane claimed
    earlier gets the place, although it arrived during that step."""
    slow = HashModelOptions(num_blocks=64, step_s=1.0, eos_rate=0.0)
    path = batching(1, first="priority: 1", second="priority: 1")
    async with fleet(redis_server.url, 1, slow, batching_path=path):
        running = await caller.submit("runs", lane="first", max_tokens=2)
        waiting = await caller.submit("waits", lane="second", max_tokens=1)
        await caller.has_output(running)
        late = await caller.submit("comes late", lane="first", max_tokens=1)
        for job in (running, waiting, late):
            assert_exact(job, await caller.answer(job), slow)
        [late_ms, waiting_ms] = [(await caller.view(job)).finished_ms for job in (late, waiting)]
        assert late_ms is not None
        assert waiting_ms is not None
        assert late_ms < waiting_ms


async def test_displaced_jobs_go_on_at_a_worker_that_comes_up(
    caller: Caller, redis_server: EmbeddedRedis, batching: Batching
) -> None:
    """No token is lost or repeated, no attempt counted, and the urgent jobs stay where they are."""
    path = batching(NUM_PLACES, interactive="priority: 0", batch="priority: 2, minimum_share: 0")
    async with fleet(redis_server.url, 1, MODEL, batching_path=path):
        waiting = await run(caller, "batch", NUM_PLACES, 200)
        urgent = await run(caller, "interactive", NUM_PLACES, 1900)
        async with fleet(redis_server.url, 1, MODEL, batching_path=path):
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
            return await caller.client.zcard(caller.keys.of("offers", "m", "standard")) == 1

        await until(is_offered)
        assert await num_runs(caller, jobs) == [1, 1]
        async with fleet(redis_server.url, 1, model):
            for job in jobs:
                assert_exact(job, await caller.answer(job), model)
            assert await num_runs(caller, jobs) == [1, 2]
