"""The OpenAPI document: what the routes cannot say by their types, since bodies are read raw and
answers are written by hand. Loaded when the document is first asked for, not with the app.

Every route must have its line in `OPERATIONS`; a test says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.http import openapi_answers as answers
from gateway.openai.schemas import ChatBody, CompletionBody, JobBody, JobChange

_DESCRIPTION = (
    "OpenAI's shapes wherever OpenAI has one, and durable jobs. Once an API key exists, every "
    "`/v1` route wants it. `docs/api.md` says more of each field, event and error code."
)
_REF = "#/components/schemas/{model}"
_TEXT = "text/plain"
_STREAM = "text/event-stream"

_REASONS: Mapping[int, str] = {
    400: "What the caller must change; `param` names it",
    401: "No API key, or none that is good",
    403: "The key is not for this",
    404: "It does not exist, or is another tenant's",
    408: "The body did not arrive in time",
    409: "The job is not in a state for this",
    413: "The body is too long",
    415: "The content-type is not application/json",
    422: "The Idempotency-Key was used with another body",
    429: "Capacity exists, but not for this now; see `x-dropped-reason` and `Retry-After`",
    431: "The request line and headers are too long",
    500: "The job failed, or an internal error",
    503: "No capacity now; see `x-dropped-reason` and `Retry-After`",
    504: "The job did not end before its deadline",
}
_ALWAYS = (400, 413, 431, 500)
_KEYED = (*_ALWAYS, 401, 403, 429, 503)
_WITH_BODY = (*_KEYED, 408, 415)


@dataclass(frozen=True, slots=True)
class Operation:
    """What is said of one route. `kinds` are media types beside JSON of a 200."""

    tag: str
    answer: type[BaseModel] | None
    errors: tuple[int, ...]
    body: type[BaseModel] | None = None
    status: int = 200
    kinds: tuple[str, ...] = ()
    others: Mapping[int, type[BaseModel]] = field(default_factory=dict)  # by status
    silent: tuple[int, ...] = ()  # statuses without a body
    parameters: tuple[Mapping[str, Any], ...] = ()
    wants_key: bool = True


def _parameter(place: str, name: str, schema: Mapping[str, Any], text: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": False, "schema": schema, "description": text}


_STRING = {"type": "string"}
_KINDS: Mapping[str, Mapping[str, Any]] = {
    _TEXT: _STRING,
    _STREAM: {  # each event
        "type": "object",
        "required": ["data"],
        "properties": {"data": _STRING, "event": _STRING, "id": _STRING},
        "description": "server-sent events: JSON in `data`, the last one is `[DONE]`",
    },
}
_EVENT_ID = {"type": "string", "pattern": r"^[0-9]{1,9}(\.[0-9a-f]{8})?$"}
_PATH_SCHEMAS = {
    "job_id": {"type": "string", "pattern": "^job-[0-9]{1,4}-[0-9a-f]{32}$"},
    "model_id": {"type": "string", "minLength": 1, "maxLength": 256},
}
_IDEMPOTENCY_KEY = _parameter(
    "header",
    "Idempotency-Key",
    {"type": "string", "pattern": r"^[!-~]{1,255}$"},
    "the same key and body: the job of the first call answers",
)
_PREFER = _parameter(
    "header", "Prefer", _STRING, "`respond-async`: 202 at once; `wait=20`: 202 after 20 s"
)
_LAST_EVENT_ID = _parameter(
    "header", "Last-Event-ID", _EVENT_ID, "go on with a stream after this event"
)
_STARTING_AFTER = _parameter(
    "query", "starting_after", _EVENT_ID, "the same as the header, which wins"
)
_LIMIT = _parameter(
    "query",
    "limit",
    {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    "so many on a page",
)
_LIST_QUERY = (
    _parameter(
        "query",
        "status",
        {"enum": ["queued", "running", "succeeded", "failed", "cancelled", "expired"]},
        "jobs in this state",
    ),
    _parameter("query", "lane", _STRING, "jobs in this lane"),
    _parameter("query", "model", _STRING, "jobs of this model"),
    _parameter(
        "query",
        "created_after",
        {"type": "number", "minimum": 0, "maximum": 10**11},
        "submitted later than this, in Unix seconds",
    ),
    _LIMIT,
    _parameter("query", "after", _STRING, "the `last_id` of the page before"),
    {
        **_parameter(
            "query",
            "metadata",
            {"type": "object", "additionalProperties": _STRING},
            "jobs with these values under these names: `metadata[name]=value`",
        ),
        "style": "deepObject",
        "explode": True,
    },
)
_PAGE_QUERY = (
    _LIMIT,
    _parameter(
        "query",
        "before",
        {"type": "number", "minimum": 0, "exclusiveMaximum": 2**40},
        "given up earlier than this, in Unix seconds",
    ),
)


def _call(answer: type[BaseModel], body: type[BaseModel]) -> Operation:
    return Operation(
        "calls",
        answer,
        (*_WITH_BODY, 404, 409, 422, 504),
        body=body,
        kinds=(_STREAM,),
        others={202: answers.AcceptedJob},
        parameters=(_IDEMPOTENCY_KEY, _PREFER, _LAST_EVENT_ID, _STARTING_AFTER),
    )


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): _call(answers.ChatCompletion, ChatBody),
    ("POST", "/v1/completions"): _call(answers.TextCompletion, CompletionBody),
    ("POST", "/v1/quote"): Operation("calls", answers.Quote, (*_WITH_BODY, 404), body=JobBody),
    ("POST", "/v1/jobs"): Operation(
        "jobs",
        answers.AcceptedJob,
        (*_WITH_BODY, 404, 409, 422),
        body=JobBody,
        status=202,
        parameters=(_IDEMPOTENCY_KEY,),
    ),
    ("GET", "/v1/jobs"): Operation("jobs", answers.JobList, _KEYED, parameters=_LIST_QUERY),
    ("GET", "/v1/jobs/{job_id}"): Operation("jobs", answers.JobWithResult, (*_KEYED, 404)),
    ("GET", "/v1/jobs/{job_id}/events"): Operation(
        "jobs",
        None,
        (*_KEYED, 404),
        kinds=(_STREAM,),
        parameters=(_LAST_EVENT_ID, _STARTING_AFTER),
    ),
    ("POST", "/v1/jobs/{job_id}/cancel"): Operation("jobs", answers.Job, (*_KEYED, 404, 409)),
    ("PATCH", "/v1/jobs/{job_id}"): Operation(
        "jobs", answers.Job, (*_WITH_BODY, 404, 409), body=JobChange
    ),
    ("DELETE", "/v1/jobs/{job_id}"): Operation("jobs", answers.DeletedJob, (*_KEYED, 404, 409)),
    ("GET", "/v1/objects/{job_id}/{name}"): Operation(
        "jobs", answers.StoredResult, (*_ALWAYS, 404, 503), wants_key=False
    ),
    ("GET", "/v1/callbacks/dead"): Operation(
        "callbacks", answers.DeadLetterList, _KEYED, parameters=_PAGE_QUERY
    ),
    ("GET", "/v1/callbacks/dead/{job_id}"): Operation(
        "callbacks", answers.DeadLetter, (*_KEYED, 404)
    ),
    ("POST", "/v1/callbacks/dead/{job_id}/replay"): Operation(
        "callbacks", answers.ReplayedCallback, (*_KEYED, 404, 409), status=202
    ),
    ("GET", "/v1/models"): Operation("models", answers.ModelList, _KEYED),
    ("GET", "/v1/models/{model_id}"): Operation("models", answers.Model, (*_KEYED, 404)),
    ("GET", "/livez"): Operation("health", answers.Alive, _ALWAYS, wants_key=False),
    ("GET", "/readyz"): Operation(
        "health", answers.Ready, _ALWAYS, others={503: answers.NotReady}, wants_key=False
    ),
    ("GET", "/health"): Operation("health", None, _ALWAYS, silent=(503,), wants_key=False),
    ("GET", "/metrics"): Operation("health", None, _KEYED, kinds=(_TEXT,)),
}


def document(app: FastAPI) -> dict[str, Any]:
    """The document of the app's routes."""
    found = get_openapi(
        title=app.title, version=app.version, description=_DESCRIPTION, routes=app.routes
    )
    for path, item in found["paths"].items():
        for method, described in item.items():
            _complete(described, OPERATIONS[method.upper(), path])
    found["components"] = {
        "schemas": _schemas(),
        "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
    }
    return found


def _complete(described: dict[str, Any], operation: Operation) -> None:
    described["tags"] = [operation.tag]
    described["parameters"] = [*described.get("parameters", ()), *operation.parameters]
    for parameter in described["parameters"]:
        parameter["schema"] = _PATH_SCHEMAS.get(parameter["name"], parameter["schema"])
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _json_of(operation.body)}
    if operation.wants_key:
        described["security"] = [{"apiKey": []}, {}]  # none while no key exists
    described["responses"] = _responses(operation)


def _responses(operation: Operation) -> dict[str, Any]:
    content = {} if operation.answer is None else _json_of(operation.answer)
    content |= {kind: {"schema": _KINDS[kind]} for kind in operation.kinds}
    responses: dict[str, Any] = {
        str(operation.status): {"description": "As asked", "content": content}
    }
    for status in sorted(set(operation.errors)):
        content = _json_of(answers.Error)
        responses[str(status)] = {"description": _REASONS[status], "content": content}
    for status in operation.silent:
        responses[str(status)] = {"description": _REASONS[status]}
    for status, answer in operation.others.items():
        text = "Accepted as a job" if status == 202 else _REASONS[status]
        responses[str(status)] = {"description": text, "content": _json_of(answer)}
    return responses


def _json_of(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}


def _schemas() -> dict[str, Any]:
    models: set[type[BaseModel]] = {answers.Error}
    for operation in OPERATIONS.values():
        models |= {m for m in (operation.body, operation.answer, *operation.others.values()) if m}
    ordered = sorted(models, key=lambda model: model.__name__)
    pairs = [(model, "validation") for model in ordered]
    _, found = models_json_schema(pairs, ref_template=_REF)  # type: ignore[arg-type]
    schemas: dict[str, Any] = found["$defs"]
    of_calls = [{"$ref": _REF.format(model=model.__name__)} for model in (ChatBody, CompletionBody)]
    schemas[JobBody.__name__]["properties"]["body"] = {"anyOf": of_calls, "title": "Body"}
    return schemas
