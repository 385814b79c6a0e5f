"""Logs, responses and metrics have the same counts."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions
from tests.fleet import Caller, fleet, until
from tests.gateway.conftest import make_settings, running_gateway
from tests.telemetry.test_metrics import samples

pytestmark = [pytest.mark.anyio, pytest.mark.e2e]

SLOW = HashModelOptions(step_s=0.01, eos_rate=0.0, num_blocks=96)
DEFAULT_TENANT = "default"


@pytest.fixture
def url(redis_server: EmbeddedRedis) -> Iterator[str]:
    with running_gateway(make_settings(redis_server.url)) as address:
        yield address


def summed(shown: dict[Any, float], name: str, **labels: str) -> float:
    """The sum of a metric's series with these labels."""
    return sum(
        value
        for (found, pairs), value in shown.items()
        if found == f"batchway_{name}" and labels.items() <= dict(pairs).items()
    )


async def page_of(http: httpx.AsyncClient) -> dict[Any, float]:
    return samples((await http.get("/metrics")).raise_for_status().text)


async def test_logs_answers_and_metrics_agree(
    url: str,
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    functions: Functions,
    keys: Keys,
) -> None:
    """With calls, jobs, cancels and a killed worker: every token is counted once."""
    caller = Caller(functions, redis_client, keys)
    async with (
        fleet(redis_server.url, 1, SLOW) as [first],
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await caller.num_workers(1)
        body = {"model": "m", "max_tokens": 40, "temperature": 0.0}
        calls = [
            asyncio.create_task(http.post("/v1/completions", json={**body, "prompt": f"call {i}"}))
            for i in range(6)
        ]
        queued = [
            (await http.post("/v1/jobs", json={
                "endpoint": "/v1/completions", "lane": ("batch", "interactive")[i % 2],
                "body": {**body, "prompt": f"job {i}", "n": 1 + i % 3},
            })).json()["id"]
            for i in range(10)
        ]  # fmt: skip
        await until(lambda: _has_output(functions, queued[0]))
        first.kill()
        before = await page_of(http)
        async with fleet(redis_server.url, 1, SLOW):
            await until(lambda: _has_output(functions, queued[5]))
            for job_id in queued[5:8]:
                await http.post(f"/v1/jobs/{job_id}/cancel")
            answers = [(await call).raise_for_status() for call in calls]
            views = [await _ended(functions, job_id) for job_id in queued]
            views += [await _ended(functions, a.headers["x-job-id"]) for a in answers]
            shown = await page_of(http)
    logged = [await _logged_tokens(functions, view.job.id) for view in views]
    assert logged == [view.num_output_tokens for view in views]
    num_tokens = sum(answer.json()["usage"]["completion_tokens"] for answer in answers)
    assert num_tokens == sum(logged[len(queued) :])
    assert summed(shown, "generation_tokens_total") == sum(logged)
    began = [view for view in views if view.num_output_tokens]
    assert summed(shown, "prompt_tokens_total") == sum(v.num_prompt_tokens for v in began)
    for status, num in Counter(view.status for view in views).items():
        assert summed(shown, "requests_total", status=status) == num
    assert summed(shown, "attempts_total") >= sum(view.attempt for view in views) > len(views)
    assert summed(shown, "time_to_first_token_seconds_count") == len(began)
    by_lane = Counter[str]()
    for view, num in zip(views, logged, strict=True):
        by_lane[view.lane] += num
    for lane, num in by_lane.items():
        assert summed(shown, "generation_tokens_total", lane=lane) == num
    assert {view.status for view in views} == {JobStatus.SUCCEEDED, JobStatus.CANCELLED}
    fallen = [key for key, value in before.items() if _only_grows(key[0]) and shown[key] < value]
    assert not fallen, "counts of a dead worker remain"


def _only_grows(name: str) -> bool:
    return name.endswith(("_total", "_bucket", "_sum", "_count"))


async def _ended(functions: Functions, job_id: str) -> Any:
    async def ended() -> bool:
        found = await functions.read(job_id, DEFAULT_TENANT)
        return found is not None and found[0].is_terminal

    await until(ended, 60)
    found = await functions.read(job_id, DEFAULT_TENANT)
    assert found is not None
    return found[0]


async def _has_output(functions: Functions, job_id: str) -> bool:
    found = await functions.read(job_id, DEFAULT_TENANT)
    return found is not None and found[0].num_output_tokens >= 3


async def _logged_tokens(functions: Functions, job_id: str) -> int:
    found = await functions.read(job_id, DEFAULT_TENANT, max_events=10_000)
    assert found is not None
    events = [entry.event for entry in found[1]]
    return sum(len(d.token_ids) for event in events for d in getattr(event, "deltas", ()))


async def test_a_worker_s_steps_reach_every_gateway(
    url: str,
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    functions: Functions,
    keys: Keys,
) -> None:
    """After a heartbeat or the worker's end. First tokens and gaps between tokens sum to the
    logged tokens."""
    caller = Caller(functions, redis_client, keys)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        async with fleet(redis_server.url, 1, HashModelOptions(eos_rate=0.0)):
            jobs = [await caller.submit(f"p{i}", max_tokens=20) for i in range(5)]
            for job in jobs:
                await caller.answer(job)
            shown = await page_of(http)
            assert summed(shown, "workers", model_name="m") == 1
            assert 0 <= summed(shown, "worker_seen_age_seconds") < 5
        shown = await page_of(http)
    num_steps = summed(shown, "step_duration_seconds_count")
    assert num_steps == summed(shown, "batch_size_count") >= 20
    num_first = summed(shown, "time_to_first_token_seconds_count")
    assert num_first == len(jobs)
    assert summed(shown, "inter_token_latency_seconds_count") == 20 * len(jobs) - num_first
    assert summed(shown, "workers") == 0


async def test_repeated_and_late_heartbeats_count_once(functions: Functions) -> None:
    """Totals follow each worker's reports and never fall."""

    async def beat(incarnation: str, num: int) -> int:
        counted = {"num_preemptions_total": num}
        await functions.heartbeat(incarnation, "m", [], lease_s=2, info="", counted=counted)
        return (await functions.snapshot("m", [])).totals["num_preemptions_total"]

    assert await beat("w1", 5) == 5
    assert await beat("w1", 5) == 5
    assert await beat("w2", 2) == 7
    assert await beat("w1", 9) == 11
    assert await beat("w1", 5) == 11
    assert await beat("w1", 10) == 12
