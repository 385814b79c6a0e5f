"""Errors as HTTP answers in OpenAI's error shape, never with a stack or an input.

The gateway raises ApiError on purpose; `to_api_error` translates what `contract` raises.
"""

import difflib
import random
from collections.abc import Callable, Collection, Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from contract.errors import (
    BatchwayError,
    BrokerFull,
    BrokerUnavailable,
    BrokerUnfit,
    CommandDenied,
    ErrorCode,
    JobRefused,
)
from contract.events import End
from contract.jobs import JobStatus
from contract.payloads.store import PayloadError, PayloadLost
from gateway.http.load_headers import rate_headers, retry_after

# Codes of a refused parameter, beside invalid_value.
MISSING = "missing_required_parameter"
UNKNOWN = "unknown_parameter"
UNSUPPORTED = "unsupported_parameter"

# Every ErrorCode of the contract as an HTTP status; a meta-test keeps this complete.
STATUS_BY_CODE: Mapping[ErrorCode, int] = {
    ErrorCode.LANE_FULL: 429,
    ErrorCode.TENANT_QUOTA: 429,
    ErrorCode.DEADLINE_INFEASIBLE: 429,
    ErrorCode.UNKNOWN_LANE: 400,
    ErrorCode.NO_WORKERS: 503,
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
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_SOON_S = 1.0  # what failed a moment ago may be back
_UNFIT_S = 30.0  # an operator must act
_FULL_S = 5.0  # what runs must end first
_MAX_NAMES, _MAX_NAME = 10, 256  # of models in a message: how many, and characters of each
# Official clients repeat 409 and 5xx by themselves; where a repeat cannot help they are told.
_NO_RETRY = {"x-should-retry": "false"}


class ApiError(BatchwayError, HTTPException):
    """A refusal with everything that its HTTP answer says. FastAPI passes on an HTTPException that
    is raised while it reads a body; others it replaces.
    """

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
        # The detail is logged, the message is not: it may quote the caller.
        HTTPException.__init__(self, status, code, dict(headers or {}))
        self.retry_after_s = retry_after_s
        self.status = status
        self.code = code
        self.message = message
        self.param = param

    def body(self) -> dict[str, object]:
        """OpenAI's error object."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, default),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, draw: Callable[[], float] = random.random) -> Response:
        """`draw` gives the random numbers, from 0 to 1, of the jitter of Retry-After."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["retry-after"] = retry_after(self.retry_after_s, draw)
        return Response(
            msgspec.json.encode(self.body()),
            self.status,
            headers=headers,
            media_type="application/json",
        )


class UnknownJob(BatchwayError):
    """The tenant has no such job, or no longer: the two look the same."""


class ModelUnreadable(BatchwayError):
    """What a worker published of a model cannot be used; of other models it says nothing."""

    def __init__(self, model: str, what: str = "tokenizer") -> None:
        super().__init__(f"the {what} of the model {model!r} cannot be used")


class TemplateRefused(Exception):
    """The chat template did not take these messages; the message is for the caller only."""


class TemplateFailed(BatchwayError):
    """The process of the chat template did not survive this request, or could not start."""


class TemplateBusy(BatchwayError):
    """The chat template is kept busy by earlier requests."""


class GrammarBusy(BatchwayError):
    """The process that compiles grammars is busy with earlier requests."""


def bad_request(code: str, message: str, param: str | None = None) -> ApiError:
    return ApiError(400, code, message, param=param)


def invalid_value(param: str | None, message: str) -> ApiError:
    """A field of the right name with a wrong type or value."""
    return bad_request("invalid_value", message, param)


def not_found(what: str, code: str, param: str | None = None) -> ApiError:
    return ApiError(404, code, f"{what} does not exist, or is not yours", param=param)


def no_such_model(name: str, known: Collection[str]) -> ApiError:
    """`known`: the models that the caller may see."""
    name = name[:_MAX_NAME]
    message = f"the model {name!r} does not exist"
    if similar := difflib.get_close_matches(name, known, n=1):
        message += f", did you mean {similar[0]!r}"
    shown = ", ".join(map(repr, sorted(known)[:_MAX_NAMES])) or "none yet"
    more = ", … (GET /v1/models has them all)" if len(known) > _MAX_NAMES else ""
    return ApiError(404, "model_not_found", f"{message}; there are: {shown}{more}", param="model")


def _dropped(
    status: int, reason: str, message: str, retry_after_s: float | None, *, code: str | None = None
) -> ApiError:
    """Refused load; the code is the reason, unless it says more."""
    headers = {"x-dropped-reason": reason}
    return ApiError(status, code or reason, message, headers=headers, retry_after_s=retry_after_s)


def broker_unavailable() -> ApiError:
    return _dropped(503, "broker_unavailable", "the queue does not answer", _SOON_S)


def broker_unfit(unfit: BrokerUnfit) -> ApiError:
    """An operator must act; until then nothing is accepted."""
    return _dropped(503, "broker_unavailable", str(unfit), _UNFIT_S, code="broker_unfit")


def broker_full(full: BrokerFull) -> ApiError:
    """What runs goes on and can be read; only new jobs are refused."""
    message = f"the queue takes no more jobs just now: {full}"
    return _dropped(503, "broker_unavailable", message, _FULL_S, code=full.code)


def job_lost() -> ApiError:
    """The job of a synchronous call is gone, with what Redis lost in a failure of its own."""
    message = "the queue has lost this request in a failure of its own: send it again"
    return _dropped(503, "broker_unavailable", message, _SOON_S, code="job_lost")


def draining() -> ApiError:
    return _dropped(503, "draining", "this gateway is shutting down", 1)


def became_job(job_id: str, url: str, last_id: str) -> ApiError:
    """What ends the stream of a call that met the platform's limit."""
    message = (
        f"the time for this answer is up; it goes on as the job {job_id}: read the rest at "
        f"{url}?starting_after={last_id}"
    )
    return ApiError(503, "became_job", message)


def to_api_error(exc: BatchwayError) -> ApiError:
    """What the contract's errors are on HTTP."""
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
        case BrokerUnfit():
            return broker_unfit(exc)
        case CommandDenied():  # what is denied is said in the log
            return broker_unfit(BrokerUnfit("Redis denies this gateway a command that it needs"))
        case BrokerFull():
            return broker_full(exc)
        case BrokerUnavailable():
            return broker_unavailable()
        case PayloadLost():
            message = "the prompt or the result of this job is lost"
            return ApiError(500, ErrorCode.PAYLOAD_LOST, message, headers=_NO_RETRY)
        case PayloadError():
            message = "the object store does not answer"
            code = ErrorCode.PAYLOAD_UNAVAILABLE
            return _dropped(503, code, message, _SOON_S)
        case UnknownJob():
            return not_found("this job", "job_not_found")
        case TemplateFailed():
            return ApiError(500, "template_failed", str(exc), headers=_NO_RETRY)
        case TemplateBusy():
            message = "the model's chat template is kept busy by other requests"
            return _dropped(503, "template_busy", message, _SOON_S)
        case GrammarBusy():
            message = "the compiler of grammars is busy with other requests"
            return _dropped(503, "grammar_busy", message, _SOON_S)
        case ModelUnreadable():
            message = f"{exc}, as its worker has published it: its operator must act"
            return ApiError(503, "model_unreadable", message, headers=_NO_RETRY)
    return internal_error()


def to_call_error(exc: BatchwayError) -> ApiError:
    """The same for a synchronous call, whose caller has not asked for any job."""
    return job_lost() if isinstance(exc, UnknownJob) else to_api_error(exc)


def internal_error() -> ApiError:
    return ApiError(500, "internal_error", "an internal error; the request id finds it in the log")


def failure_of(end: End) -> ApiError | None:
    """How a job's end answers a synchronous call; None where it succeeded."""
    match end.status:
        case JobStatus.SUCCEEDED:
            return None
        case JobStatus.EXPIRED:
            message = "the job did not end before its deadline"
            return ApiError(504, "deadline_exceeded", message, headers=_NO_RETRY)
        case JobStatus.CANCELLED:
            return ApiError(409, "cancelled", "the job was cancelled", headers=_NO_RETRY)
    code = ErrorCode(end.code) if end.code in set(ErrorCode) else ErrorCode.ENGINE_ERROR
    status = STATUS_BY_CODE[code]
    return ApiError(status, code, end.message or "the job failed", headers=_NO_RETRY)
