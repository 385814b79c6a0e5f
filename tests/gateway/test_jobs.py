"""Jobs: submitted, read, streamed from any event, cancelled, expired, idempotent."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.jobs import JobStatus
from contract.keys import Keys
from tests.clock import TEST_CLOCK
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model, says

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab"}
CHAT_BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"endpoint": "/v1/completions", "body": BODY}
CHAT = {"endpoint": "/v1/chat/completions", "body": CHAT_BODY}


async def submit(http: httpx.AsyncClient, job: dict[str, Any] | None = None) -> str:
    answer = await http.post("/v1/jobs", json=job or COMPLETION)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def events(http: httpx.AsyncClient, job_id: str, **headers: str) -> list[str]:
    """A job's whole stream, one item per event, without comments."""
    answer = await http.get(f"/v1/jobs/{job_id}/events", headers=headers)
    assert answer.status_code == 200, answer.text
    return events_of(answer.text)


def events_of(text: str) -> list[str]:
    """The events of a stream, without its comments."""
    parts = re.sub(r"^:.*\n", "", text, flags=re.MULTILINE).split("\n\n")
    return [part for part in parts if part]


def field(event: str, name: str) -> str | None:
    lines = [line for line in event.splitlines() if line.startswith(f"{name}: ")]
    return lines[0].removeprefix(f"{name}: ") if lines else None


async def test_a_job_goes_from_queued_to_its_result(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """202 with the position; then running; then the endpoint's own response."""
    first, second = await submit(http), await http.post("/v1/jobs", json=CHAT)
    assert second.json()["position"] == 1
    assert second.json()["events_url"] == f"/v1/jobs/{second.json()['id']}/events"
    assert (await http.get(f"/v1/jobs/{first}")).json()["status"] == "queued"
    claimed = await idle_worker.claim()
    assert (await http.get(f"/v1/jobs/{first}")).json()["status"] == "running"
    await idle_worker.run(claimed)
    job = (await http.get(f"/v1/jobs/{first}")).json()
    assert job["status"] == "succeeded"
    assert job["result"]["choices"][0]["text"] == "Hello wörld!"
    assert job["usage"]["completion_tokens"] == 13
    assert all(job["timings"].values())


@pytest.mark.parametrize("job", [COMPLETION, CHAT])
async def test_a_stream_goes_on_from_every_event_with_the_same_bytes(
    worker: FakeWorker, http: httpx.AsyncClient, job: dict[str, Any]
) -> None:
    """By header, with and without the hash, and by query."""
    options = {"logprobs": True} if job is CHAT else {"logprobs": 2}
    job = job | {"body": job["body"] | options | {"return_token_ids": True, "n": 2}}
    job_id = await submit(http, job)
    whole = [event for event in await events(http, job_id) if field(event, "event") != "queued"]
    assert whole[-1] == "data: [DONE]"
    assert field(whole[-2], "event") == "succeeded"
    cuts = [i for i, event in enumerate(whole) if field(event, "id")]
    assert len(cuts) == 4
    for cut in cuts:
        last_id = field(whole[cut], "id") or ""
        number = last_id.partition(".")[0]
        rest = whole[cut + 1 :]
        assert await events(http, job_id, **{"last-event-id": last_id}) == rest
        assert await events(http, job_id, **{"last-event-id": number}) == rest
        answer = await http.get(f"/v1/jobs/{job_id}/events", params={"starting_after": number})
        assert events_of(answer.text) == rest


async def test_a_replaced_log_is_read_from_its_start(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """If the hash differs, the stream reports a reset."""
    job_id = await submit(http)
    whole = [event for event in await events(http, job_id) if field(event, "event") != "queued"]
    for wrong in ("2.00000000", "9.00000000"):
        reset, *rest = await events(http, job_id, **{"last-event-id": wrong})
        assert (field(reset, "event"), field(reset, "data")) == ("stream_reset", '{"from":0}')
        assert rest == whole
    answer = await http.get(f"/v1/jobs/{job_id}/events", headers={"last-event-id": "x"})
    assert answer.json()["error"]["param"] == "Last-Event-ID"


async def test_a_result_is_never_a_part_of_one(
    worker: FakeWorker, http: httpx.AsyncClient, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """After a failover of Redis the log may be shorter than the record that was read before."""
    job_id = await submit(http)
    await events(http, job_id)
    assert (await http.get(f"/v1/jobs/{job_id}")).json()["result"] is not None
    log = keys.of("log", job_id)
    entries: Any = await redis_client.xrevrange(log, count=1)
    await redis_client.xdel(log, entries[0][0])

    answer = await http.get(f"/v1/jobs/{job_id}")

    assert answer.status_code == 503
    assert answer.headers["retry-after"]


async def test_a_follower_sees_a_job_wait_and_run(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """`queued` while it waits, each chunk as it comes, the job at the end."""
    job_id = await submit(http)
    async with http.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == "event: queued"
        claimed = await idle_worker.claim()
        await idle_worker.run(claimed)
        rest = [line async for line in lines if line.startswith(("event", "data: [DONE]"))]
    assert [line for line in rest if "queued" not in line] == ["event: succeeded", "data: [DONE]"]


async def test_a_cancelled_job_ends_at_once_and_keeps_its_output(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """200 twice, 409 if it ended otherwise, 404 for an unknown job."""
    job_id = await submit(http)
    claimed = await idle_worker.claim()
    await idle_worker.say(claimed, 1, says("Hel")(claimed.job)[0])
    for _ in range(2):
        answer = await http.post(f"/v1/jobs/{job_id}/cancel")
        assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    job = (await http.get(f"/v1/jobs/{job_id}")).json()
    assert job["result"]["choices"][0]["text"] == "Hel"
    done = await submit(http)
    await idle_worker.run(await idle_worker.claim())
    answer = await http.post(f"/v1/jobs/{done}/cancel")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "already_terminal")
    for unknown in ("job-0-" + "0" * 32, "x"):
        answer = await http.post(f"/v1/jobs/{unknown}/cancel")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found")


async def test_a_job_without_workers_expires(
    redis_client: redis.asyncio.Redis, keys: Keys, http: httpx.AsyncClient
) -> None:
    """The gateway's sweep ends the job, and the follower gets the end."""
    await publish_model(redis_client, keys)
    job_id = await submit(http, COMPLETION | {"deadline_s": 5})
    async with http.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        await redis_client.incrby(TEST_CLOCK, 6000)
        rest = [line async for line in lines if line.startswith("event: e")]
    assert rest == ["event: expired"]
    assert (await http.get(f"/v1/jobs/{job_id}")).json()["status"] == "expired"


async def test_an_idempotency_key_attaches_or_refuses(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """The same key and body find one job, for calls and jobs. Another body gets 422."""
    headers = {"idempotency-key": "k1"}
    one = await http.post("/v1/completions", json=BODY, headers=headers)
    two = await http.post("/v1/completions", json=BODY, headers=headers)
    assert one.content == two.content
    assert len(worker.seen) == 1
    other = await http.post("/v1/completions", json=BODY | {"n": 2}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_mismatch")
    bad = await http.post("/v1/completions", json=BODY, headers={"idempotency-key": "a b"})
    assert bad.json()["error"]["param"] == "Idempotency-Key"


async def test_a_call_becomes_a_job_on_request(worker: FakeWorker, http: httpx.AsyncClient) -> None:
    """`Prefer: respond-async`."""
    answer = await http.post("/v1/completions", json=BODY, headers={"prefer": "respond-async"})
    assert answer.status_code == 202
    assert answer.headers["preference-applied"] == "respond-async"
    assert field((await events(http, answer.json()["id"]))[-2], "event") == "succeeded"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"endpoint": "/v1/images"}, "endpoint", "invalid_value"),
        ({"endpoint": "/v1/embeddings"}, "body.prompt", "unknown_parameter"),
        ({"lane": "fast"}, "lane", "unknown_lane"),
        ({"deadline_s": 0}, "deadline_s", "invalid_value"),
        ({"x": 1}, "x", "unknown_parameter"),
        ({"body": BODY | {"n": 9}}, "body.n", "invalid_value"),
        ({"body": BODY | {"model": "none"}}, "body.model", "model_not_found"),
    ],
)
async def test_a_wrong_job_names_its_parameter(
    idle_worker: FakeWorker, http: httpx.AsyncClient, fields: Any, param: str, code: str
) -> None:
    """Parameters of the inner body are named below `body`."""
    error = (await http.post("/v1/jobs", json=COMPLETION | fields)).json()["error"]
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_cancels_the_call(
    idle_worker: FakeWorker, gateway_url: str, stream: bool
) -> None:
    """The worker learns of it by its next heartbeat."""
    async with httpx.AsyncClient(base_url=gateway_url) as client:
        call = asyncio.create_task(client.post("/v1/completions", json=BODY | {"stream": stream}))
        claimed = await idle_worker.claim()
        await idle_worker.say(claimed, 1, says("a")(claimed.job)[0])
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    assert await idle_worker.wait_until_ended(claimed) is JobStatus.CANCELLED


@pytest.mark.parametrize(
    ("code", "status", "shown"),
    [
        ("prompt_too_long", 400, "prompt_too_long"),
        ("bad_parameter", 400, "bad_parameter"),
        ("engine_error", 500, "engine_error"),
        ("retries", 500, "retries"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_is_a_status(
    idle_worker: FakeWorker,
    http: httpx.AsyncClient,
    code: str,
    status: int,
    shown: str,
    stream: bool,
) -> None:
    """Also for streams: the status line waits for the first event."""
    call = asyncio.create_task(http.post("/v1/completions", json=BODY | {"stream": stream}))
    await idle_worker.finish(await idle_worker.claim(), 1, code, "it broke")
    answer = await call
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, shown)
    assert answer.headers["x-job-id"].startswith("job-0-")


async def test_a_failure_within_a_stream_is_its_last_event(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """An error as data, then [DONE]."""
    call = asyncio.create_task(http.post("/v1/completions", json=BODY | {"stream": True}))
    claimed = await idle_worker.claim()
    await idle_worker.say(claimed, 1, says("a")(claimed.job)[0])
    await idle_worker.finish(claimed, 2, "engine_error", "it broke")
    *_, error, done, _ = (await call).text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_error"
    assert done == "data: [DONE]"


async def test_an_expired_or_cancelled_call_gets_504_or_409(
    idle_worker: FakeWorker, http: httpx.AsyncClient, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """504 and 409, with a header that tells clients not to retry."""
    call = asyncio.create_task(http.post("/v1/completions", json=BODY))
    await idle_worker.claim()
    await redis_client.incrby(TEST_CLOCK, 121_000)
    answer = await call
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    await idle_worker.beat()
    call = asyncio.create_task(http.post("/v1/completions", json=BODY))
    claimed = await idle_worker.claim()
    await http.post(f"/v1/jobs/{claimed.job.id}/cancel")
    answer = await call
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "cancelled")
    assert answer.headers["x-should-retry"] == "false"
