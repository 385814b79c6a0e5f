"""What the gateway answers, as the OpenAPI document shows it. Describes; nothing is built of these:
answers are made in `answers`, `job_objects` and the routes, and held to these shapes by a test.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled", "expired"]
EndpointPath = Literal["/v1/chat/completions", "/v1/completions"]
FinishReason = Literal["stop", "length"] | None
UnixSeconds = Annotated[float, Field(description="Unix seconds")]


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class Error(BaseModel):
    error: ErrorDetails


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class PromptTokenLogprob(BaseModel):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]


class ChatTokenLogprob(BaseModel):
    token: str
    bytes: list[int]
    logprob: float


class ChatTokenLogprobs(ChatTokenLogprob):
    top_logprobs: list[ChatTokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprobs]
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] = Field(default=[], description="with return_token_ids")


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] = Field(default=[], description="with return_token_ids")
    prompt_logprobs: PromptLogprobs | None = None


class TextLogprobs(BaseModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] = Field(default=[], description="with return_token_ids")
    prompt_logprobs: PromptLogprobs | None = None


class TextCompletion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[TextChoice]
    usage: Usage
    prompt_token_ids: list[int] = Field(default=[], description="with return_token_ids")


class AcceptedJob(BaseModel):
    """A job that was queued, or that a call turned into."""

    id: str
    object: Literal["job"]
    status: JobState
    endpoint: EndpointPath
    model: str
    lane: str
    position: int | None = Field(description="jobs ahead; null where it does not wait")
    eta_s: float | None = Field(description="seconds until it starts; null where unknown")
    events_url: str


class Timings(BaseModel):
    queued_at: UnixSeconds
    started_at: UnixSeconds | None
    first_token_at: UnixSeconds | None
    finished_at: UnixSeconds | None
    deadline_at: UnixSeconds | None


class JobError(BaseModel):
    code: str
    message: str


class Job(AcceptedJob):
    attempt: int
    metadata: dict[str, str]
    usage: Usage
    timings: Timings
    predicted_wait_s: float | None
    wait_s: float | None
    error: JobError | None


class CallbackState(BaseModel):
    state: Literal["pending", "delivered", "given_up"]
    attempts: int
    next_attempt_at: UnixSeconds | None


class JobWithResult(Job):
    result: ChatCompletion | TextCompletion | None
    result_url: str | None = Field(description="where a long result can be read without a key")
    callback: CallbackState | None


class JobList(BaseModel):
    object: Literal["list"]
    data: list[Job]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedJob(BaseModel):
    id: str
    object: Literal["job"]
    deleted: Literal[True]


class Refusal(BaseModel):
    status: int
    code: str
    message: str
    retry_after_s: float | None


class Quote(BaseModel):
    object: Literal["quote"]
    endpoint: EndpointPath
    model: str
    lane: str
    prompt_tokens: int
    predicted_output_tokens: int
    position: int | None
    eta_s: float | None
    run_s: float | None
    finished_at: UnixSeconds | None
    is_admitted: bool
    refusal: Refusal | None


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class DeadLetter(BaseModel):
    id: str = Field(description="the job's")
    object: Literal["callback"]
    state: str
    message_id: str
    type: str
    attempts: int
    last_error: str
    happened_at: UnixSeconds
    died_at: UnixSeconds


class DeadLetterList(BaseModel):
    object: Literal["list"]
    data: list[DeadLetter]


class ReplayedCallback(BaseModel):
    id: str
    object: Literal["callback"]
    state: str


class StoredChoice(BaseModel):
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason


class StoredResult(BaseModel):
    id: str
    object: Literal["job.result"]
    endpoint: EndpointPath
    model: str
    choices: list[StoredChoice]
    log: Any


class Alive(BaseModel):
    status: Literal["alive"]


class Ready(BaseModel):
    status: Literal["ready"]
    workers: dict[str, int]


class NotReady(BaseModel):
    status: Literal["unavailable", "draining"]
    missing: Literal["redis", "models", "workers", "draining"]
    reason: str | None = None
