"""Bodies of POST /v1/jobs, POST /v1/quote and PATCH /v1/jobs/{id}, which contain calls, and their
callbacks."""

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
_MAX_LANE = 64

PROGRESS_TOKENS = 256  # default number of tokens between two progress messages


class CallbackBody(OwnModel):
    """Where to report a job's end: exactly one of the first six."""

    url: Annotated[str, Field(max_length=MAX_URL_CHARS)] | None = None
    sqs: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    sns: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    eventbridge: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    function: Annotated[str | None, Field(alias="lambda", min_length=1, max_length=512)] = None
    s3: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    secret: Annotated[str, Field(max_length=128)] | None = None
    payload: Literal["thin", "full"] | None = None
    events: Annotated[list[Literal["job.started", "job.progress"]], Field(max_length=2)] | None = (
        None
    )
    progress_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None


class JobBody(OwnModel):
    """Fields of POST /v1/jobs and POST /v1/quote besides the call itself."""

    lane: Annotated[str, Field(min_length=1, max_length=_MAX_LANE)] | None = None
    deadline_s: Annotated[float, Field(ge=1, le=MAX_DEADLINE_S)] | None = None
    retention_s: Annotated[float, Field(ge=MIN_RETENTION_S)] | None = None  # from the job's end
    metadata: Metadata | None = None
    callback: CallbackBody | None = None


class ChatJob(JobBody):
    endpoint: Literal["/v1/chat/completions"]
    body: ChatBody


class CompletionJob(JobBody):
    endpoint: Literal["/v1/completions"]
    body: CompletionBody


class EmbeddingsJob(JobBody):
    endpoint: Literal["/v1/embeddings"]
    body: EmbeddingsBody


class RerankJob(JobBody):
    endpoint: Literal["/v1/rerank"]
    body: RerankBody


class ScoreJob(JobBody):
    endpoint: Literal["/v1/score"]
    body: ScoreBody


class ClassifyJob(JobBody):
    endpoint: Literal["/v1/classify"]
    body: ClassifyBody


class ResponseJob(JobBody):
    endpoint: Literal["/v1/responses"]
    body: ResponseBody


class JobChange(OwnModel):
    """PATCH /v1/jobs/{id}."""

    lane: Annotated[str, Field(min_length=1, max_length=_MAX_LANE)] | None = None
    deadline_s: Annotated[float, Field(ge=1, le=MAX_DEADLINE_S)] | None = None  # from now

    @model_validator(mode="after")
    def _changes(self) -> Self:
        if self.lane is None and self.deadline_s is None:
            raise refusal("give a lane, a deadline_s or both", "lane", MISSING)
        return self


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
    if callback.secret is None and not settings.known_secrets().of(tenant):
        raise bad_request(
            "missing_required_parameter",
            "callback.secret is missing, and this installation has none of its own: messages are "
            "always signed",
            "callback.secret",
        )
    if callback.secret is not None and not is_secret(callback.secret):
        message = "callback.secret must be `whsec_` and 24 to 64 bytes in base64"
        raise invalid_value("callback.secret", message)


def _check_aws(callback: Callback, settings: GatewaySettings) -> None:
    param = f"callback.{callback.kind}"
    if not is_open_target(callback, settings.callback_aws):
        raise invalid_value(param, f"{param} is not open to callbacks here")
    if callback.secret is not None:
        message = "callback.secret is for URLs: AWS says who sent a message"
        raise invalid_value("callback.secret", message)
