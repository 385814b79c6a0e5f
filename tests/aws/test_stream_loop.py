"""StreamFunction's own loop: chunks leave as they are produced, and ends of all kinds are told."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from contract.functions import Functions
from contract.jobs import JobStatus
from gateway.http.app import create_app
from infra.embedded_redis import EmbeddedRedis
from tests.aws.lambda_events import KEY, http_event, rest_event, sqs_event
from tests.aws.runtime_server import RuntimeServer, looping
from tests.gateway.conftest import make_settings
from tests.gateway.fake_worker import MODEL, FakeWorker, says

pytestmark = pytest.mark.anyio

CALL = rest_event("POST", "/v1/completions", {"model": MODEL, "prompt": "ab", "stream": True})


@pytest.fixture
async def runtime(redis_server: EmbeddedRedis) -> AsyncIterator[RuntimeServer]:
    app = create_app(make_settings(redis_server.url, api_key=KEY))
    async with app.router.lifespan_context(app), looping(app) as server:
        yield server


@pytest.mark.parametrize("event", [rest_event, http_event], ids=["rest", "http"])
async def test_chunks_arrive_as_they_are_produced(
    event: Any, runtime: RuntimeServer, idle_worker: FakeWorker
) -> None:
    """Each event of the job is on the wire before the worker says the next one."""
    reply = runtime.send(
        event("POST", "/v1/completions", {"model": MODEL, "prompt": "ab", "stream": True})
    )
    claimed = await idle_worker.claim()

    first, second = says("one", "two")(claimed.job)
    await idle_worker.say(claimed, 1, first)
    await reply.until(b'"one"')
    assert b'"two"' not in reply.content
    await idle_worker.say(claimed, 2, second)
    await reply.until(b'"two"')
    assert not reply.over.is_set()
    await idle_worker.finish(claimed, 3)
    await reply.over.wait()

    assert reply.content.endswith(b"data: [DONE]\n\n")
    assert reply.prelude["statusCode"] == 200
    assert reply.prelude["multiValueHeaders"]["content-type"] == [
        "text/event-stream; charset=utf-8"
    ]
    assert reply.headers[b"lambda-runtime-function-response-mode"] == b"streaming"
    assert reply.headers[b"content-type"] == b"application/vnd.awslambda.http-integration-response"
    assert not reply.trailers


async def test_what_is_no_stream_is_answered_too(
    runtime: RuntimeServer, worker: FakeWorker
) -> None:
    """One event after the other: whole answers, errors, what is no request at all."""
    whole = runtime.send(rest_event("POST", "/v1/completions", {"model": MODEL, "prompt": "a"}))
    missing = runtime.send(rest_event("GET", "/v1/jobs/job-0-" + "0" * 32 + "/events"))
    message = runtime.send(sqs_event(("m", "{}")))
    alive = runtime.send(rest_event("GET", "/livez"))
    await alive.over.wait()

    assert json.loads(whole.content)["choices"][0]["text"] == "Hello wörld!"
    assert missing.prelude["statusCode"] == 404
    assert message.error is not None
    assert message.error["errorType"] == "Batchway.UnknownEvent"
    assert json.loads(alive.content) == {"status": "alive"}


async def test_a_client_that_is_gone_ends_its_job(
    runtime: RuntimeServer, idle_worker: FakeWorker
) -> None:
    """Where Lambda closes the answer's connection; the next event finds the loop ready."""
    reply = runtime.send(CALL)
    claimed = await idle_worker.claim()
    await idle_worker.say(claimed, 1, says("one", "two")(claimed.job)[0])
    await reply.until(b'"one"')

    runtime.hang_up(reply)

    assert await idle_worker.wait_until_ended(claimed) is JobStatus.CANCELLED
    alive = runtime.send(rest_event("GET", "/livez"))
    await alive.over.wait()
    assert alive.prelude["statusCode"] == 200


async def test_a_call_that_needs_more_time_becomes_a_job(
    runtime: RuntimeServer, idle_worker: FakeWorker
) -> None:
    """Its stream ends in order while there is time to say so, and the job goes on."""
    reply = runtime.send(CALL, time_left_s=5.0)
    claimed = await idle_worker.claim()
    await idle_worker.say(claimed, 1, says("one", "two")(claimed.job)[0])
    await reply.over.wait()

    assert not reply.trailers
    assert claimed.job.id.encode() in reply.content
    assert await idle_worker.beat(claimed) == []  # nobody has cancelled it


async def test_a_stream_of_a_job_goes_on_in_the_next_invocation(
    runtime: RuntimeServer, idle_worker: FakeWorker, functions: Functions
) -> None:
    """From the last event that arrived: a job outlives the function's fifteen minutes."""
    submitted = runtime.send(
        rest_event(
            "POST",
            "/v1/jobs",
            {"endpoint": "/v1/completions", "body": {"model": MODEL, "prompt": "ab"}},
        )
    )
    claimed = await idle_worker.claim()
    path = f"/v1/jobs/{claimed.job.id}/events"
    await submitted.over.wait()
    first, second = says("one", "two")(claimed.job)
    cut = runtime.send(rest_event("GET", path), time_left_s=2.5)
    await idle_worker.say(claimed, 1, first)
    await cut.until(b'"one"')
    await cut.over.wait()
    assert cut.trailers[b"lambda-runtime-function-error-type"] == b"Batchway.AnswerCut"
    last_id = next(
        line.removeprefix("id: ")
        for line in cut.content.decode().splitlines()
        if line.startswith("id: ")
    )

    rest = runtime.send(rest_event("GET", path, headers={"Last-Event-ID": last_id}))
    await idle_worker.say(claimed, 2, second)
    await idle_worker.finish(claimed, 3)
    await rest.over.wait()

    assert b'"one"' not in rest.content
    assert b'"two"' in rest.content
    assert rest.content.endswith(b"data: [DONE]\n\n")


async def test_an_error_in_mid_stream_is_told_in_a_trailer() -> None:
    """Status and headers have gone: Lambda hears of it behind the body."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("a prompt: secret")

    async with looping(app) as runtime:
        reply = runtime.send(CALL)
        await reply.over.wait()

    assert reply.content == b"half"
    error = json.loads(base64.b64decode(reply.trailers[b"lambda-runtime-function-error-body"]))
    assert error["errorType"] == "Batchway.AnswerCut"
    assert "secret" not in str(error)


async def test_an_app_that_fails_before_it_answers_is_an_error() -> None:
    """Nothing was sent, so nothing is promised."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError

    async with looping(app) as runtime:
        reply = runtime.send(CALL)
        await reply.over.wait()
        await asyncio.sleep(0)

    assert not reply.content
    assert b"lambda-runtime-function-error-type" in reply.headers


async def test_a_worker_that_fails_in_mid_stream_ends_the_stream_in_order(
    runtime: RuntimeServer, idle_worker: FakeWorker
) -> None:
    """The caller reads an error event, and to Lambda the answer is complete."""
    reply = runtime.send(CALL)
    claimed = await idle_worker.claim()
    await idle_worker.say(claimed, 1, says("one", "two")(claimed.job)[0])
    await idle_worker.finish(claimed, 2, code="engine_error", message="broken")
    await reply.over.wait()

    assert b'"engine_error"' in reply.content
    assert reply.content.endswith(b"data: [DONE]\n\n")
    assert not reply.trailers


async def test_an_answer_that_nobody_takes_is_ended() -> None:
    """Connected still, but nothing is read: the app is told, and the next event is answered."""
    is_told = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/livez":
            await send({"type": "http.response.body", "body": b"alive"})
            return
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x" * 10**6, "more_body": True})
        except OSError:
            is_told.set()

    async with looping(app, stall_s=0.2) as runtime:
        runtime.takes.clear()
        runtime.send(CALL)
        async with asyncio.timeout(20):
            await is_told.wait()
            alive = runtime.send(rest_event("GET", "/livez"))
            await runtime.has_handed_out_all()
            runtime.takes.set()
            await alive.over.wait()
    assert alive.content == b"alive"
