"""A cancelled job, or one whose caller disconnects, stops in the engine."""

import asyncio
import json
import os
import signal
import uuid
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import redis

from contract.connection import end_tasks
from tests.e2e.questions import KEYS, LONG_COUNT, MODEL
from tests.infra.stack import Stack
from tests.streams import events_of

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]

# 15,200 tokens: on a busy machine a test may see a job seconds after its first token.
LONG_JOB = {**LONG_COUNT, "n": 8, "ignore_eos": True, "max_tokens": 1900}
FAR_FROM_THE_END = 10_000


async def job_object(http: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    job: dict[str, Any] = (await http.get(f"/v1/jobs/{job_id}")).json()
    return job


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - another process sets no event here
            await asyncio.sleep(0.01)


def running_jobs(view: redis.Redis) -> set[str]:
    """Ids of the jobs that workers hold."""
    ids: Any = view.zrange(KEYS.of("leases"), 0, -1)
    return {job_id.decode() for job_id in ids}


async def begin(
    http: httpx.AsyncClient, view: redis.Redis, body: dict[str, Any]
) -> asyncio.Task[httpx.Response]:
    """A call whose job runs; one that is refused for a time is repeated, for two minutes."""
    async with asyncio.timeout(120):
        while True:
            request = http.build_request("POST", "/v1/chat/completions", json=body)
            call = asyncio.create_task(http.send(request, stream=body["stream"]))

            def is_refused(call: asyncio.Task[httpx.Response] = call) -> bool:
                return call.done() and call.result().status_code != 200

            await until(lambda: bool(running_jobs(view)) or is_refused())
            if not is_refused():
                return call
            text = (await call.result().aread()).decode()
            assert call.result().status_code in (429, 503), text


def job_record(view: redis.Redis, job_id: str, field: str) -> str:
    value: Any = view.hget(KEYS.of("job", job_id), field)
    return str(value.decode())


def num_events(view: redis.Redis, job_id: str) -> int:
    """The length of the job's log. While a job runs, its record may say less."""
    num: Any = view.xlen(KEYS.of("log", job_id))
    return int(num)


def worker_infos(view: redis.Redis) -> list[dict[str, Any]]:
    """The last report of each worker."""
    incarnations: Any = view.zrange(KEYS.of("workers", MODEL), 0, -1)
    raw: Any = [view.hget(KEYS.of("worker", i.decode()), "info") for i in incarnations]
    return [json.loads(info) for info in raw]


def is_pool_free(view: redis.Redis) -> bool:
    """Whether the last reports show no jobs, and all blocks free."""
    infos = worker_infos(view)
    return all(i["jobs_held"] == 0 and i["num_free_blocks"] == i["num_blocks"] for i in infos)


async def test_a_cancel_stops_the_engine_and_ends_the_events(
    stack: Stack, redis_view: redis.Redis
) -> None:
    """The last event is `cancelled`, the output so far can be read, no token follows, and the
    blocks are free."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        submission = {"endpoint": "/v1/chat/completions", "body": LONG_JOB}
        submitted = await http.post("/v1/jobs", json=submission)
        assert submitted.status_code == 202
        job_id = submitted.json()["id"]
        names: list[str] = []
        async with http.stream("GET", f"/v1/jobs/{job_id}/events") as events:
            async for event in events_of(events):
                names.append(event.type)
                if len(names) == 20:
                    assert (await http.post(f"/v1/jobs/{job_id}/cancel")).status_code == 200
        assert names[-1] == "cancelled"
        job = await job_object(http, job_id)
        assert job["status"] == "cancelled"
        assert 0 < job["usage"]["completion_tokens"] < FAR_FROM_THE_END
        await until(lambda: is_pool_free(redis_view))
        assert await job_object(http, job_id) == job


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
async def test_a_disconnected_caller_cancels_its_job(
    stack: Stack, redis_view: redis.Redis, is_stream: bool
) -> None:
    """Long before the end of the output; the blocks are free."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        body = {**LONG_JOB, "stream": is_stream}
        call = await begin(http, redis_view, body)
        [job_id] = running_jobs(redis_view)
        await until(lambda: num_events(redis_view, job_id) > 5)
        if is_stream:
            await (await call).aclose()
        else:
            call.cancel()
        await until(lambda: job_record(redis_view, job_id, "state") == "cancelled")
    num_tokens = int(job_record(redis_view, job_id, "tokens"))
    assert num_tokens < FAR_FROM_THE_END
    await until(lambda: is_pool_free(redis_view))
    assert int(job_record(redis_view, job_id, "tokens")) == num_tokens


async def test_a_cancelled_queued_job_never_runs(stack: Stack, redis_view: redis.Redis) -> None:
    """It is cancelled while the worker is stopped, and has no token after the worker continues."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        worker_pid = stack.pid_of("infra worker")
        os.kill(worker_pid, signal.SIGSTOP)
        try:
            submission = {"endpoint": "/v1/chat/completions", "body": LONG_COUNT}
            job_id = (await http.post("/v1/jobs", json=submission)).json()["id"]
            assert (await job_object(http, job_id))["status"] == "queued"
            assert (await http.post(f"/v1/jobs/{job_id}/cancel")).status_code == 200
        finally:
            os.kill(worker_pid, signal.SIGCONT)
        answer = await http.post("/v1/chat/completions", json={**LONG_COUNT, "max_tokens": 3})
        assert answer.status_code == 200
        job = await job_object(http, job_id)
    assert (job["status"], job["usage"]["completion_tokens"]) == ("cancelled", 0)
    assert job_record(redis_view, job_id, "epoch") == "0"


@pytest.mark.campaign
async def test_after_two_hundred_cancels_only_the_last_job_runs(
    stack: Stack, redis_view: redis.Redis
) -> None:
    """Half are cancelled by id, half by disconnecting, some queued and some running. The engine
    itself (or vLLM) reports how many sequences run."""

    def worker_loads() -> list[tuple[int, int, int]]:
        infos = worker_infos(redis_view)
        return [(i["jobs_held"], i["num_running"], i["num_waiting"]) for i in infos]

    statuses = []

    async def cancel_by_name(http: httpx.AsyncClient) -> None:
        body = {**LONG_COUNT, "ignore_eos": True, "max_tokens": 1900}
        submission = {"endpoint": "/v1/chat/completions", "body": body}
        key = {"Idempotency-Key": str(uuid.uuid4())}
        job_id = (await asked(http, "/v1/jobs", json=submission, headers=key)).json()["id"]
        cancelled = await asked(http, f"/v1/jobs/{job_id}/cancel", and_status=409)
        statuses.append(cancelled.status_code)

    async def asked(
        http: httpx.AsyncClient, path: str, *, and_status: int = 200, **parts: Any
    ) -> httpx.Response:
        while (answer := await http.post(path, **parts)).status_code == 503:
            pass  # Redis may be slow under this load
        assert answer.is_success or answer.status_code == and_status, answer.text
        return answer

    async def go_away(http: httpx.AsyncClient, num_lines: int) -> None:
        body = {**LONG_COUNT, "stream": True, "stop": ["200"]}
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            is_refused = answer.status_code == 503
            assert is_refused or answer.status_code == 200, await answer.aread()
            async for _ in answer.aiter_lines():  # on a busy machine there may be fewer
                num_lines -= 1
                if num_lines <= 0:
                    break
        if is_refused:
            await go_away(http, num_lines)

    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as http:
        for _ in range(10):
            calls = [cancel_by_name(http) for _ in range(10)]
            calls += [go_away(http, 2 * number) for number in range(10)]
            await asyncio.gather(*calls)
        assert 200 in statuses  # 409: the job ended before its cancel came
        await until(lambda: not running_jobs(redis_view))
        last = {**LONG_COUNT, "ignore_eos": True, "max_tokens": 1500}

        async def run_alone() -> None:
            while True:
                assert (await http.post("/v1/chat/completions", json=last)).status_code == 200

        running = asyncio.create_task(run_alone())
        await until(lambda: (1, 1, 0) in worker_loads() or running.done())
        await end_tasks(running)
        assert running.cancelled()
    await until(lambda: is_pool_free(redis_view))
