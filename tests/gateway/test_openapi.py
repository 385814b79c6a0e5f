"""The OpenAPI document is correct: schemathesis sends requests that it permits and others, and
each response must be one that it announces."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openapi_spec_validator import validate
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from contract.connection import connect, end_tasks
from contract.functions import Functions
from contract.jobs import new_job_id
from contract.keys import Keys
from contract.library import ensure_library
from gateway.http.app import create_app
from gateway.openai.schemas import ChatBody, ChatJob, CompletionBody, CompletionJob, JobChange
from gateway.settings import GatewaySettings
from infra.embedded_redis import EmbeddedRedis
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model, says

NUM_EXAMPLES = 10  # of each operation, good ones and bad ones
CALL = {"model": MODEL, "prompt": "ab", "max_tokens": 8}
CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
# There is nothing to be found, or its time is over.
REFUSED = {
    ("GET", "/v1/callbacks/dead/{job_id}"),
    ("POST", "/v1/callbacks/dead/{job_id}/replay"),
    ("POST", "/v1/jobs/{job_id}/cancel"),
    ("PATCH", "/v1/jobs/{job_id}"),
    ("GET", "/v1/objects/{job_id}/{name}"),
    ("GET", "/v1/models/{model_id}"),
}


async def work(redis_url: str, has_begun: threading.Event, ending: threading.Event) -> None:
    """A fake worker that serves and sends heartbeats."""
    client, keys = connect(redis_url), Keys("test")
    await client.flushall()
    await ensure_library(client)
    await publish_model(client, keys)
    worker = FakeWorker(Functions(client, keys), script=says("a"))  # no more than any job allows
    serving = asyncio.create_task(worker.serve())
    try:
        while not ending.is_set() and not serving.done():
            await worker.beat()
            has_begun.set()
            await asyncio.to_thread(ending.wait, 1.0)
        assert not serving.done(), serving
    finally:
        await end_tasks(serving)
        await client.aclose()


@contextlib.contextmanager
def running_worker(redis_url: str) -> Iterator[None]:
    has_begun, ending = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(work(redis_url, has_begun, ending)))
    thread.start()
    try:
        assert has_begun.wait(20)
        yield
    finally:
        ending.set()
        thread.join(20)


@pytest.fixture(scope="module")
def url(redis_server: EmbeddedRedis) -> Iterator[str]:
    """The URL of a gateway with a worker."""
    gateway = running_gateway(make_settings(redis_server.url))
    with running_worker(redis_server.url), gateway as url:
        yield url


def some_job_ids(url: str) -> list[str]:
    """Ids of running jobs, of an ended one, and of none."""
    job = {"endpoint": "/v1/completions", "body": CALL}
    known = [httpx.post(f"{url}/v1/jobs", json=job).json()["id"] for _ in range(3)]
    httpx.get(f"{url}/v1/jobs/{known[0]}/events", timeout=20)  # to its end
    return [*known, new_job_id(), "no id"]


# Valid only together with certain values of other fields.
_ONLY_WITH_OTHERS = (
    "best_of", "min_tokens", "parallel_tool_calls", "stop_token_ids", "stream_options",
    "tool_choice", "tools", "top_logprobs",
)  # fmt: skip


def generator() -> Any:
    """The document, limited to what the worker can serve, as schemathesis reads it."""
    document = create_app(GatewaySettings(redis_url="redis://127.0.0.1:1")).openapi()
    schemas = document["components"]["schemas"]
    for name in ("ChatBody", "CompletionBody"):
        fields = schemas[name]["properties"]
        fields["model"] = {"type": "string", "enum": [MODEL]}
        for length in {"max_tokens", "max_completion_tokens"} & set(fields):
            fields[length]["anyOf"][0]["maximum"] = 300
        for name in _ONLY_WITH_OTHERS:
            fields.pop(name, None)
    message = schemas["Message"]
    message["required"] = ["role", "content"]  # optional only for assistants
    message["properties"]["role"]["enum"].remove("tool")
    for name in ("tool_calls", "tool_call_id", "reasoning_content"):
        del message["properties"][name]
    text = {"type": "string", "minLength": 1}  # token ids would have to fit the vocabulary
    several = {"type": "array", "minItems": 1, "maxItems": 3, "items": text}
    schemas["CompletionBody"]["properties"]["prompt"] = {"anyOf": [text, several]}
    for path in ("/v1/chat/completions", "/v1/completions"):
        asked = document["paths"][path]["post"]
        going_on = ("Last-Event-ID", "starting_after")  # good only after an earlier call
        asked["parameters"] = [p for p in asked["parameters"] if p["name"] not in going_on]
    return schemathesis.openapi.from_dict(document)


schema = generator()


def error_shape(_context: Any, response: Any, _case: Any) -> None:
    """Checks the format of errors, and that none is a 5xx of the gateway."""
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    assert response.headers["x-request-id"]


def questions() -> Iterator[tuple[str, str, GenerationMode]]:
    """Valid requests of each operation, and invalid ones where possible."""
    operations = [(method.upper(), path) for path in schema for method in schema[path]]
    for method, path in sorted(operations):
        yield method, path, GenerationMode.POSITIVE
        raw = schema[path][method].definition.raw
        if raw.get("parameters") or "requestBody" in raw:
            yield method, path, GenerationMode.NEGATIVE


@pytest.mark.campaign
@pytest.mark.parametrize(("method", "path", "mode"), list(questions()))
def test_every_answer_is_announced(url: str, method: str, path: str, mode: GenerationMode) -> None:
    """Status, media type, headers and format."""
    operation = schema[path][method]
    ids: list[dict[str, Any]] = [{}]
    if "{job_id}" in path and mode is GenerationMode.POSITIVE:
        ids = [{"job_id": job_id} for job_id in some_job_ids(url)]
    cases = st.one_of([operation.as_strategy(mode, path_parameters=given) for given in ids])

    statuses = set()

    @settings(
        max_examples=NUM_EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def ask(case: Any) -> None:
        answer = case.call_and_validate(
            base_url=url, checks=CHECKS, additional_checks=[error_shape], timeout=20
        )
        statuses.add(answer.status_code)

    ask()
    if mode is GenerationMode.POSITIVE and (method, path) not in REFUSED:
        assert statuses & {200, 202}, statuses


def test_the_document_is_valid() -> None:
    """By OpenAPI's specification. All errors have one format."""
    document = create_app(GatewaySettings(redis_url="redis://127.0.0.1:1")).openapi()
    validate(document)
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_bodies_are_described_as_they_are_checked() -> None:
    """Each field of a call is in the document, and no other may be sent."""
    schemas = create_app(GatewaySettings(redis_url="redis://127.0.0.1:1")).openapi()["components"][
        "schemas"
    ]
    for model in (ChatBody, CompletionBody, ChatJob, CompletionJob, JobChange):
        described = schemas[model.__name__]
        assert set(described["properties"]) == set(model.model_fields)
        assert described["additionalProperties"] is False
    assert "lambda" in schemas["CallbackBody"]["properties"]
