"""An urgent flood over batch jobs on two workers with vLLM: it takes their places, no worker
hoards, and no job loses or repeats a token."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import redis

from infra.embedded_redis import EmbeddedRedis
from tests.e2e.questions import KEYS, MODEL
from tests.infra.stack import Stack, running_demo_stack
from tests.vllm_environment import vllm_arguments

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.anyio,
    pytest.mark.campaign,
    pytest.mark.long,  # two engines start, and run alone; tests of placing.py have the rule
    pytest.mark.timeout(600),
]

NUM_PLACES = 16  # of each worker
NUM_BATCH = 2 * NUM_PLACES
NUM_URGENT = 24  # more than one worker has places for
NUM_SEEDS = 4
BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Count from 1 to 300.",
    "ignore_eos": True,
    "temperature": 1,
    "max_tokens": 600,
}


@pytest.fixture
def vllm_stack(redis_server: EmbeddedRedis) -> Iterator[Stack]:
    arguments = (
        f"--redis-url={redis_server.url}",
        f"--namespace={KEYS.namespace}",
        "--workers=2",
        f"--max-num-seqs={NUM_PLACES}",
    )
    with running_demo_stack(*arguments, *vllm_arguments()) as stack:
        yield stack


def held(view: redis.Redis) -> list[set[str]]:
    """The ids of the jobs that each worker holds, at one moment."""
    incarnations: Any = view.zrange(KEYS.of("workers", MODEL), 0, -1)
    with view.pipeline(transaction=True) as moment:
        for incarnation in incarnations:
            moment.smembers(KEYS.of("own", incarnation.decode()))
        return [{job_id.decode() for job_id in found} for found in moment.execute()]


def num_ready(url: str) -> int:
    """The number of workers that are ready."""
    found: int = httpx.get(f"{url}/readyz").json()["workers"].get(MODEL, 0)
    return found


async def submit(http: httpx.AsyncClient, tier: str, **fields: Any) -> str:
    body = {**BODY, "service_tier": tier, **fields}
    answer = await http.post("/v1/jobs", json={"endpoint": "/v1/completions", "body": body})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def job_of(http: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    job: dict[str, Any] = (await http.get(f"/v1/jobs/{job_id}")).json()
    return job


async def result_of(http: httpx.AsyncClient, job_id: str) -> tuple[str, int]:
    """The whole text of a job and its number of tokens, once it has ended."""
    await http.get(f"/v1/jobs/{job_id}/events")
    job = await job_of(http, job_id)
    assert job["status"] == "succeeded", job
    return job["result"]["choices"][0]["text"], job["usage"]["completion_tokens"]


def has(view: redis.Redis, job_id: str, field: str) -> bool:
    return bool(view.hget(KEYS.of("job", job_id), field))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110 - another process sets no event here
            await asyncio.sleep(0.01)


async def test_an_urgent_flood_takes_places_on_vllm_and_no_worker_hoards(
    vllm_stack: Stack, redis_view: redis.Redis
) -> None:
    """No worker ever holds more urgent jobs than it has places, and each batch job has the text of
    an undisturbed one. (How long the urgent ones wait is measured by bench.batches.)"""
    async with httpx.AsyncClient(base_url=vllm_stack.url, timeout=300) as http:
        await until(lambda: num_ready(vllm_stack.url) == 2)  # else one ends its jobs meanwhile
        alone = [await submit(http, "flex", seed=seed) for seed in range(NUM_SEEDS)]
        expected = await asyncio.gather(*(result_of(http, job_id) for job_id in alone))
        batch = [await submit(http, "flex", seed=i % NUM_SEEDS) for i in range(NUM_BATCH)]
        await until(lambda: all(has(redis_view, job_id, "first_token") for job_id in batch))

        calls = [submit(http, "priority", seed=i, max_tokens=20) for i in range(NUM_URGENT)]
        urgent = set(await asyncio.gather(*calls))
        most = 0

        def are_over() -> bool:
            nonlocal most
            most = max(most, *(len(urgent & ids) for ids in held(redis_view)))
            return all(has(redis_view, job_id, "finished") for job_id in urgent)

        await until(are_over)
        assert 0 < most <= NUM_PLACES
        for job_id in urgent:
            assert (await result_of(http, job_id))[1] == 20
        found = await asyncio.gather(*(result_of(http, job_id) for job_id in batch))
    assert found == [expected[i % NUM_SEEDS] for i in range(NUM_BATCH)]
