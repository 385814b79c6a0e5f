"""PATCH /v1/jobs/{id}: another lane or deadline, for waiting and running jobs."""

import asyncio
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.keys import Keys
from tests.clock import TEST_CLOCK
from tests.gateway.fake_worker import MODEL, FakeWorker
from tests.streams import events_of

pytestmark = pytest.mark.anyio

JOB: dict[str, Any] = {
    "endpoint": "/v1/completions",
    "body": {"model": MODEL, "prompt": "ab"},
    "lane": "batch",
}


async def submit(http: httpx.AsyncClient) -> str:
    return str((await http.post("/v1/jobs", json=JOB)).json()["id"])


async def test_a_waiting_job_changes_its_lane_and_its_turn(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """It overtakes jobs in its former lane."""
    first, second = await submit(http), await submit(http)
    answer = await http.patch(f"/v1/jobs/{second}", json={"lane": "interactive"})
    assert (answer.status_code, answer.json()["lane"]) == (200, "interactive")
    assert [(await idle_worker.claim()).job.id for _ in range(2)] == [second, first]


async def test_a_running_job_s_worker_receives_the_change(
    idle_worker: FakeWorker, http: httpx.AsyncClient, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Lane and deadline go to the worker while it runs."""
    job_id = await submit(http)
    await idle_worker.claim()
    async with redis_client.pubsub() as pubsub:
        await pubsub.subscribe(keys.of("ctl", idle_worker.incarnation))
        async with asyncio.timeout(5):
            await anext(pubsub.listen())
            change = {"lane": "interactive", "deadline_s": 50}
            answer = await http.patch(f"/v1/jobs/{job_id}", json=change)
            message = (await anext(pubsub.listen()))["data"].decode()
    job = answer.json()
    assert (job["status"], job["lane"]) == ("running", "interactive")
    assert 45 < job["timings"]["deadline_at"] - job["timings"]["queued_at"] < 60
    assert message.startswith(f"moved {job_id} interactive ")


async def test_a_deadline_that_is_moved_up_is_kept(
    idle_worker: FakeWorker, http: httpx.AsyncClient, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """The lane stays; the job expires at the new deadline."""
    job_id = await submit(http)
    answer = await http.patch(f"/v1/jobs/{job_id}", json={"deadline_s": 5})
    assert answer.json()["lane"] == "batch"
    await redis_client.incrby(TEST_CLOCK, 6000)
    async with http.stream("GET", f"/v1/jobs/{job_id}/events") as stream:
        types = [event.type async for event in events_of(stream) if event.type != "queued"]
    assert types == ["expired"]


async def test_ended_and_unknown_jobs_cannot_be_moved(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """409 and 404."""
    job_id = await submit(http)
    await http.get(f"/v1/jobs/{job_id}/events")
    answer = await http.patch(f"/v1/jobs/{job_id}", json={"lane": "standard"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "already_terminal")
    for unknown in ("job-0-" + "0" * 32, "x"):
        answer = await http.patch(f"/v1/jobs/{unknown}", json={"lane": "standard"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found")


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({}, "lane", "missing_required_parameter"),
        ({"lane": "fast"}, "lane", "unknown_lane"),
        ({"lane": 1}, "lane", "invalid_value"),
        ({"deadline_s": 0}, "deadline_s", "invalid_value"),
        ({"deadline_s": 10**9}, "deadline_s", "invalid_value"),
        ({"body": {}}, "body", "unknown_parameter"),
    ],
)
async def test_a_wrong_change_names_its_parameter(
    idle_worker: FakeWorker, http: httpx.AsyncClient, change: Any, param: str, code: str
) -> None:
    """The job stays unchanged."""
    job_id = await submit(http)
    answer = await http.patch(f"/v1/jobs/{job_id}", json=change)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert (await http.get(f"/v1/jobs/{job_id}")).json()["lane"] == "batch"
