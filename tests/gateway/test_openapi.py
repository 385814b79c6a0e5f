"""The OpenAPI document is correct: schemathesis sends requests that it permits and others, and
each response must be one that it announces.
"""

import asyncio
import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, get_args

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract.connection import connect, end_tasks
from contract.functions import Functions
from contract.jobs import Endpoint
from contract.keys import Keys, new_job_id
from contract.library import ensure_library
from gateway.prepare.job_bodies import AnyJob, CallbackBody, CallBody, JobChange
from gateway.prepare.messages import MessagesBody, PromptBody
from gateway.prepare.response_bodies import ResponseBody
from gateway.routes.batches import BatchBody
from infra.embedded_redis import EmbeddedRedis
from tests.gateway.conftest import make_settings, openapi_document, operations, running_gateway
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model, says
from tests.gateway.vector_worker import (
    CLASSIFIER,
    PLAIN,
    RERANKER,
    publish_vector_model,
    vector_worker,
)

# The gateway's threads are of this process; where Redis is slow to answer, they draw random pauses.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
NUM_EXAMPLES = {"positive": 10, "negative": 5}  # of each operation
# The models that answer, by the call's body.
VECTOR_MODELS = {
    "EmbeddingsBody": PLAIN,
    "RerankBody": RERANKER,
    "ScoreBody": RERANKER,
    "ClassifyBody": CLASSIFIER,
}
CALLS = [endpoint.value for endpoint in Endpoint]
CALL = {"model": MODEL, "prompt": "ab", "max_tokens": 8}
# There is nothing to be found, or its time is over.
REFUSED = {
    ("GET", "/v1/callbacks/dead/{job_id}"),
    ("POST", "/v1/callbacks/dead/{job_id}/replay"),
    ("POST", "/v1/jobs/{job_id}/cancel"),
    ("PATCH", "/v1/jobs/{job_id}"),
    ("GET", "/v1/objects/{job_id}/{name}"),
    ("GET", "/v1/models/{model_id}"),
    ("POST", "/v1/batches"),  # of no file
    ("POST", "/v1/batches/{batch_id}/cancel"),
    ("POST", "/v1/operations/{operation_id}/cancel"),
}
# What is paused, so that it can be resumed.
PAUSES = [
    {"tenant": "paused", **lane, **model}
    for lane in ({}, {"lane": "batch"})
    for model in ({}, {"model": MODEL})
]


async def work(redis_url: str, has_begun: threading.Event, ending: threading.Event) -> None:
    """A fake worker that serves and sends heartbeats."""
    keys = Keys("test")
    client = connect(redis_url, keys)
    await client.flushall()
    await ensure_library(client)
    await publish_model(client, keys)
    functions = Functions(client, keys)
    workers = [FakeWorker(functions, script=says("a"))]  # no more than any job allows
    for name in set(VECTOR_MODELS.values()):
        await publish_vector_model(client, keys, name)
        workers.append(vector_worker(functions, name))
    serving = [asyncio.create_task(worker.serve()) for worker in workers]
    try:
        while not ending.is_set() and not any(task.done() for task in serving):
            for worker in workers:
                await worker.beat()
            has_begun.set()
            await asyncio.to_thread(ending.wait, 1.0)
        assert not any(task.done() for task in serving), serving
    finally:
        await end_tasks(*serving)
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
def url(redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a gateway with a worker and an object store."""
    store = str(tmp_path_factory.mktemp("objects"))
    gateway = running_gateway(make_settings(redis_server.url, object_store=store))
    with running_worker(redis_server.url), gateway as url:
        for pause in PAUSES:
            assert httpx.post(f"{url}/v1/lanes/pause", json=pause).status_code == 200
        yield url


def made(url: str, path: str, *bodies: Any) -> list[str]:
    """Ids of what these calls make, and of none."""
    return [*(httpx.post(url + path, json=body).json()["id"] for body in bodies), "no id"]


def some_job_ids(url: str) -> list[str]:
    """Ids of running jobs, of an ended one, and of none."""
    ids = made(url, "/v1/jobs", *[{"endpoint": "/v1/completions", "body": CALL}] * 3)
    httpx.get(f"{url}/v1/jobs/{ids[0]}/events", timeout=20)  # to its end
    return [*ids, new_job_id()]


def some_response_ids(url: str) -> list[str]:
    """Ids of responses in the background, and of none."""
    asked = {"model": MODEL, "input": "a", "background": True, "max_output_tokens": 8}
    return made(url, "/v1/responses", *[asked] * 3)


def some_chat_ids(url: str) -> list[str]:
    """Ids of stored chats, and of none."""
    messages = [{"role": "user", "content": "a"}]
    asked = {"model": MODEL, "messages": messages, "store": True, "max_tokens": 4}
    return [*made(url, "/v1/chat/completions", *[asked] * 3), "no id"]


def some_file_ids(url: str) -> list[str]:
    """Ids of files, and of none."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": CALL}
    content, data = {"file": ("a.jsonl", json.dumps(line))}, {"purpose": "batch"}
    known = [httpx.post(f"{url}/v1/files", files=content, data=data).json()["id"] for _ in range(3)]
    return [*known, "no id"]


def some_batch_ids(url: str) -> list[str]:
    """Ids of a batch, and of none."""
    asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
    asked["input_file_id"] = some_file_ids(url)[0]
    later = asked | {"start_at": time.time() + 86_400}
    return made(url, "/v1/batches", *[later] * 3)


def some_upload_ids(url: str) -> list[str]:
    """Ids of uploads without bytes and with some, and of none."""
    asked = {"purpose": "batch", "filename": "a.jsonl", "mime_type": "text/plain"}
    return made(url, "/v1/uploads", *(asked | {"bytes": size} for size in (0, 10**6, 10**6)))


SOME_IDS: dict[str, Callable[[str], list[str]]] = {
    "operation_id": lambda url: made(url, "/v1/jobs/cancel", {"metadata": {"none": "has this"}}),
    "worker_id": lambda url: ["w1", "nobody"],
    "job_id": some_job_ids,
    "response_id": some_response_ids,
    "chat_id": some_chat_ids,
    "file_id": some_file_ids,
    "batch_id": some_batch_ids,
    "upload_id": some_upload_ids,
}
# Valid only together with certain values of other fields.
_ONLY_WITH_OTHERS = (
    "add_generation_prompt", "allowed_token_ids", "best_of", "chat_template", "documents",
    "min_tokens", "parallel_tool_calls", "stop_token_ids", "stream_options", "tool_choice", "tools",
    "top_logprobs",
)  # fmt: skip


@functools.cache
def generator() -> Any:
    """The document, limited to what the worker can serve, as schemathesis reads it."""
    document = openapi_document()
    schemas = document["components"]["schemas"]
    responses = ("ResponseBody", "InputTokensBody")
    tokenized = ("TokenizedChat", "TokenizedPrompt")
    for name in ("ChatBody", "CompletionBody", *tokenized, *responses):
        fields = schemas[name]["properties"]
        fields["model"] = {"type": "string", "enum": [MODEL]}
        for length in {"max_tokens", "max_completion_tokens", "max_output_tokens"} & set(fields):
            fields[length]["anyOf"][0]["maximum"] = 300
        for name in _ONLY_WITH_OTHERS:
            fields.pop(name, None)
    for name, model in VECTOR_MODELS.items():
        schemas[name]["properties"]["model"] = {"type": "string", "enum": [model]}
    for name in ("dimensions", "input_type"):  # by the model
        del schemas["EmbeddingsBody"]["properties"][name]
    text = {"type": "string", "minLength": 1}  # token ids would have to fit the vocabulary
    for name in responses:
        fields = schemas[name]["properties"]
        for other in ("background", "previous_response_id", "store", "text"):
            del fields[other]  # see _ONLY_WITH_OTHERS
        fields["input"] = text
        schemas[name]["required"] = ["model", "input"]
    for name in ("MessagesBody", "PromptBody"):
        fields = schemas[name]["properties"]
        fields["model"] = {"type": "string", "enum": [MODEL]}
        turn = {"role": {"const": "user"}, "content": text}
        turn_schema = {"type": "object", "properties": turn, "required": [*turn]}
        fields["messages"] = {"type": "array", "minItems": 1, "maxItems": 3, "items": turn_schema}
        for other in ("tools", "tool_choice", "thinking", "output_config"):
            del fields[other]  # see _ONLY_WITH_OTHERS
    schemas["MessagesBody"]["properties"]["max_tokens"]["maximum"] = 300
    schemas["PauseBody"]["required"] = ["tenant"]
    for name, value in PAUSES[-1].items():
        schemas["PauseBody"]["properties"][name] = {"type": "string", "enum": [value]}
    message = schemas["Message"]
    message["required"] = ["role", "content"]  # optional only for assistants
    message["properties"]["role"]["enum"].remove("tool")
    for name in ("tool_calls", "tool_call_id", "reasoning_content"):
        del message["properties"][name]
    several = {"type": "array", "minItems": 1, "maxItems": 3, "items": text}
    schemas["CompletionBody"]["properties"]["prompt"] = {"anyOf": [text, several]}
    schemas["TokenizedPrompt"]["properties"]["prompt"] = text
    for name in (*tokenized, "DetokenizeBody"):
        schemas[name]["required"].append("model")  # one of several here
    ids = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 9}}
    schemas["DetokenizeBody"]["properties"] |= {"model": {"enum": [MODEL]}, "tokens": ids}
    for name in ("EmbeddingsBody", "ClassifyBody"):
        schemas[name]["properties"]["input"] = {"anyOf": [text, several]}
    schemas["ScoreBody"]["properties"]["text_1"] = text  # as many as of the others, or one
    for path in (*CALLS, "/v1/messages"):
        asked = document["paths"][path]["post"]
        going_on = ("Last-Event-ID", "starting_after")  # good only after an earlier call
        asked["parameters"] = [p for p in asked["parameters"] if p["name"] not in going_on]
    import schemathesis

    return schemathesis.openapi.from_dict(document)


def error_shape(_context: Any, response: Any, case: Any) -> None:
    """Checks the format of errors, and that none is a 5xx of the gateway; a model that is asked for
    may be unknown to /readyz."""
    if case.path == "/readyz" and response.json().get("missing") == "model":
        return
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    assert response.headers["x-request-id"]


@pytest.mark.campaign
@pytest.mark.parametrize("mode", NUM_EXAMPLES)
@pytest.mark.parametrize(("method", "path"), operations())
def test_every_answer_is_announced(url: str, method: str, path: str, mode: str) -> None:
    """Status, media type, headers and format, to valid requests of each operation, and to invalid
    ones where there are any."""
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi import checks

    operation = generator()[path][method]
    raw = operation.definition.raw
    if mode == "negative" and not (raw.get("parameters") or "requestBody" in raw):
        return
    ids: list[dict[str, Any]] = [{}]
    for name, some_ids in SOME_IDS.items():
        if f"{{{name}}}" in path and mode == "positive":
            ids = [{name: found} for found in some_ids(url)]
    cases = st.one_of(
        [operation.as_strategy(GenerationMode(mode), path_parameters=given) for given in ids]
    )

    statuses = set()

    @settings(
        max_examples=NUM_EXAMPLES[mode],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def ask(case: Any) -> None:
        answer = case.call_and_validate(
            base_url=url,
            checks=[
                checks.status_code_conformance,
                checks.content_type_conformance,
                checks.response_headers_conformance,
                checks.response_schema_conformance,
            ],
            additional_checks=[error_shape],
            timeout=20,
        )
        statuses.add(answer.status_code)

    ask()
    if mode == "positive" and (method, path) not in REFUSED:
        assert statuses & {200, 202}, statuses


def test_the_document_is_valid() -> None:
    """By OpenAPI's specification. All errors have one format."""
    from openapi_spec_validator import validate

    document = openapi_document()
    validate(document)
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_bodies_are_described_as_they_are_checked() -> None:
    """Each field of a call is in the document, with its meaning, and no other may be sent."""
    schemas = openapi_document()["components"]["schemas"]
    calls = (*get_args(CallBody), ResponseBody, MessagesBody, PromptBody)
    bodies = (*calls, *get_args(AnyJob), JobChange)
    for model in bodies:
        described = schemas[model.__name__]
        assert set(described["properties"]) == set(model.model_fields)
        assert described["additionalProperties"] is False
    for model in (*bodies, CallbackBody, BatchBody):
        for name, field in schemas[model.__name__]["properties"].items():
            assert field.get("description"), (model, name)
    assert "lambda" in schemas["CallbackBody"]["properties"]
