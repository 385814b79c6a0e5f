"""`batchway up` and the functions in front of one Redis: what both answer, byte by byte."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from gateway.http.app import create_app
from gateway.settings import GatewaySettings
from infra.embedded_redis import EmbeddedRedis
from tests.aws.conftest import Invoke, running_function
from tests.aws.lambda_events import HEADERS, rest_event
from tests.aws.runtime_server import RuntimeServer, looping
from tests.infra.stack import MODEL, running_stack

pytestmark = [pytest.mark.anyio, pytest.mark.e2e]

NAMESPACE = "same"
COMPLETION = {
    "model": MODEL,
    "prompt": "Ünï \u2028",
    "max_tokens": 24,
    "ignore_eos": True,
    "seed": 1,  # the same tokens for both
}
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}], "seed": 1}


@pytest.fixture(scope="module")
def local_url(redis_server: EmbeddedRedis) -> Iterator[str]:
    with running_stack(f"--redis-url={redis_server.url}", f"--namespace={NAMESPACE}") as stack:
        yield stack.url


@pytest.fixture
def settings(redis_server: EmbeddedRedis) -> GatewaySettings:
    """Of a function that stands in front of the same Redis."""
    return GatewaySettings(
        redis_url=redis_server.url, namespace=NAMESPACE, allowed_hosts=(HEADERS["Host"],)
    )


@pytest.fixture
async def api_function(settings: GatewaySettings, local_url: str) -> AsyncIterator[Invoke]:
    async with running_function(settings) as invoke:
        yield invoke


@pytest.fixture
async def stream_function(settings: GatewaySettings) -> AsyncIterator[RuntimeServer]:
    app = create_app(settings)
    async with app.router.lifespan_context(app), looping(app) as runtime:
        yield runtime


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/completions", COMPLETION, 200),
        ("POST", "/v1/completions", COMPLETION | {"n": 2, "logprobs": 2}, 200),
        ("POST", "/v1/completions", COMPLETION | {"return_token_ids": True, "echo": True}, 200),
        ("POST", "/v1/chat/completions", {"model": MODEL} | MESSAGES, 200),
        ("POST", "/v1/chat/completions", {"model": "none"} | MESSAGES, 404),
        ("POST", "/v1/completions", {"model": MODEL, "prompt": "a" * 9_999}, 400),
        ("POST", "/v1/jobs", {"endpoint": "/v1/completions"}, 400),
        ("GET", "/v1/jobs/job-0-" + "0" * 32, None, 404),
        ("GET", "/v1/models", None, 200),
        ("GET", "/v1/nothing", None, 404),
    ],
)
async def test_a_request_is_answered_alike(
    method: str, path: str, body: Any, status: int, local_url: str, api_function: Invoke
) -> None:
    """By the whole local stack and through Lambda; ids and times are blanked."""
    async with httpx.AsyncClient(base_url=local_url, timeout=60) as http:
        local = await http.request(method, path, json=body)
    on_lambda = await api_function(rest_event(method, path, body))

    assert local.status_code == on_lambda["statusCode"] == status, local.text
    assert without_ids(local.content) == without_ids(on_lambda["body"].encode())
    assert local.headers["content-type"] == on_lambda["headers"]["content-type"]


async def test_one_job_is_shown_alike(
    local_url: str, api_function: Invoke, stream_function: RuntimeServer
) -> None:
    """Made through Lambda, run by the local worker: object and stream, ids and times included."""
    job = {"endpoint": "/v1/completions", "body": COMPLETION, "metadata": {"a": "b"}}
    made = json.loads((await api_function(rest_event("POST", "/v1/jobs", job)))["body"])
    shown, events = f"/v1/jobs/{made['id']}", f"/v1/jobs/{made['id']}/events"

    async with httpx.AsyncClient(base_url=local_url, timeout=60) as http:
        await http.get(events)  # it has ended then
        local_stream, local = await http.get(events), await http.get(shown)
    on_lambda = await api_function(rest_event("GET", shown))
    streamed = stream_function.send(rest_event("GET", events))
    await streamed.over.wait()

    assert json.loads(local.content)["status"] == "succeeded"
    assert local.content == on_lambda["body"].encode()
    assert local_stream.content == streamed.content
    assert streamed.content.endswith(b"data: [DONE]\n\n")


def without_ids(body: bytes) -> bytes:
    """The answer as it was sent, but for its id and the second in which it was made."""
    found = json.loads(body)
    if "created" not in found:
        return body
    body = body.replace(found["id"].encode(), b"ID")
    return re.sub(rb'"created":%d\b' % found["created"], b'"created":T', body)
