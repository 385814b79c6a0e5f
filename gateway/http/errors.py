"""Errors as HTTP responses in OpenAI's format, below /v1/messages in Anthropic's, without stack
traces or input.

The gateway raises ApiError; `to_api_error` translates the errors of `contract`.
"""

import contextlib
import difflib
import itertools
import math
import random
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from contract.errors import (
    BatchwayError,
    BrokerFull,
    BrokerUnavailable,
    BrokerUnfit,
    CommandDenied,
    ErrorCode,
    JobRefused,
    RateLimits,
    WireError,
)
from contract.events import End
from contract.jobs import JobStatus
from contract.payloads.store import PayloadError, PayloadLost
from gateway.turns import Busy

JITTER = 0.25  # share of the wait; at least a second. Callers must not all return at once.
# Error codes of parameters, besides invalid_value.
MISSING = "missing_required_parameter"
UNKNOWN = "unknown_parameter"
UNSUPPORTED = "unsupported_parameter"
CONTEXT_EXCEEDED = "context_length_exceeded"

# HTTP status of each ErrorCode of the contract; a test checks that all are here.
STATUS_BY_CODE: Mapping[ErrorCode, int] = {
    ErrorCode.LANE_FULL: 429,
    ErrorCode.LANE_PAUSED: 503,
    ErrorCode.TENANT_QUOTA: 429,
    ErrorCode.DEADLINE_INFEASIBLE: 429,
    ErrorCode.UNKNOWN_LANE: 400,
    ErrorCode.NO_WORKERS: 503,
    ErrorCode.MODEL_FAILED: 503,
    ErrorCode.IDEMPOTENCY_MISMATCH: 422,
    ErrorCode.STORAGE_FULL: 503,
    ErrorCode.MEMORY_FULL: 503,
    ErrorCode.DISK_FULL: 503,
    ErrorCode.PROMPT_TOO_LONG: 400,
    ErrorCode.BAD_PARAMETER: 400,
    ErrorCode.ENGINE_ERROR: 500,
    ErrorCode.DEADLINE: 504,
    ErrorCode.RETRIES: 500,
    ErrorCode.POISON: 500,
    ErrorCode.PAYLOAD_LOST: 500,
    ErrorCode.PAYLOAD_UNAVAILABLE: 503,
}
SYSTEM_RANDOM = random.SystemRandom()
"""Environments of a function that start from one snapshot draw the same numbers from others."""
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_TYPES_OF_MESSAGES = {
    **_TYPES,
    **{404: "not_found_error", 413: "request_too_large"},
    **{503: "overloaded_error", 504: "timeout_error"},
}
_SOON_S = 1.0  # temporary: a retry may succeed
_UNFIT_S = 30.0  # until an operator acts
_FULL_S = 5.0  # until running jobs have ended
_MAX_NAMES, _MAX_NAME = 10, 256  # of model names in a message: how many, and characters of each
_MAX_COMPARED, _MAX_SIMILAR = 200, 64  # names in search of a similar one, and its characters
_UNAVAILABLE = "broker_unavailable"
# Official clients retry 409 and 5xx by themselves; this header tells them not to.
NO_RETRY = {"x-should-retry": "false"}


def retry_after(retry_s: float, draw: Callable[[], float]) -> str:
    """Whole seconds, rounded up, plus jitter. `draw` returns random numbers from 0 to 1."""
    least = max(1, math.ceil(retry_s))
    return str(least + int(draw() * (1 + math.ceil(JITTER * least))))


def rate_headers(rates: RateLimits | None) -> dict[str, str]:
    """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}` of the limits that exist."""
    headers: dict[str, str] = {}
    for what in ("requests", "tokens"):
        rate = getattr(rates, what, None)
        if rate is not None:
            headers[f"x-ratelimit-limit-{what}"] = str(rate.limit)
            headers[f"x-ratelimit-remaining-{what}"] = str(rate.remaining)
            headers[f"x-ratelimit-reset-{what}"] = f"{math.ceil(rate.reset_s)}s"
    return headers


class ApiError(BatchwayError, HTTPException):
    """An error response. FastAPI passes on an HTTPException that is raised while it reads a body,
    and replaces other exceptions."""

    headers: dict[str, str]

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        # The detail is logged; the message is not, because it may quote the caller.
        HTTPException.__init__(self, status, code, dict(headers or {}))
        self.retry_after_s = retry_after_s
        self.status = status
        self.code = code
        self.message = message
        self.param = param

    def body(self) -> dict[str, object]:
        """OpenAI's error object."""
        return {"error": self._details(_TYPES, "server_error")}

    def body_for(self, scope: Scope) -> dict[str, object]:
        """The error in the form of the path that was called; Anthropic's has OpenAI's members."""
        if not is_message_call(scope):
            return self.body()
        error = self._details(_TYPES_OF_MESSAGES, "api_error")
        return {"type": "error", "error": error, "request_id": scope["state"].get("request_id")}

    def _details(self, types: Mapping[int, str], of_server: str) -> dict[str, str | None]:
        kind = of_server if self.status >= 500 else "invalid_request_error"
        kind = types.get(self.status, kind)
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}

    def response(self, scope: Scope, draw: Callable[[], float] = SYSTEM_RANDOM.random) -> Response:
        """`draw` returns random numbers from 0 to 1, for the jitter of Retry-After."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["retry-after"] = retry_after(self.retry_after_s, draw)
        return Response(
            msgspec.json.encode(self.body_for(scope)),
            529 if self.status == 503 and is_message_call(scope) else self.status,
            headers=headers,
            media_type="application/json",
        )


def is_message_call(scope: Scope) -> bool:
    """Whether the call is one of Anthropic's API."""
    return str(scope["path"]).startswith("/v1/messages")


class ContextExceeded(ApiError):
    """A prompt of at least `num_prompt` tokens, or it and its output, beyond the context."""

    def __init__(self, message: str, param: str, num_prompt: int, limit: int) -> None:
        super().__init__(400, CONTEXT_EXCEEDED, message, param=param)
        self.num_prompt, self.limit = num_prompt, limit


class UnknownJob(BatchwayError):
    """The tenant has no such job, or no longer has it; both give the same response."""


class RecordUnreadable(WireError):
    """The record of what the caller asks for is damaged. Other records are not affected."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the record of this {what} is damaged and cannot be read")


@contextlib.contextmanager
def readable(what: str) -> Iterator[None]:
    """Raises RecordUnreadable where a record cannot be decoded."""
    try:
        yield
    except WireError as exc:
        raise RecordUnreadable(what) from exc


class ModelUnreadable(BatchwayError):
    """The tokenizer or chat template that a worker published is unusable. Other models are not
    affected."""

    def __init__(self, model: str, what: str = "tokenizer") -> None:
        super().__init__(f"the {what} of the model {model!r} cannot be used")


class TemplateRefused(Exception):
    """The chat template rejected these messages. Show the message to the caller only."""


class TemplateFailed(BatchwayError):
    """The process of the chat template died during this request, or could not start."""


def bad_request(code: str, message: str, param: str | None = None) -> ApiError:
    return ApiError(400, code, message, param=param)


def invalid_value(param: str | None, message: str) -> ApiError:
    """A known field with a wrong type or value."""
    return bad_request("invalid_value", message, param)


def similar_name(name: str, known: Iterable[str]) -> str | None:
    """The nearest of the first known names, by its first characters; None if none is similar."""
    compared = itertools.islice(known, _MAX_COMPARED)
    return next(iter(difflib.get_close_matches(name[:_MAX_SIMILAR], compared, n=1)), None)


def not_found(what: str, code: str, param: str | None = None) -> ApiError:
    return ApiError(404, code, f"{what} does not exist, or is not yours", param=param)


def no_such_model(name: str, known: Collection[str]) -> ApiError:
    """The error for an unknown model. `known`: the models that this caller may use."""
    name = name[:_MAX_NAME]
    message = f"the model {name!r} does not exist"
    if similar := similar_name(name, known):
        message += f", did you mean {similar!r}"
    shown = ", ".join(map(repr, sorted(known)[:_MAX_NAMES])) or "none yet"
    more = ", … (GET /v1/models has them all)" if len(known) > _MAX_NAMES else ""
    return ApiError(404, "model_not_found", f"{message}; there are: {shown}{more}", param="model")


def _dropped(
    status: int, reason: str, message: str, retry_after_s: float | None, *, code: str | None = None
) -> ApiError:
    """Rejected because of load. The code is the reason unless `exc` has a more precise one."""
    headers = {"x-dropped-reason": reason}
    return ApiError(status, code or reason, message, headers=headers, retry_after_s=retry_after_s)


class Draining(ApiError):
    """The gateway shuts down: another one goes on."""

    def __init__(self) -> None:
        super().__init__(
            503,
            "draining",
            "this gateway is shutting down",
            headers={"x-dropped-reason": "draining"},
            retry_after_s=1,
        )


def to_api_error(exc: BatchwayError) -> ApiError:
    """Translates an error of the contract to an HTTP response."""
    match exc:
        case ApiError():
            return exc
        case JobRefused():
            status = STATUS_BY_CODE[exc.code]
            if status not in (429, 503):
                param = "lane" if exc.code is ErrorCode.UNKNOWN_LANE else None
                return ApiError(status, exc.code, exc.message, param=param)
            message = exc.message
            if exc.code is ErrorCode.NO_WORKERS:
                message += "; POST /v1/jobs would queue this"
            error = _dropped(status, exc.code, message, exc.retry_after_s)
            error.headers |= rate_headers(exc.rates)
            return error
        case BrokerUnfit():  # no jobs are accepted until an operator acts
            return _dropped(503, _UNAVAILABLE, str(exc), _UNFIT_S, code="broker_unfit")
        case CommandDenied():  # the log says which command was denied
            message = "Redis denies this gateway a command that it needs"
            return _dropped(503, _UNAVAILABLE, message, _UNFIT_S, code="broker_unfit")
        case BrokerFull():  # existing jobs run on and can be read
            message = f"the queue takes no more jobs just now: {exc}"
            return _dropped(503, _UNAVAILABLE, message, _FULL_S, code=exc.code)
        case BrokerUnavailable():
            message = f"the queue cannot be used just now: {exc}"
            return _dropped(503, _UNAVAILABLE, message, _SOON_S)
        case PayloadLost():
            message = "the prompt or the result of this job is lost"
            return ApiError(500, ErrorCode.PAYLOAD_LOST, message, headers=NO_RETRY)
        case PayloadError():
            message = "the object store does not answer"
            code = ErrorCode.PAYLOAD_UNAVAILABLE
            return _dropped(503, code, message, _SOON_S)
        case RecordUnreadable():
            return ApiError(410, "record_unreadable", str(exc), headers=NO_RETRY)
        case UnknownJob():
            return not_found("this job", "job_not_found")
        case TemplateFailed():
            return ApiError(500, "template_failed", str(exc), headers=NO_RETRY)
        case Busy():
            message = "the gateway is busy preparing earlier calls of yours"
            return _dropped(503, "preparing", message, exc.retry_after_s)
        case ModelUnreadable():
            message = f"{exc}, as its worker has published it: its operator must act"
            return ApiError(503, "model_unreadable", message, headers=NO_RETRY)
    return internal_error()


def to_call_error(exc: BatchwayError) -> ApiError:
    """As to_api_error, for a synchronous call, whose caller knows nothing of jobs: its job is
    unknown if it was lost when Redis failed."""
    if isinstance(exc, UnknownJob):
        message = "the queue has lost this request in a failure of its own: send it again"
        return _dropped(503, _UNAVAILABLE, message, _SOON_S, code="job_lost")
    return to_api_error(exc)


def without_text(exc: Exception) -> str:
    """Type and place of an exception, for a log. Its text may quote a request's body."""
    frame = traceback.extract_tb(exc.__traceback__)[-1]
    return f"{type(exc).__name__} ({frame.filename}:{frame.lineno})"


def internal_error() -> ApiError:
    return ApiError(500, "internal_error", "an internal error; the request id finds it in the log")


_STATUS_BY_END = {JobStatus.EXPIRED: 504, JobStatus.CANCELLED: 409}


def failure_of(end: End) -> ApiError | None:
    """The error with which a job's end answers a synchronous call; None if the job succeeded."""
    if end.error is None:
        return None
    code, message = end.error
    status = _STATUS_BY_END.get(end.status) or STATUS_BY_CODE[ErrorCode(code)]
    return ApiError(status, code, message, headers=NO_RETRY)
