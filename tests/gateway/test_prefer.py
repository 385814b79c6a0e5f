"""Calls that become jobs: at once, after a wait, or at the platform's time limit."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import redis.asyncio
from openai import APIError, AsyncOpenAI

from contract.connection import end_tasks
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.clock import TEST_CLOCK
from tests.gateway.conftest import gateway_client
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model, says
from tests.gateway.test_messages import events_in
from tests.streams import whole_stream

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab"}
CALLS = [
    ("/v1/completions", BODY),
    ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}),
]


async def ended(http: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    """Returns the job once it has ended."""
    async with http.stream("GET", f"/v1/jobs/{job_id}/events") as stream:
        async for _ in stream.aiter_lines():
            pass
    job: dict[str, Any] = (await http.get(f"/v1/jobs/{job_id}")).json()
    return job


@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_answers_with_its_job_after_the_wait(
    idle_worker: FakeWorker, http: httpx.AsyncClient, path: str, body: Any, stream: bool
) -> None:
    """202 with position and location; the job runs on."""
    headers = {"prefer": "wait=0"}
    answer = await http.post(path, json=body | {"stream": stream}, headers=headers)
    assert (answer.status_code, answer.json()["status"]) == (202, "queued")
    job_id = answer.json()["id"]
    assert answer.headers["preference-applied"] == "wait=0"
    assert answer.headers["location"] == f"/v1/jobs/{job_id}"
    assert answer.headers["x-job-id"] == job_id
    await idle_worker.run(await idle_worker.claim())
    assert (await ended(http, job_id))["status"] == "succeeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_result_within_the_wait_is_the_answer(
    worker: FakeWorker, http: httpx.AsyncClient, stream: bool
) -> None:
    """As without the header, which the response confirms."""
    for prefer in ("wait=30", "respond-async, wait=30", 'handling=lenient, wait="30"'):
        answer = await http.post(
            "/v1/completions", json=BODY | {"stream": stream}, headers={"prefer": prefer}
        )
        assert answer.status_code == 200
        assert answer.headers["preference-applied"].endswith("wait=30")
        assert "wörld" in answer.text


@pytest.mark.parametrize("prefer", ["wait=soon", "return=minimal", "wait=-1", "wait"])
async def test_an_unknown_preference_is_ignored(
    worker: FakeWorker, http: httpx.AsyncClient, prefer: str
) -> None:
    """As RFC 7240 says."""
    answer = await http.post("/v1/completions", json=BODY, headers={"prefer": prefer})
    assert answer.status_code == 200
    assert "preference-applied" not in answer.headers


async def test_a_call_that_may_become_a_job_waits_for_a_worker(
    redis_client: redis.asyncio.Redis, keys: Keys, http: httpx.AsyncClient
) -> None:
    """A call that may become a job is queued without a worker."""
    await publish_model(redis_client, keys)
    for prefer in ("wait=0", "respond-async"):
        answer = await http.post("/v1/completions", json=BODY, headers={"prefer": prefer})
        assert answer.status_code == 202


async def test_a_disconnect_within_the_wait_cancels(
    idle_worker: FakeWorker, gateway_url: str
) -> None:
    """Nobody knows the job's id yet."""
    async with httpx.AsyncClient(base_url=gateway_url) as client:
        headers = {"prefer": "wait=60"}
        call = asyncio.create_task(client.post("/v1/completions", json=BODY, headers=headers))
        claimed = await idle_worker.claim()
        await end_tasks(call)
    assert await idle_worker.wait_until_ended(claimed) is JobStatus.CANCELLED


async def test_a_call_that_became_a_job_needs_no_caller(
    idle_worker: FakeWorker,
    http: httpx.AsyncClient,
    functions: Functions,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
) -> None:
    """It still waits long after its call's attendance would have expired, and is kept as a job."""
    answer = await http.post("/v1/completions", json=BODY, headers={"prefer": "wait=0"})
    job_id = answer.json()["id"]
    await redis_client.incrby(TEST_CLOCK, 3_600_000)
    assert (await functions.sweep()).num_unattended == 0
    await idle_worker.beat()
    await idle_worker.run(await idle_worker.claim())
    assert (await ended(http, job_id))["status"] == "succeeded"
    assert await redis_client.ttl(keys.of("job", job_id)) > 80_000


@pytest.fixture
async def limited(redis_server: EmbeddedRedis) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway whose platform ends requests after a moment."""
    async with gateway_client(redis_server.url, sync_limit_s=0.3) as http:
        yield http


async def test_a_call_that_meets_the_limit_becomes_a_job(
    limited: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    """202; a disconnect no longer cancels it."""
    answer = await limited.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["object"]) == (202, "job")
    assert "preference-applied" not in answer.headers
    await idle_worker.run(await idle_worker.claim())
    job = await ended(limited, answer.json()["id"])
    assert job["result"]["choices"][0]["text"] == "Hello wörld!"
    assert job["timings"]["deadline_at"] - job["timings"]["queued_at"] > 80_000


async def test_a_stream_of_a_message_at_the_time_limit_ends_with_an_error(
    limited: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    """Which Anthropic's clients raise: they would take any other event for the answer's end."""
    body = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
    call = asyncio.create_task(limited.post("/v1/messages", json=body | {"stream": True}))
    claimed = await idle_worker.claim()
    await idle_worker.say(claimed, 1, says("a", "b")(claimed.job)[0])
    *_, delta, error = (each for each in events_in(await call) if each["type"] != "ping")
    assert (delta["type"], error["type"]) == ("content_block_delta", "error")
    assert (error["error"]["code"], error["id"]) == ("became_job", claimed.job.id)


async def test_a_stream_at_the_time_limit_tells_where_to_resume(
    limited: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    """The events before and after are the job's, each once."""
    call = asyncio.create_task(limited.post("/v1/completions", json=BODY | {"stream": True}))
    claimed = await idle_worker.claim()
    said = says("a", "b", "c")(claimed.job)
    await idle_worker.say(claimed, 1, said[0])
    *chunks, reconnect = whole_stream((await call).text)
    assert [chunk.data["choices"][0]["text"] for chunk in chunks] == ["a"]
    became = reconnect.data
    assert (reconnect.type, became["error"]["code"]) == ("reconnect", "became_job")
    assert became["id"] == claimed.job.id
    for number, event in enumerate(said[1:], 2):
        await idle_worker.say(claimed, number, event)
    await idle_worker.finish(claimed, 4)
    headers = {"last-event-id": became["last_event_id"]}
    *rest, end = whole_stream((await limited.get(became["events_url"], headers=headers)).text)
    assert [chunk.data["choices"][0]["text"] for chunk in rest] == ["b", "c"]
    assert end.type == "succeeded"


async def test_the_official_client_ignores_heartbeats(
    idle_worker: FakeWorker, gateway_url: str
) -> None:
    """It ignores comments between chunks that have ids."""
    async with AsyncOpenAI(base_url=f"{gateway_url}/v1", api_key="none", max_retries=0) as client:
        call = asyncio.create_task(client.completions.create(model=MODEL, prompt="ab", stream=True))
        claimed = await idle_worker.claim()
        one, two = says("a", "b")(claimed.job)
        await idle_worker.say(claimed, 1, one)
        chunks = aiter(await call)
        texts = [(await anext(chunks)).choices[0].text]
        await asyncio.sleep(0.5)  # more than one heartbeat
        await idle_worker.say(claimed, 2, two)
        await idle_worker.finish(claimed, 3)
        texts += [chunk.choices[0].text async for chunk in chunks]
    assert texts == ["a", "b"]


async def test_the_official_client_raises_at_the_limit(
    limited: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    """It does not know the event; the error names the job."""
    url = f"{limited.base_url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        call = asyncio.create_task(client.completions.create(model=MODEL, prompt="ab", stream=True))
        claimed = await idle_worker.claim()
        await idle_worker.say(claimed, 1, says("a", "b")(claimed.job)[0])
        chunks = aiter(await call)
        assert (await anext(chunks)).choices[0].text == "a"
        with pytest.raises(APIError, match=claimed.job.id):
            await anext(chunks)


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_an_idempotency_key_attaches_to_a_live_stream(
    idle_worker: FakeWorker, http: httpx.AsyncClient, path: str, body: Any
) -> None:
    """The second caller gets the same events from the first on, and no second job is created."""
    headers = {"idempotency-key": f"live{path}"}
    stream = body | {"stream": True}
    first = asyncio.create_task(http.post(path, json=stream, headers=headers))
    claimed = await idle_worker.claim()
    one, two = says("a", "b")(claimed.job)
    await idle_worker.say(claimed, 1, one)
    second = asyncio.create_task(http.post(path, json=stream, headers=headers))
    await idle_worker.say(claimed, 2, two)
    await idle_worker.finish(claimed, 3)
    assert whole_stream((await first).text) == whole_stream((await second).text)
    assert len(idle_worker.seen) == 1
    whole = await http.post(path, json=body, headers=headers)
    assert (whole.status_code, whole.json()["error"]["code"]) == (422, "idempotency_mismatch")


async def test_an_idempotency_key_is_kept_for_a_day(
    idle_worker: FakeWorker, http: httpx.AsyncClient, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """On calls, on calls that become jobs, and on jobs; each remembers its own body."""
    job = {"endpoint": "/v1/completions", "body": BODY}
    posts: list[tuple[str, Any, dict[str, str]]] = [
        ("/v1/jobs", job, {}),
        ("/v1/completions", BODY, {"prefer": "wait=0"}),
        ("/v1/chat/completions", CALLS[1][1], {"prefer": "respond-async"}),
    ]
    for number, (path, body, headers) in enumerate(posts):
        key = f"k{number}"
        headers = headers | {"idempotency-key": key}
        one, two = [(await http.post(path, json=body, headers=headers)).json() for _ in range(2)]
        assert one["id"] == two["id"]
        assert 86_300 < await redis_client.ttl(keys.of("idem", "default", key)) <= 86_400
        answer = await http.post(path, json=body | {"metadata": {"a": "b"}}, headers=headers)
        assert answer.status_code == 422
