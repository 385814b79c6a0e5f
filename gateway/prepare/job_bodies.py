"""Bodies of POST /v1/jobs, POST /v1/quote and PATCH /v1/jobs/{id}, which contain calls, and their
callbacks."""

import time
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from contract.api_keys import MIN_RETENTION_S
from contract.callback_urls import MAX_URL_CHARS, BadCallbackUrl, parse_callback_url
from contract.callbacks import Callback, CallbackKind, is_open_target, is_secret
from gateway.http.errors import MISSING, bad_request, invalid_value
from gateway.prepare.response_bodies import ResponseBody
from gateway.prepare.schemas import ChatBody, CompletionBody
from gateway.prepare.unsupported import Metadata, OwnModel, refusal
from gateway.prepare.vector_bodies import ClassifyBody, EmbeddingsBody, RerankBody, ScoreBody
from gateway.settings import GatewaySettings

MAX_DEADLINE_S = 7 * 86_400
MAX_START_S = 30 * 86_400  # ahead
_Lane = Annotated[str | None, Field(min_length=1, max_length=64)]
_Deadline = Annotated[float | None, Field(ge=1, le=MAX_DEADLINE_S)]
StartAt = Annotated[float | None, Field(ge=0, le=10**11)]
_Target = Annotated[str | None, Field(min_length=1, max_length=512)]
_PATH = Field(description="path of the call")
_BODY = Field(description="body of the call, without `store: false`")

PROGRESS_TOKENS = 256  # default number of tokens between two progress messages


class CallbackBody(OwnModel):
    """Where to report a job's end: exactly one of the first six."""

    url: Annotated[str, Field(max_length=MAX_URL_CHARS)] | None = Field(
        None, description="one of these six; `https`, a public host, no user, password or fragment"
    )
    sqs: _Target = Field(None, description="URL of a queue")
    sns: _Target = Field(None, description="ARN of a topic")
    eventbridge: _Target = Field(None, description="ARN of a bus")
    function: _Target = Field(None, alias="lambda", description="ARN of a function")
    s3: _Target = Field(None, description="`bucket/prefix`")
    secret: Annotated[str, Field(max_length=128)] | None = Field(
        None, description="`whsec_` and base64 of 24 to 64 bytes; default: the installation's"
    )
    payload: Literal["thin", "full"] | None = Field(
        None, description="`full`: also a result of up to 250 kB; default: `thin`"
    )
    events: list[Literal["job.started", "job.progress"]] | None = Field(
        None, max_length=2, description="sent beside the end; default: none"
    )
    progress_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="of the output, between progress messages; default: 256"
    )


class TokenBody(OwnModel):
    """POST /v1/jobs/{id}/token."""

    lifetime_s: Annotated[int, Field(ge=1, le=3_600, description="for which it is valid")] = 600


class JobBody(OwnModel):
    """Fields of POST /v1/jobs and POST /v1/quote besides the call itself."""

    lane: _Lane = Field(None, description="a served one; default: by the body's `service_tier`")
    deadline_s: _Deadline = Field(
        None, description="seconds from now, or from `start_at`; default: a day"
    )
    start_at: StartAt = Field(
        None, description="Unix seconds before which it does not start; at most 30 days ahead"
    )
    retention_s: Annotated[float, Field(ge=MIN_RETENTION_S)] | None = Field(
        None, description="seconds kept after the end; default: the key's, else a day"
    )
    metadata: Metadata | None = Field(None, description="names of up to 64 characters")
    callback: CallbackBody | None = Field(None, description="where to report the job's end")
    token: TokenBody | None = Field(None, description="asks for a token of the job; `{}` will do")


class ChatJob(JobBody):
    endpoint: Annotated[Literal["/v1/chat/completions"], _PATH]
    body: Annotated[ChatBody, _BODY]


class CompletionJob(JobBody):
    endpoint: Annotated[Literal["/v1/completions"], _PATH]
    body: Annotated[CompletionBody, _BODY]


class EmbeddingsJob(JobBody):
    endpoint: Annotated[Literal["/v1/embeddings"], _PATH]
    body: Annotated[EmbeddingsBody, _BODY]


class RerankJob(JobBody):
    endpoint: Annotated[Literal["/v1/rerank"], _PATH]
    body: Annotated[RerankBody, _BODY]


class ScoreJob(JobBody):
    endpoint: Annotated[Literal["/v1/score"], _PATH]
    body: Annotated[ScoreBody, _BODY]


class ClassifyJob(JobBody):
    endpoint: Annotated[Literal["/v1/classify"], _PATH]
    body: Annotated[ClassifyBody, _BODY]


class ResponseJob(JobBody):
    endpoint: Annotated[Literal["/v1/responses"], _PATH]
    body: Annotated[ResponseBody, _BODY]


class JobChange(OwnModel):
    """PATCH /v1/jobs/{id}."""

    lane: _Lane = Field(None, description="the new lane")
    deadline_s: _Deadline = Field(None, description="seconds from now, or from its start")
    start_at: StartAt = Field(
        None, description="Unix seconds, the past for now; its deadline moves along"
    )

    @model_validator(mode="after")
    def _changes(self) -> Self:
        if (self.lane, self.deadline_s, self.start_at) == (None, None, None):
            raise refusal("give a lane, a deadline_s or a start_at", "lane", MISSING)
        return self


def check_start(start_at: float | None) -> float:
    """The time, 0 for none. Raises ApiError where it is too far ahead."""
    if start_at is not None and start_at > time.time() + MAX_START_S:
        days = MAX_START_S // 86_400
        raise invalid_value("start_at", f"start_at may be at most {days} days ahead")
    return start_at or 0.0


CallBody = ChatBody | CompletionBody | EmbeddingsBody | RerankBody | ScoreBody | ClassifyBody
CallJob = ChatJob | CompletionJob | EmbeddingsJob | RerankJob | ScoreJob | ClassifyJob
AnyJob = CallJob | ResponseJob


def to_callback(
    body: CallbackBody | None, tenant: str, settings: GatewaySettings
) -> Callback | None:
    """The body's callback; None if it has none. Raises ApiError without a URL or a secret."""
    if body is None:
        return None
    kind, target = _target(body)
    events = body.events or []
    progress_tokens = body.progress_tokens or PROGRESS_TOKENS if "job.progress" in events else 0
    if body.progress_tokens is not None and not progress_tokens:
        message = "callback.progress_tokens is for callbacks with the event job.progress"
        raise invalid_value("callback.progress_tokens", message)
    callback = Callback(
        kind=kind,
        target=target,
        secret=body.secret,
        is_full=body.payload == "full",
        notifies_start="job.started" in events,
        progress_tokens=progress_tokens,
    )
    if kind is CallbackKind.URL:
        _check_url(callback, tenant, settings)
    else:
        _check_aws(callback, settings)
    return callback


def _target(body: CallbackBody) -> tuple[CallbackKind, str]:
    given = {
        CallbackKind.URL: body.url,
        CallbackKind.SQS: body.sqs,
        CallbackKind.SNS: body.sns,
        CallbackKind.EVENTBRIDGE: body.eventbridge,
        CallbackKind.LAMBDA: body.function,
        CallbackKind.S3: body.s3,
    }
    targets = [(kind, target) for kind, target in given.items() if target is not None]
    if len(targets) != 1:
        names = ", ".join(kind.value for kind in given)
        raise invalid_value("callback", f"callback needs exactly one of {names}")
    return targets[0]


def _check_url(callback: Callback, tenant: str, settings: GatewaySettings) -> None:
    try:
        parse_callback_url(callback.target, settings.allowed_targets())
    except BadCallbackUrl as exc:
        raise invalid_value("callback.url", f"callback.url {exc}") from None
    if callback.secret is not None and not is_secret(callback.secret):
        message = "callback.secret must be `whsec_` and 24 to 64 bytes in base64"
        raise invalid_value("callback.secret", message)
    check_secret(callback, tenant, settings)


def check_secret(callback: Callback, tenant: str, settings: GatewaySettings) -> None:
    """Raises ApiError if nothing can sign the messages to a URL."""
    secrets = settings.known_secrets().signing(callback, tenant)
    if callback.kind is CallbackKind.URL and not secrets:
        raise bad_request(
            MISSING,
            "callback.secret is missing, and this installation has none of its own: messages are "
            "always signed",
            "callback.secret",
        )


def _check_aws(callback: Callback, settings: GatewaySettings) -> None:
    param = f"callback.{callback.kind}"
    if not is_open_target(callback, settings.callback_aws):
        raise invalid_value(param, f"{param} is not open to callbacks here")
    if callback.secret is not None:
        message = "callback.secret is for URLs: AWS says who sent a message"
        raise invalid_value("callback.secret", message)
