"""Responses as jobs: POST /v1/jobs, results, events, quotes, refusals."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from infra.embedded_redis import EmbeddedRedis
from tests.callbacks.receiver import SECRET, Answer, Receiver, always
from tests.callbacks.test_delivery import service
from tests.gateway.conftest import Gateways, answered, error_of
from tests.gateway.fake_worker import MODEL, FakeWorker, says
from tests.gateway.test_jobs import events, field, submit
from tests.gateway.test_responses_api import BODY, TOOL, client, thinks_and_calls

__all__ = ["client"]
pytestmark = pytest.mark.anyio

JOB: dict[str, Any] = {"endpoint": "/v1/responses", "body": BODY}


def response_of(job_id: str) -> str:
    return job_id.replace("job-", "resp_")


async def test_a_response_is_the_result_of_its_job(
    client: AsyncOpenAI, http: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    """Queued, then with the bytes that GET of the response gives; a call goes on from it."""
    idle_worker.script = thinks_and_calls
    body = {**BODY, "tools": [TOOL], "metadata": {"a": "1"}}
    job = {**JOB, "body": body, "metadata": {"b": "2"}, "lane": "batch"}
    job_id = await submit(http, job)
    response = await client.responses.retrieve(response_of(job_id))
    assert (response.status, response.metadata) == ("queued", {"a": "1"})
    await idle_worker.run(await idle_worker.claim())
    shown = await http.get(f"/v1/jobs/{job_id}")
    got = await http.get(f"/v1/responses/{response_of(job_id)}")
    assert b'"result":' + got.content in shown.content
    assert shown.json()["lane"] == "batch"
    assert got.json()["status"] == "completed"
    listed = await http.get("/v1/jobs", params={"metadata[a]": "1", "metadata[b]": "2"})
    assert [each["id"] for each in listed.json()["data"]] == [job_id]


async def test_a_failed_response_tells_why(
    http: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    """Its job has a result, the response with its error."""
    job_id = await submit(http, JOB)
    await idle_worker.finish(await idle_worker.claim(), 1, "engine_error", "broken")
    result = (await http.get(f"/v1/jobs/{job_id}")).json()["result"]
    assert (result["status"], result["output"]) == ("failed", [])
    assert result["error"] == {"code": "engine_error", "message": "broken"}


async def test_the_events_of_a_job_are_those_of_its_response(
    http: httpx.AsyncClient, worker: FakeWorker
) -> None:
    """The same from any event on; beside them the job's own."""
    worker.script = says("He", "ll", "o")
    job_id = await submit(http, JOB)
    streamed = [event for event in await events(http, job_id) if field(event, "event") != "queued"]
    told = [event for event in streamed if field(event, "event") is None]
    assert told.pop() == "data: [DONE]"
    got = await http.get(f"/v1/responses/{response_of(job_id)}", params={"stream": "true"})
    expected = [data for part in got.text.split("\n\n") if (data := field(part, "data"))]
    assert [field(event, "data") for event in told] == expected[: len(told)]
    assert [json.loads(data)["type"] for data in expected[-2:-1]] == ["response.completed"]
    assert len(told) == len(expected) - 1  # without [DONE]
    assert field(streamed[-2], "event") == "succeeded"
    for number, event in enumerate(streamed):
        if position := field(event, "id"):
            rest = await events(http, job_id, **{"last-event-id": position})
            assert rest == streamed[number + 1 :]


async def test_a_response_is_quoted(http: httpx.AsyncClient, worker: FakeWorker) -> None:
    body = {**BODY, "max_output_tokens": 7}
    shown = await answered(http, "/v1/quote", {**JOB, "body": body})
    assert (shown["endpoint"], shown["predicted_output_tokens"]) == ("/v1/responses", 7)
    assert shown["prompt_tokens"] > 0


@pytest.mark.parametrize("fields", [{"store": False}, {"on_disconnect": "cancel"}])
async def test_what_a_job_cannot_be_is_refused_by_its_field(
    http: httpx.AsyncClient, worker: FakeWorker, fields: dict[str, Any]
) -> None:
    """test_responses_api.py has what no response can be."""
    answer = await http.post("/v1/jobs", json={**JOB, "body": {**BODY, **fields}})
    [name] = fields
    assert error_of(answer)[1:] == (f"body.{name}", "invalid_value")
    assert worker.seen == []


async def test_a_job_is_found_by_its_idempotency_key(
    http: httpx.AsyncClient, worker: FakeWorker
) -> None:
    """One response for one key; another body is refused."""
    headers = {"idempotency-key": "k"}
    found = [await http.post("/v1/jobs", json=JOB, headers=headers) for _ in range(2)]
    assert found[0].json()["id"] == found[1].json()["id"]
    other = {**JOB, "body": {"model": MODEL, "input": "Other"}}
    assert (await http.post("/v1/jobs", json=other, headers=headers)).status_code == 422


async def test_what_has_no_effect_is_named(http: httpx.AsyncClient, worker: FakeWorker) -> None:
    """Metadata has one: it is shown."""
    body = {**BODY, "user": "u", "metadata": {"a": "b"}}
    answer = await http.post("/v1/jobs", json={**JOB, "body": body})
    assert answer.headers["x-ignored-parameters"] == "user"


STORED = {"object_min_bytes": 1}  # prompts and requests of jobs are in the object store
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
CHAT_TOOL = {"type": "function", "function": {"name": TOOL["name"]}}
TEXT = {"model": MODEL, "prompt": "Hi"}
# What is asked for beside the response's body, or instead of it; how it fails.
TOLD: list[tuple[str, dict[str, Any], dict[str, Any], str | None]] = [
    ("responses", BODY | {"tools": [TOOL]}, {}, None),
    ("responses", BODY | {"tools": [TOOL]}, STORED, None),
    ("responses", BODY, {}, "engine_error"),
    ("responses", BODY | {"top_logprobs": 1}, {}, None),
    ("chat/completions", CHAT | {"tools": [CHAT_TOOL], "n": 2}, {}, None),
    ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}, STORED, None),
    ("chat/completions", CHAT | {"prompt_logprobs": 1, "return_token_ids": True}, STORED, None),
    ("completions", TEXT | {"logprobs": 1, "echo": True}, STORED, None),
    ("completions", TEXT | {"prompt": ["a", "b"], "return_token_ids": True}, {}, None),
    ("completions", TEXT, {}, "engine_error"),
]


@pytest.mark.parametrize(("endpoint", "body", "options", "code"), TOLD)
async def test_a_full_callback_has_the_answer(
    redis_server: EmbeddedRedis,
    gateways: Gateways,
    idle_worker: FakeWorker,
    tmp_path: Path,
    endpoint: str,
    body: dict[str, Any],
    options: dict[str, Any],
    code: str | None,
) -> None:
    """As the job has it: text, reasoning, calls, log probabilities."""
    store = str(tmp_path)
    idle_worker.script = thinks_and_calls if "tools" in body else says("Hello")
    async with (
        Receiver({"/": always(Answer())}) as receiver,
        service(redis_server, object_store=store),
        gateways(object_store=store, callback_allow=("127.0.0.0/8",), **options) as http,
    ):
        callback = {"url": receiver.url("/"), "secret": SECRET, "payload": "full"}
        job = {"endpoint": f"/v1/{endpoint}", "body": body, "callback": callback}
        job_id = await submit(http, job)
        claimed = await idle_worker.claim()
        assert claimed.job.has_objects is (options == STORED)
        if code is None:
            await idle_worker.run(claimed)
        else:
            await idle_worker.finish(claimed, 1, code, "broken")
        result = (await http.get(f"/v1/jobs/{job_id}")).json()["result"]
        await receiver.until(lambda: len(receiver.messages) == 1)
    data = receiver.messages[0].body["data"]
    if endpoint == "responses":
        assert (data["response"], "choices" in data) == (result, False)
    elif code is None:
        own = {"id", "object", "created", "model", "system_fingerprint", "usage"}
        assert {name: data[name] for name in result.keys() - own} == {
            name: each for name, each in result.items() if name not in own
        }
    assert data["result_url"] == f"/v1/jobs/{job_id}"


@pytest.mark.parametrize("options", [{}, STORED], ids=["Redis", "store"])
async def test_a_callback_says_where_many_log_probabilities_are(
    redis_server: EmbeddedRedis,
    gateways: Gateways,
    idle_worker: FakeWorker,
    tmp_path: Path,
    options: dict[str, Any],
) -> None:
    """Those over the size of a message; and where the message's sender has no object store."""
    idle_worker.script = says("x" * (10 if options else 400))
    async with (
        Receiver({"/": always(Answer())}) as receiver,
        service(redis_server),
        gateways(object_store=str(tmp_path), callback_allow=("127.0.0.0/8",), **options) as http,
    ):
        callback = {"url": receiver.url("/"), "secret": SECRET, "payload": "full"}
        body = CHAT | {"logprobs": True, "top_logprobs": 20, "max_tokens": 400}
        await submit(http, {"endpoint": "/v1/chat/completions", "body": body, "callback": callback})
        await idle_worker.run(await idle_worker.claim())
        await receiver.until(lambda: len(receiver.messages) == 1)
    assert "choices" not in receiver.messages[0].body["data"]
