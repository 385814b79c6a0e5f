"""`batchway up` and the functions on one Redis give the same responses, byte by byte."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from gateway.settings import GatewaySettings
from infra.embedded_redis import EmbeddedRedis
from tests.aws.conftest import Invoke, running_function
from tests.aws.emulator import serving_web
from tests.aws.lambda_events import HEADERS, rest_event
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
    """Settings of a function on the same Redis."""
    return GatewaySettings(
        redis_url=redis_server.url, namespace=NAMESPACE, allowed_hosts=(HEADERS["Host"],)
    )


@pytest.fixture
async def api_function(settings: GatewaySettings, local_url: str) -> AsyncIterator[Invoke]:
    async with running_function(settings) as invoke:
        yield invoke


@pytest.fixture
async def stream_url(redis_server: EmbeddedRedis) -> AsyncIterator[str]:
    """StreamFunction's program."""
    own = {"REDIS_URL": redis_server.url, "BATCHWAY_NAMESPACE": NAMESPACE}
    async with serving_web(own | {"BATCHWAY_REQUIRE_KEY": "0"}) as url:
        yield url


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/completions", COMPLETION, 200),
        ("POST", "/v1/completions", COMPLETION | {"n": 2, "logprobs": 2}, 200),
        ("POST", "/v1/completions", COMPLETION | {"return_token_ids": True, "echo": True}, 200),
        ("POST", "/v1/chat/completions", {"model": MODEL} | MESSAGES, 200),
        ("POST", "/v1/chat/completions", {"model": "none"} | MESSAGES, 404),
        ("POST", "/v1/completions", {"model": MODEL, "prompt": "a" * 9_999}, 400),
        ("POST", "/v1/embeddings", {"model": MODEL, "input": "a"}, 400),
        ("POST", "/v1/responses", {"model": MODEL, "input": "a", "prompt": {}}, 400),
        ("GET", "/v1/responses/resp_0-" + "0" * 32, None, 404),
        ("POST", "/v1/jobs", {"endpoint": "/v1/completions"}, 400),
        ("GET", "/v1/jobs/job-0-" + "0" * 32, None, 404),
        ("GET", "/v1/models", None, 200),
        ("GET", "/v1/nothing", None, 404),
    ],
)
async def test_both_deployments_answer_a_request_equally(
    method: str, path: str, body: Any, status: int, local_url: str, api_function: Invoke
) -> None:
    """By the whole local stack and through Lambda; ids and times are blanked."""
    async with httpx.AsyncClient(base_url=local_url, timeout=60) as http:
        local = await http.request(method, path, json=body)
    on_lambda = await api_function(rest_event(method, path, body))

    assert local.status_code == on_lambda["statusCode"] == status, local.text
    assert without_ids(local.content) == without_ids(on_lambda["body"].encode())
    assert local.headers["content-type"] == on_lambda["headers"]["content-type"]


async def test_both_deployments_show_a_job_equally(
    local_url: str, api_function: Invoke, stream_url: str
) -> None:
    """A job submitted through Lambda and run by the local worker: object and stream, with ids and
    times."""
    job = {"endpoint": "/v1/completions", "body": COMPLETION, "metadata": {"a": "b"}}
    made = json.loads((await api_function(rest_event("POST", "/v1/jobs", job)))["body"])
    shown, events = f"/v1/jobs/{made['id']}", f"/v1/jobs/{made['id']}/events"

    async with httpx.AsyncClient(base_url=local_url, timeout=60) as http:
        await http.get(events)  # returns at the end of the job
        local_stream, local = await http.get(events), await http.get(shown)
    on_lambda = await api_function(rest_event("GET", shown))
    async with httpx.AsyncClient(base_url=stream_url, timeout=60) as http:
        streamed = await http.get(events)

    assert json.loads(local.content)["status"] == "succeeded"
    assert local.content == on_lambda["body"].encode()
    assert local_stream.content == streamed.content
    assert streamed.content.endswith(b"data: [DONE]\n\n")


def without_ids(body: bytes) -> bytes:
    """The response without its id, its creation time and what it found in the cache."""
    found = json.loads(body)
    if "created" not in found:
        return body
    body = body.replace(found["id"].encode(), b"ID")
    body = re.sub(rb'"cached_tokens":\d+', b'"cached_tokens":N', body)
    return re.sub(rb'"created":%d\b' % found["created"], b'"created":T', body)
