"""Bodies of POST /v1/jobs, POST /v1/quote and PATCH /v1/jobs/{id}, which contain calls."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from contract.api_keys import MIN_RETENTION_S
from contract.callback_urls import MAX_URL_CHARS
from gateway.http.errors import MISSING
from gateway.prepare.response_bodies import ResponseBody
from gateway.prepare.schemas import ChatBody, CompletionBody
from gateway.prepare.unsupported import Metadata, OwnModel, refusal
from gateway.prepare.vector_bodies import ClassifyBody, EmbeddingsBody, RerankBody, ScoreBody

MAX_DEADLINE_S = 7 * 86_400
_MAX_LANE = 64


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
