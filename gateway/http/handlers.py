"""The app's exception handlers, and the error responses in the OpenAPI document. Errors never
contain input."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from contract.errors import BatchwayError
from gateway.http.bodies import ClientGone
from gateway.http.errors import (
    MISSING,
    UNKNOWN,
    UNSUPPORTED,
    ApiError,
    bad_request,
    internal_error,
    invalid_value,
    similar_name,
    to_api_error,
)
from gateway.http.sse import AnsweredOtherwise

log = logging.getLogger("batchway.gateway")

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}
_MAX_PATH = 128  # characters, of a message
_MAX_NAME = 64  # characters, of each part of a parameter's path
# Error codes by pydantic's error type; others are invalid_value.
_CODES = {
    "missing": MISSING,
    "extra_forbidden": UNKNOWN,
    **{code: code for code in (MISSING, UNKNOWN, UNSUPPORTED)},
}
_COMPACT = "/v1/responses/compact"
# Endpoints of OpenAI that this server does not have, by the start of their paths.
_ELSEWHERE = {
    _COMPACT: "no compaction; a response goes on with previous_response_id",
    "/v1/conversations": "no conversations; a response goes on with previous_response_id",
    "/v1/assistants": "no assistants; POST /v1/chat/completions answers conversations",
    "/v1/threads": "no threads; POST /v1/chat/completions answers conversations",
    "/v1/images": "no images, text only",
    "/v1/audio": "no audio, text only",
    "/v1/messages/batches": "POST /v1/batches takes calls of other endpoints",
    "/v1/moderations": "no moderation",
    "/v1/fine_tuning": "no training",
}


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class Error(BaseModel):
    """OpenAI's error object."""

    error: ErrorDetails


_REASONS: Mapping[int, str] = {
    400: "What the caller must change; `param` names it",
    401: "No API key, or none that is good",
    403: "The key is not for this, or a page of another origin asks for it",
    404: "It does not exist, or is another tenant's",
    408: "The body did not arrive in time",
    409: "The job is not in a state for this",
    410: "The record of what was asked for is damaged",
    413: "The body is too long",
    415: "The content-type is not application/json, or for files multipart/form-data",
    416: "The file has no byte in this range",
    422: "The Idempotency-Key was used with another body",
    429: "Capacity exists, but not for this now; see `x-dropped-reason` and `Retry-After`",
    431: "The request line and headers are too long",
    500: "The job failed, or an internal error",
    503: "No capacity now; see `x-dropped-reason` and `Retry-After`",
    504: "The job did not end before its deadline",
    529: "No capacity now; see `x-dropped-reason` and `Retry-After`",
}


_ALWAYS = (400, 408, 410, 413, 422, 431, 500, 503)


def answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Errors of a route beside those that each has, as the `responses` of its OpenAPI operation."""
    listed = sorted({*_ALWAYS, *statuses})
    return {status: {"model": Error, "description": _REASONS[status]} for status in listed}


def add_handlers(app: FastAPI, draw: Callable[[], float], paths: Sequence[str]) -> None:
    """Adds the handlers. `draw` returns random numbers from 0 to 1, for the jitter of Retry-After.
    `paths`: known paths, from which a similar one is suggested for an unknown path."""

    @app.exception_handler(BatchwayError)
    async def refused(request: Request, exc: BatchwayError) -> Response:
        error = to_api_error(exc)
        if error.code == "internal_error":
            log.error("unexpected %s", type(exc).__name__)
        return error.response(request.scope, draw)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, exc: RequestValidationError) -> Response:
        return translated(exc.errors()[0], exc.body).response(request.scope)

    @app.exception_handler(HTTPException)
    async def by_framework(request: Request, exc: HTTPException) -> Response:
        message = exc.detail
        path = request.url.path[:_MAX_PATH]
        if exc.status_code == 404 or path == _COMPACT:  # which looks like the id of a response
            message = _no_such_path(path, paths)
        elif exc.status_code == 405 and exc.headers is not None:
            message = f"this path takes {exc.headers['Allow']}"
        code = _HTTP_CODES.get(exc.status_code, "bad_request")
        error = ApiError(exc.status_code, code, message, headers=exc.headers)
        return error.response(request.scope)

    @app.exception_handler(ClientGone)
    async def gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(AnsweredOtherwise)
    async def otherwise(_: Request, exc: AnsweredOtherwise) -> Response:
        return exc.response

    @app.exception_handler(Exception)
    async def unexpected(request: Request, _: Exception) -> Response:
        return internal_error().response(request.scope)


def _no_such_path(path: str, known: Sequence[str]) -> str:
    message = f"there is no {path} here"
    for start, hint in _ELSEWHERE.items():
        if path.startswith(start):
            return f"{message}: {hint}"
    plain = "/v1" + path.removeprefix("/v1").removesuffix("/")
    if similar := plain if plain in known else similar_name(path, known):
        return f"{message}; did you mean {similar}?"
    return f"{message}; GET /openapi.json lists the routes"


def translated(error: Mapping[str, Any], body: Any) -> ApiError:
    """The first validation error, with the parameter named as in the body."""
    place, *loc = error["loc"]
    if error["type"] == "missing" and place == "body" and not loc:
        return bad_request("invalid_json", "the body must be a JSON object")
    path = _path(loc, body) if place == "body" else [str(part) for part in loc]
    if error["type"] == "missing" and place == "body":
        path.append(str(loc[-1]))
    context = error.get("ctx", {})
    if error["type"].startswith("union_tag"):
        context = {"param": context["discriminator"].strip("'")}
    if context.get("param") is not None:
        path.append(context["param"])
    param = ".".join(part[:_MAX_NAME] for part in path) if path else None
    code = _CODES.get(error["type"])
    if error["type"] == "union_tag_not_found":
        code = MISSING
    is_plain = error["type"] == MISSING or code != MISSING
    message = error["msg"] if is_plain else "missing parameter"
    if error["type"] == "union_tag_invalid":  # pydantic's message holds what was given
        message = f"Input should be one of {error['ctx']['expected_tags']}"
    message = f"{param}: {message}" if path else message
    return bad_request(code, message, param) if code else invalid_value(param, message)


def _path(loc: Sequence[int | str], fields: Any) -> list[str]:
    """The parts of an error's location that the body has. pydantic adds the types that it tried."""
    path = []
    for part in loc:
        if isinstance(fields, Mapping) and part in fields:
            fields = fields[str(part)]
        elif isinstance(fields, list) and isinstance(part, int) and part < len(fields):
            fields = fields[part]
        else:
            continue
        path.append(str(part))
    return path
