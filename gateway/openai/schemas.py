"""The bodies that callers send, in OpenAI's shapes: types and ranges of every field.

Leaves to admission what needs the model: vocabulary, context length, defaults.

Over 300 lines: it is one list of fields.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from contract.api_keys import MIN_RETENTION_S
from contract.callback_urls import MAX_URL_CHARS
from contract.jobs import Endpoint
from gateway.http.errors import ApiError, bad_request, invalid_value
from gateway.http.field_schemas import (
    CONTENT_SCHEMA,
    MAX_PROMPTS,
    MAX_STOP_BYTES,
    MAX_STOPS,
    PROMPT_SCHEMA,
    STOPS_SCHEMA,
)
from gateway.openai.unsupported import refuse_unsupported, unknown_parameter

MAX_LOGIT_BIASES = 300
MAX_CHOICES = 8  # of one prompt
MAX_CHOICES_IN_ALL = 128  # of all prompts of a call
MAX_TOP_LOGPROBS = 20
MAX_DEADLINE_S = 7 * 86_400
_INT64 = 2**63
_MAX_NAME = 64


MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]  # OpenAI's limits
MetadataValue = Annotated[str, Field(max_length=512)]


def _refusal(message: str) -> PydanticCustomError:
    return PydanticCustomError("refused", message)


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _refusal("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise _refusal(f"at most {MAX_STOPS} stop strings")
    if not all(0 < len(stop.encode()) <= MAX_STOP_BYTES for stop in stops):
        raise _refusal(f"each stop string has 1 to {MAX_STOP_BYTES} bytes")
    return tuple(stops)


def _content(value: Any) -> Any:
    """A string as it is, text parts joined by line ends."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise _refusal("must be a string or a non-empty list of text parts")
    for part in value:
        if not isinstance(part, dict) or set(part) != {"type", "text"} or part["type"] != "text":
            raise _refusal('each part must be {"type": "text", "text": …}')
        if not isinstance(part["text"], str):
            raise _refusal("the text of a part must be a string")
    return "\n".join(part["text"] for part in value)


def _prompts(value: Any) -> Any:
    """All prompts as a tuple. A list of one prompt counts as that prompt."""
    if not (isinstance(value, list) and value and isinstance(value[0], str | list)):
        return (_prompt(value),)
    if len(value) > MAX_PROMPTS:
        raise _refusal(f"at most {MAX_PROMPTS} prompts")
    return tuple(value) if len(value) > 1 else (_prompt(value[0]),)


def _prompt(value: Any) -> Any:
    """A string, or token ids as a tuple."""
    if isinstance(value, str):
        return value
    # A bool is an int to isinstance.
    if isinstance(value, list | tuple) and set(map(type, value)) == {int}:
        return tuple(value)
    raise _refusal("must be a string or a non-empty list of token ids")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content), CONTENT_SCHEMA]
    name: Annotated[str, Field(max_length=_MAX_NAME)] | None = None


class StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage in every chunk
    include_obfuscation: bool | None = None  # accepted; there is none


class _SamplingBody(_Strict):
    """What both endpoints take. None always means the default."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # -1 and 0: off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LOGIT_BIASES),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops), STOPS_SCHEMA] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    service_tier: Literal["auto", "default", "priority", "flex"] | None = None
    on_disconnect: Literal["cancel", "continue"] | None = None  # None: by the idempotency key
    # Accepted and of no effect: IGNORED in `unsupported`.
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_retention: Annotated[str, Field(max_length=_MAX_NAME)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def repeats_usage(self) -> bool:
        options = self.stream_options
        return self.includes_usage and options is not None and bool(options.continuous_usage_stats)


class ChatBody(_SamplingBody):
    """POST /v1/chat/completions."""

    # One error is told; 60,000 of them fit into a body, and took two seconds to collect.
    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(_SamplingBody):
    """POST /v1/completions."""

    prompt: Annotated[
        tuple[Annotated[str | tuple[int, ...], BeforeValidator(_prompt)], ...],
        FailFast(),
        BeforeValidator(_prompts),
        PROMPT_SCHEMA,
    ]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: int | None = None
    echo: bool | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None  # 0: with echo only, to score a prompt

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class CallbackBody(_Strict):
    """Whom to tell of a job's end: exactly one of the first six."""

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


class JobBody(_Strict):
    """POST /v1/jobs; `body` is checked as the body of its endpoint."""

    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]
    lane: Annotated[str, Field(min_length=1, max_length=_MAX_NAME)] | None = None
    deadline_s: Annotated[float, Field(ge=1, le=MAX_DEADLINE_S)] | None = None
    retention_s: Annotated[float, Field(ge=MIN_RETENTION_S)] | None = None  # from its end on
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    callback: CallbackBody | None = None


class JobChange(_Strict):
    """PATCH /v1/jobs/{id}."""

    lane: Annotated[str, Field(min_length=1, max_length=_MAX_NAME)] | None = None
    deadline_s: Annotated[float, Field(ge=1, le=MAX_DEADLINE_S)] | None = None  # from now


CallBody = ChatBody | CompletionBody
_M = TypeVar("_M", bound=BaseModel)


def parse_call(endpoint: Endpoint, raw: Mapping[str, Any]) -> CallBody:
    """A synchronous call's body. Raises ApiError."""
    fields = refuse_unsupported(raw)
    if endpoint is Endpoint.CHAT:
        chat = _validate(ChatBody, fields)
        _check_chat(chat)
        body: CallBody = chat
    else:
        completion = _validate(CompletionBody, fields)
        _check_completion(completion)
        body = completion
    if body.stream_options is not None and not body.stream:
        raise invalid_value("stream_options", "stream_options is for calls with stream: true")
    return body


def parse_job(raw: Mapping[str, Any]) -> JobBody:
    """Raises ApiError."""
    return _validate(JobBody, raw)


def check_goes_on(body: CallBody) -> None:
    """Raises ApiError where a job is to be cancelled with a caller that it does not have."""
    if body.on_disconnect == "cancel":
        message = "on_disconnect: nobody waits for a job, so that nobody's leaving can cancel it"
        raise invalid_value("on_disconnect", message)


def parse_job_change(raw: Mapping[str, Any]) -> JobChange:
    """Raises ApiError, also where nothing is to be changed."""
    change = _validate(JobChange, raw)
    if change.lane is None and change.deadline_s is None:
        raise bad_request("missing_required_parameter", "give a lane, a deadline_s or both", "lane")
    return change


def _check_chat(body: ChatBody) -> None:
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid_value("top_logprobs", "top_logprobs needs logprobs: true")
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise invalid_value("max_tokens", "max_tokens and max_completion_tokens differ: give one")


def _check_completion(body: CompletionBody) -> None:
    num_prompts, n = len(body.prompt), body.n or 1
    if num_prompts * n > MAX_CHOICES_IN_ALL:
        message = (
            f"n is {n} for each of {num_prompts} prompts: together {num_prompts * n} choices, "
            f"over the most of one call, {MAX_CHOICES_IN_ALL}"
        )
        raise invalid_value("n", message)
    if body.best_of not in (None, body.n or 1):
        raise bad_request("unsupported_parameter", "best_of must equal n", "best_of")
    if body.max_tokens == 0 and not body.echo:
        raise invalid_value("max_tokens", "max_tokens may be 0 with echo: true only")


def _validate(model: type[_M], fields: Mapping[str, Any]) -> _M:
    try:
        return model.model_validate(fields)
    except ValidationError as exc:
        error = exc.errors(include_input=False, include_url=False)[0]
        if error["type"] == "extra_forbidden":
            known = model.model_fields if len(error["loc"]) == 1 else ()
            raise unknown_parameter(_path(error["loc"], fields), known) from None
        raise _translated(error, fields) from None


def _translated(error: ErrorDetails, fields: Mapping[str, Any]) -> ApiError:
    param = _path(error["loc"], fields)
    if error["type"] == "missing":
        missing = f"{param}.{error['loc'][-1]}" if param else str(error["loc"][-1])
        return bad_request("missing_required_parameter", f"missing parameter: {missing}", missing)
    return invalid_value(param, f"{param}: {error['msg']}")


def _path(loc: Sequence[int | str], fields: Mapping[str, Any]) -> str:
    """The error's place as the caller wrote it: pydantic also names the types it tried."""
    node: Any = fields
    path: list[str] = []
    for part in loc:
        if isinstance(node, Mapping) and part in node:
            node = node[str(part)]
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
        else:
            continue
        path.append(str(part)[:_MAX_NAME])
    return ".".join(path)
