"""Broken streams of calls: what happens to their jobs, and how callers resume."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import redis.asyncio
from msgspec.structs import replace

from contract.events import Tokens
from contract.jobs import JobStatus
from contract.keys import Keys
from gateway.settings import GatewaySettings
from infra.embedded_redis import EmbeddedRedis
from tests.clock import TEST_CLOCK
from tests.gateway.conftest import Gateways, gateway_client
from tests.gateway.fake_worker import MODEL, FakeWorker, says, until_followers
from tests.gateway.test_jobs import field
from tests.streams import events_of, whole_stream

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab", "stream": True, "max_tokens": 500}
USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture
async def other_http(redis_server: EmbeddedRedis) -> AsyncIterator[httpx.AsyncClient]:
    """A client of another gateway on the same Redis."""
    async with gateway_client(redis_server.url) as client:
        yield client


async def parts_of(
    http: httpx.AsyncClient, body: dict[str, Any], query: str = "", **headers: str
) -> list[str]:
    answer = await http.post(f"/v1/completions{query}", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return [part for part in answer.text.split("\n\n") if part and not part.startswith(":")]


@pytest.mark.parametrize("options", [USAGE, {"logprobs": 2, "n": 2, "echo": True}])
async def test_a_call_resumes_at_any_gateway_from_every_event(
    worker: FakeWorker,
    http: httpx.AsyncClient,
    other_http: httpx.AsyncClient,
    options: dict[str, Any],
) -> None:
    """By header, with and without the hash, or by query: exactly the missing bytes."""
    body, key = BODY | options, f"k-{json.dumps(options, separators=(',', ':'))}"
    whole = await parts_of(http, body, **{"idempotency-key": key})
    assert whole[-1] == "data: [DONE]"
    ids = [field(part, "id") for part in whole]
    cuts = [i for i, last_id in enumerate(ids) if last_id]
    assert len(cuts) == 3
    for cut in cuts:
        last_id = ids[cut] or ""
        number = last_id.partition(".")[0]
        for given in (last_id, number):
            headers = {"idempotency-key": key, "last-event-id": given}
            assert await parts_of(other_http, body, **headers) == whole[cut + 1 :]
        query = f"?starting_after={number}"
        rest = await parts_of(other_http, body, query, **{"idempotency-key": key})
        assert rest == whole[cut + 1 :]
    assert len(worker.seen) == 1


async def test_a_broken_stream_resumes_at_another_gateway(
    idle_worker: FakeWorker, http: httpx.AsyncClient, other_http: httpx.AsyncClient
) -> None:
    """The job runs on meanwhile; nothing is repeated."""
    headers = {"idempotency-key": "midway"}
    pending = http.stream("POST", "/v1/completions", json=BODY, headers=headers)
    reading = asyncio.create_task(first_id(pending))
    claimed = await idle_worker.claim()
    events = says("one", "two", "three")(claimed.job)
    await idle_worker.say(claimed, 1, events[0])
    last_id = await reading
    for number, event in enumerate(events[1:], 2):
        await idle_worker.say(claimed, number, event)
    await idle_worker.finish(claimed, 4)
    rest = await parts_of(other_http, BODY, **headers, **{"last-event-id": last_id})
    data = [json.loads(field(part, "data") or "") for part in rest[:-1]]
    assert [chunk["choices"][0]["text"] for chunk in data] == ["two", "three"]


async def first_id(pending: Any) -> str:
    """The id of a stream's first event, or ''; then disconnects."""
    async with pending as answer:
        return (await anext(events_of(answer))).id or ""


async def test_an_unknown_position_resets_the_stream(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """With another hash, or a new key: `stream_reset`, then everything."""
    whole = await parts_of(http, BODY, **{"idempotency-key": "fits"})
    for key, given in (("fits", "2.00000000"), ("new", "2")):
        headers = {"idempotency-key": key, "last-event-id": given}
        reset, *rest = await parts_of(http, BODY, **headers)
        assert reset == 'event: stream_reset\ndata: {"from":0}'
        assert len(rest) == len(whole)
        assert (rest == whole) == (key == "fits")


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (BODY, {}),
        (BODY | {"stream": False}, {"idempotency-key": "k"}),
        (BODY, {"idempotency-key": "k", "last-event-id": "x"}),
    ],
)
async def test_a_position_needs_a_stream_and_a_key(
    idle_worker: FakeWorker, http: httpx.AsyncClient, body: Any, headers: dict[str, str]
) -> None:
    """400 that names the header."""
    answer = await http.post(
        "/v1/completions", json=body, headers={"last-event-id": "1", **headers}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


@pytest.mark.parametrize(
    "case",
    [
        (None, None, JobStatus.CANCELLED),
        (None, "left", JobStatus.STREAMING),
        ("continue", None, JobStatus.STREAMING),
        ("cancel", "gone", JobStatus.CANCELLED),
    ],
)
async def test_on_disconnect_decides_about_the_job(
    idle_worker: FakeWorker,
    http: httpx.AsyncClient,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    case: tuple[str | None, str | None, JobStatus],
) -> None:
    """`on_disconnect`. Without it an idempotency key means that the caller may come back."""
    choice, key, status = case
    headers = {"idempotency-key": key} if key else {}
    body = BODY | {"on_disconnect": choice}
    pending = http.stream("POST", "/v1/completions", json=body, headers=headers)
    reading = asyncio.create_task(first_id(pending))
    claimed = await idle_worker.claim()
    await idle_worker.say(claimed, 1, says("a", "b")(claimed.job)[0])
    await reading
    await until_followers(redis_client, keys, claimed.job, 0)  # the gateway has noticed
    found = await idle_worker.functions.read(claimed.job.id, claimed.job.tenant)
    assert found is not None
    assert found[0].status is status
    attended = await redis_client.zscore(keys.of("attended"), claimed.job.id)
    assert attended is None, "the job needs no caller"


async def test_on_disconnect_of_a_job_can_only_be_continue(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """Jobs always continue; `cancel` is rejected by name."""
    body = {"model": MODEL, "prompt": "ab"}
    for choice, status in (("continue", 202), ("cancel", 400)):
        job = {"endpoint": "/v1/completions", "body": body | {"on_disconnect": choice}}
        answer = await http.post("/v1/jobs", json=job)
        assert answer.status_code == status
    assert answer.json()["error"]["param"] == "body.on_disconnect"


async def test_a_reader_that_stops_reading_is_disconnected_and_can_resume(
    idle_worker: FakeWorker,
    gateways: Gateways,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first event arrives. The others exceed all buffers, so the kernel closes the
    connection; the log has the rest."""
    num_events, text = 40, "x" * 400_000
    monkeypatch.setattr(GatewaySettings, "stall_timeout_s", 0.2)
    async with gateways() as http:
        http.timeout = httpx.Timeout(60)
        job = {"endpoint": "/v1/completions", "body": BODY | {"stream": False}}
        job_id = (await http.post("/v1/jobs", json=job)).json()["id"]
        claimed = await idle_worker.claim()
        ids: list[int] = []
        async with http.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
            await until_followers(redis_client, keys, claimed.job, 1)
            for number, event in enumerate(says(*"a" * num_events)(claimed.job), 1):
                assert isinstance(event, Tokens)
                size = len(text) if number > 1 else 1
                deltas = (replace(delta, text=text[:size]) for delta in event.deltas)
                await idle_worker.say(claimed, number, Tokens(tuple(deltas)))
            await idle_worker.finish(claimed, num_events + 1)
            await until_followers(redis_client, keys, claimed.job, 0)  # nothing is read meanwhile
            await read(answer, ids)
        assert ids[-1] < num_events
        headers = {"last-event-id": str(ids[-1])}
        async with http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as answer:
            await read(answer, ids)
    assert ids == list(range(1, num_events + 2))


async def read(answer: httpx.Response, ids: list[int]) -> None:
    """Records the numbers of complete events, until the stream ends or breaks."""
    with contextlib.suppress(httpx.TransportError):
        async for event in events_of(answer):
            if event.id:
                ids += [int(event.id.partition(".")[0])]


@pytest.mark.parametrize("status", ["succeeded", "failed", "cancelled", "expired"])
async def test_every_stream_of_a_job_ends_in_its_terminal_event(
    idle_worker: FakeWorker, http: httpx.AsyncClient, redis_client: redis.asyncio.Redis, status: str
) -> None:
    """Whether it is followed live or read afterwards."""
    job = {"endpoint": "/v1/completions", "body": BODY | {"stream": False}, "deadline_s": 60}
    job_id = (await http.post("/v1/jobs", json=job)).json()["id"]
    live = asyncio.create_task(http.get(f"/v1/jobs/{job_id}/events"))
    claimed = await idle_worker.claim()
    await idle_worker.say(claimed, 1, says("a", "b")(claimed.job)[0])
    if status == "cancelled":
        await http.post(f"/v1/jobs/{job_id}/cancel")
    elif status == "expired":
        await redis_client.incrby(TEST_CLOCK, 61_000)
    else:
        await idle_worker.finish(claimed, 2, "engine_error" if status == "failed" else "")
    for answer in (await live, await http.get(f"/v1/jobs/{job_id}/events")):
        assert whole_stream(answer.text)[-1].type == status
