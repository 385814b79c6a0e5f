"""Jobs: submitted, read, changed, streamed from any event, cancelled, expired, idempotent."""

import asyncio
import re
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.connection import end_tasks
from contract.jobs import JobStatus
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.clock import TEST_CLOCK
from tests.fleet import until
from tests.gateway.conftest import gateway_process
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model, says
from tests.streams import events_of as parsed
from tests.streams import whole_stream

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab"}
CHAT_BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"endpoint": "/v1/completions", "body": BODY}
CHAT = {"endpoint": "/v1/chat/completions", "body": CHAT_BODY}


async def submit(http: httpx.AsyncClient, job: dict[str, Any] | None = None) -> str:
    answer = await http.post("/v1/jobs", json=COMPLETION | (job or {}))
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def events(http: httpx.AsyncClient, job_id: str, **headers: str) -> list[str]:
    """A job's whole stream, one item per event, without comments."""
    answer = await http.get(f"/v1/jobs/{job_id}/events", headers=headers)
    assert answer.status_code == 200, answer.text
    return events_of(answer.text)


def events_of(text: str) -> list[str]:
    """The events of a stream, byte by byte, without its comments."""
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


async def test_a_result_is_never_a_part_of_one(worker: FakeWorker, http: httpx.AsyncClient) -> None:
    """After a failover of Redis the log may be shorter than the record that was read before."""
    job_id = await submit(http)
    await events(http, job_id)
    assert (await http.get(f"/v1/jobs/{job_id}")).json()["result"] is not None
    log = worker.keys.of("log", job_id)
    entries: Any = await worker.client.xrevrange(log, count=1)
    await worker.client.xdel(log, entries[0][0])

    answer = await http.get(f"/v1/jobs/{job_id}")

    assert answer.status_code == 503
    assert answer.headers["retry-after"]


async def test_a_follower_sees_a_job_wait_and_run(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """`queued` while it waits, each chunk as it comes, the job at the end."""
    job_id = await submit(http)
    async with http.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        stream = parsed(answer)
        assert (await anext(stream)).type == "queued"
        await idle_worker.run(await idle_worker.claim())
        types = [event.type async for event in stream if event.type != "queued"]
    assert types == ["message"] * 3 + ["succeeded"]


async def test_a_cancelled_job_ends_at_once_and_keeps_its_output(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """200 twice, 409 if it ended otherwise, 404 for an unknown job; nor can those be moved."""
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
    for job_id in (done, "job-0-" + "0" * 32, "x"):
        expected = (409, "already_terminal") if job_id == done else (404, "job_not_found")
        moved = await http.patch(f"/v1/jobs/{job_id}", json={"lane": "standard"})
        cancelled = await http.post(f"/v1/jobs/{job_id}/cancel")
        assert code_of(moved) == code_of(cancelled) == expected


@pytest.mark.parametrize("is_moved", [False, True])
async def test_a_job_without_workers_expires(
    redis_client: redis.asyncio.Redis, keys: Keys, http: httpx.AsyncClient, is_moved: bool
) -> None:
    """The gateway's sweep ends the job, and the follower gets the end; also at a deadline that was
    moved up, which leaves the lane."""
    await publish_model(redis_client, keys)
    job_id = await submit(http, {"lane": "batch"} | ({} if is_moved else {"deadline_s": 5}))
    if is_moved:
        answer = await http.patch(f"/v1/jobs/{job_id}", json={"deadline_s": 5})
        assert answer.json()["lane"] == "batch"
    async with http.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        stream = parsed(answer)
        assert (await anext(stream)).type == "queued"
        await redis_client.incrby(TEST_CLOCK, 6000)
        assert [event.type async for event in stream if event.type != "queued"] == ["expired"]
    assert (await http.get(f"/v1/jobs/{job_id}")).json()["status"] == "expired"


async def test_a_job_starts_at_its_time(
    redis_client: redis.asyncio.Redis, idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """It is told and listed with its start, followed from its submission on, moved, and started by
    a sweep of the gateway; a running job is not moved."""
    await redis_client.set(TEST_CLOCK, "=1700000000000")
    asked = {"start_at": 1_700_000_060.5, "deadline_s": 30}
    told = (await http.post("/v1/jobs", json=COMPLETION | asked)).json()
    assert (told["start_at"], told["position"], told["eta_s"]) == (1_700_000_060.5, None, None)
    [listed] = (await http.get("/v1/jobs", params={"status": "queued"})).json()["data"]
    assert listed["start_at"] == listed["timings"]["deadline_at"] - 30 == 1_700_000_060.5
    change = {"start_at": 1_700_000_010}
    moved = (await http.patch(f"/v1/jobs/{told['id']}", json=change)).json()
    assert moved["start_at"] == moved["timings"]["deadline_at"] - 30 == 1_700_000_010
    async with http.stream("GET", told["events_url"]) as answer:
        stream = parsed(answer)
        assert (await anext(stream)).data["position"] is None
        await redis_client.set(TEST_CLOCK, "=1700000012000")
        assert (await anext(stream)).data["position"] == 0
        await idle_worker.run(await idle_worker.claim())
        assert [event.type async for event in stream][-1] == "succeeded"
    job = (await http.get(f"/v1/jobs/{told['id']}")).json()
    assert (job["start_at"], job["wait_s"]) == (1_700_000_010, 2)
    again = await http.patch(f"/v1/jobs/{told['id']}", json={"start_at": 1_700_000_099})
    assert code_of(again) == (409, "already_terminal")
    running = await submit(http)
    await idle_worker.claim()
    late = await http.patch(f"/v1/jobs/{running}", json={"start_at": 1_700_000_099})
    assert code_of(late) == (409, "already_started")


async def test_a_waiting_job_changes_its_lane_and_its_turn(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """It overtakes jobs in its former lane."""
    first, second = [await submit(http, {"lane": "batch"}) for _ in range(2)]
    answer = await http.patch(f"/v1/jobs/{second}", json={"lane": "interactive"})
    assert (answer.status_code, answer.json()["lane"]) == (200, "interactive")
    assert [(await idle_worker.claim()).job.id for _ in range(2)] == [second, first]


async def test_a_running_job_s_worker_receives_the_change(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """Lane and deadline go to the worker while it runs."""
    job_id = await submit(http, {"lane": "batch"})
    await idle_worker.claim()
    async with idle_worker.client.pubsub() as pubsub:
        await pubsub.subscribe(idle_worker.keys.of("ctl", idle_worker.incarnation))
        async with asyncio.timeout(5):
            await anext(pubsub.listen())
            change = {"lane": "interactive", "deadline_s": 50}
            answer = await http.patch(f"/v1/jobs/{job_id}", json=change)
            message = (await anext(pubsub.listen()))["data"].decode()
    job = answer.json()
    assert (job["status"], job["lane"]) == ("running", "interactive")
    assert 45 < job["timings"]["deadline_at"] - job["timings"]["queued_at"] < 60
    assert message.startswith(f"moved {job_id} interactive ")


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
    assert code_of(other) == (422, "idempotency_mismatch")
    for key in ("a b", "x" * 10_000):
        bad = await http.post("/v1/completions", json=BODY, headers={"idempotency-key": key})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "Idempotency-Key")


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
        ({"start_at": -1}, "start_at", "invalid_value"),
        ({"start_at": "tomorrow"}, "start_at", "invalid_value"),
        ({"start_at": 9e9}, "start_at", "invalid_value"),
        ({"x": 1}, "x", "unknown_parameter"),
        ({"body": BODY | {"n": 9}}, "body.n", "invalid_value"),
        ({"body": BODY | {"model": "none"}}, "body.model", "model_not_found"),
        # OpenAI's bounds of metadata: 16 pairs, keys of 64, values of 512 characters.
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "invalid_value"),
        ({"metadata": {"k" * 65: ""}}, f"metadata.{'k' * 64}", "invalid_value"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k", "invalid_value"),
        ({"metadata": {"k": 1}}, "metadata.k", "invalid_value"),
        ({"retention_s": 59}, "retention_s", "invalid_value"),
        ({"retention_s": 31 * 86_400}, "retention_s", "invalid_value"),
    ],
)
async def test_a_wrong_job_names_its_parameter(
    idle_worker: FakeWorker, http: httpx.AsyncClient, fields: Any, param: str, code: str
) -> None:
    """Parameters of the inner body are named below `body`."""
    answer = await http.post("/v1/jobs", json=COMPLETION | fields)
    assert code_of(answer) == (400 if code != "model_not_found" else 404, code)
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({}, "lane", "missing_required_parameter"),
        ({"lane": "fast"}, "lane", "unknown_lane"),
        ({"lane": 1}, "lane", "invalid_value"),
        ({"deadline_s": 0}, "deadline_s", "invalid_value"),
        ({"deadline_s": 10**9}, "deadline_s", "invalid_value"),
        ({"start_at": 9e9}, "start_at", "invalid_value"),
        ({"body": {}}, "body", "unknown_parameter"),
    ],
)
async def test_a_wrong_change_names_its_parameter(
    idle_worker: FakeWorker, http: httpx.AsyncClient, change: Any, param: str, code: str
) -> None:
    """The job stays unchanged."""
    job_id = await submit(http, {"lane": "batch"})
    answer = await http.patch(f"/v1/jobs/{job_id}", json=change)
    assert code_of(answer) == (400, code)
    assert answer.json()["error"]["param"] == param
    assert (await http.get(f"/v1/jobs/{job_id}")).json()["lane"] == "batch"


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


async def test_a_killed_gateway_s_call_is_cancelled_once_nobody_attends_to_it(
    redis_server: EmbeddedRedis, idle_worker: FakeWorker
) -> None:
    """While the gateway lives, the job waits; then its attendance expires."""
    functions, attendance_s = idle_worker.functions, 1.0

    async def attended_until_ms() -> dict[bytes, float]:
        key = idle_worker.keys.of("attended")
        rows: Any = await idle_worker.client.zrange(key, 0, -1, withscores=True)
        return dict(rows)

    async def is_attended() -> bool:
        return bool(await attended_until_ms())

    async def is_attended_for_longer() -> bool:
        return (await attended_until_ms())[job_id] > first_ms + 1000 * attendance_s

    async def is_swept() -> bool:
        return (await functions.sweep()).num_unattended > 0

    with gateway_process(redis_server.url, BATCHWAY_ATTENDANCE_S=str(attendance_s)) as started:
        process, url = started
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            call = asyncio.create_task(http.post("/v1/completions", json=BODY))
            await until(is_attended)
            [(job_id, first_ms)] = (await attended_until_ms()).items()
            await until(is_attended_for_longer)
            assert (await functions.sweep()).num_unattended == 0
            process.kill()
            await until(is_swept)
            await end_tasks(call)
    found = await functions.read(job_id.decode(), "default")
    assert found is not None
    assert found[0].status is JobStatus.CANCELLED


@pytest.mark.parametrize(
    ("code", "status"),
    [("prompt_too_long", 400), ("bad_parameter", 400), ("engine_error", 500), ("retries", 500)],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_is_a_status(
    idle_worker: FakeWorker, http: httpx.AsyncClient, code: str, status: int, stream: bool
) -> None:
    """Also for streams: the status line waits for the first event."""
    call = asyncio.create_task(http.post("/v1/completions", json=BODY | {"stream": stream}))
    await idle_worker.finish(await idle_worker.claim(), 1, code, "it broke")
    answer = await call
    assert code_of(answer) == (status, code)
    assert answer.headers["x-job-id"].startswith("job-0-")


async def test_a_failure_within_a_stream_is_its_last_event(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """An error as data, then [DONE]."""
    call = asyncio.create_task(http.post("/v1/completions", json=BODY | {"stream": True}))
    claimed = await idle_worker.claim()
    await idle_worker.say(claimed, 1, says("a")(claimed.job)[0])
    await idle_worker.finish(claimed, 2, "engine_error", "it broke")
    assert whole_stream((await call).text)[-1].data["error"]["code"] == "engine_error"


async def test_an_expired_or_cancelled_call_gets_504_or_409(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """504 and 409, with a header that tells clients not to retry."""
    call = asyncio.create_task(http.post("/v1/completions", json=BODY))
    await idle_worker.claim()
    await idle_worker.client.incrby(TEST_CLOCK, 121_000)
    assert code_of(await call) == (504, "deadline_exceeded")
    await idle_worker.beat()
    call = asyncio.create_task(http.post("/v1/completions", json=BODY))
    claimed = await idle_worker.claim()
    await http.post(f"/v1/jobs/{claimed.job.id}/cancel")
    answer = await call
    assert code_of(answer) == (409, "cancelled")
    assert answer.headers["x-should-retry"] == "false"
