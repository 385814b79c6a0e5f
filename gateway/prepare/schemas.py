"""Request bodies in OpenAI's format: types and ranges of all fields.

generation.py checks what depends on the model: vocabulary, context length, defaults.

Over 300 lines: two bodies that share most of their fields, each field with its type and range.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    WithJsonSchema,
    model_validator,
)

from contract.model_cards import TokenizerFiles
from gateway.http.errors import MISSING
from gateway.prepare.past_calls import fitting_id
from gateway.prepare.structured import Constrained
from gateway.prepare.template_variables import Effort, Variables
from gateway.prepare.tools import MAX_TOOLS, CallId, ToolCall, WithTools
from gateway.prepare.truncation import Truncated
from gateway.prepare.unsupported import (
    OF_MESSAGES,
    PARTS,
    ROLES,
    TEXT_PART,
    UNSUPPORTED,
    CallFields,
    StrictModel,
    refusal,
    unsupported,
)

MAX_STOPS = 4
MAX_STOP_BYTES = 64
MAX_PROMPTS = 64
MAX_LOGIT_BIASES = 300
MAX_CHOICES = 8  # of one prompt
MAX_CHOICES_IN_ALL = 128  # of all prompts of a call
MAX_TOP_LOGPROBS = 20
_INT64 = 2**63
_MAX_NAME = 64


# Schemas in the OpenAPI document for fields with validators of their own.
_STOPS_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES},
            {
                "type": "array",
                "maxItems": MAX_STOPS,
                "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES},
            },
        ]
    }
)
_CONTENT_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string"},
            {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    "required": ["type", "text"],
                },
            },
        ]
    }
)
_TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string"},
            _TOKEN_IDS,
            {
                "type": "array",
                "minItems": 1,
                "maxItems": MAX_PROMPTS,
                "items": {"anyOf": [{"type": "string"}, _TOKEN_IDS]},
            },
        ]
    }
)


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise refusal("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise refusal(f"at most {MAX_STOPS} stop strings")
    if not all(0 < len(stop.encode()) <= MAX_STOP_BYTES for stop in stops):
        raise refusal(f"each stop string has 1 to {MAX_STOP_BYTES} bytes")
    return tuple(stops)


def _content(value: Any) -> Any:
    """Returns a string unchanged, and joins text parts by newlines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise refusal("must be a string or a non-empty list of text parts")
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in PARTS:
            raise unsupported("only text parts are supported", f"{i}.type")
        if not isinstance(part, dict) or not part.keys() >= TEXT_PART or kind != "text":
            raise refusal('each part must be {"type": "text", "text": …}')
        if not isinstance(part["text"], str):
            raise refusal("the text of a part must be a string")
    return "\n".join(part["text"] for part in value)


def _role(value: Any) -> Any:
    if isinstance(value, str) and value in ROLES:
        raise unsupported("functions are not supported: use tools")
    return value


def _prompts(value: Any) -> Any:
    """All prompts as a tuple. A list with one prompt equals that prompt."""
    if not (isinstance(value, list) and value and isinstance(value[0], str | list)):
        return (_prompt(value),)
    if len(value) > MAX_PROMPTS:
        raise refusal(f"at most {MAX_PROMPTS} prompts")
    return tuple(value) if len(value) > 1 else (_prompt(value[0]),)


def _prompt(value: Any) -> Any:
    """A string, or token ids as a tuple."""
    if isinstance(value, str):
        return value
    # `isinstance` takes a bool for an int.
    if isinstance(value, list | tuple) and set(map(type, value)) == {int}:
        return tuple(value)
    raise refusal("must be a string or a non-empty list of token ids")


_OBJECTS = {"content": TEXT_PART}


class Message(StrictModel):
    """Assistants may have `tool_calls` and `reasoning_content`, which not all chat templates show;
    messages with the role `tool` have a `tool_call_id`."""

    unasked = OF_MESSAGES
    names_of_objects = _OBJECTS

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_role)
    ]
    content: Annotated[str, BeforeValidator(_content), _CONTENT_SCHEMA] = ""
    name: Annotated[str, Field(max_length=_MAX_NAME)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: CallId | None = None
    reasoning_content: Annotated[str | None, AfterValidator(lambda text: text or None)] = None
    reasoning: str | None = None  # the same, as vLLM and OpenRouter name it

    @model_validator(mode="before")
    @classmethod
    def _without_content(cls, fields: Any) -> Any:
        """An assistant that called tools may have no content."""
        if isinstance(fields, dict) and fields.get("content") is None:
            if fields.get("role") == "assistant":
                return {name: value for name, value in fields.items() if name != "content"}
            if "content" not in fields:
                raise refusal("must be given", "content", MISSING)
        return fields

    @model_validator(mode="after")
    def _fits_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise refusal("is for messages of the assistant", "tool_calls")
        if self.reasoning_content and self.role != "assistant":
            raise refusal("is for messages of the assistant", "reasoning_content")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise refusal("must be given with the role tool, and only then", "tool_call_id")
        return self

    def rendered(self, files: TokenizerFiles) -> dict[str, Any]:
        """The message as the model's chat template expects it."""
        fields = self.model_dump(exclude_none=True, exclude={"tool_calls", "reasoning"})
        if self.reasoning and self.role == "assistant" and self.reasoning_content is None:
            fields["reasoning_content"] = self.reasoning
        format_ = files.tool_format
        id_length = 0 if format_ is None else format_.id_length
        if self.tool_call_id is not None:
            fields["tool_call_id"] = fitting_id(self.tool_call_id, id_length)
        if self.tool_calls:
            fields["tool_calls"] = [
                {
                    "id": fitting_id(call.id, id_length),
                    "type": "function",
                    "function": call.function.rendered(as_text=files.string_arguments),
                }
                for call in self.tool_calls
            ]
            if files.null_content and not self.content:
                fields["content"] = None
        return fields


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # of vLLM: usage in every chunk
    include_obfuscation: bool | None = None  # accepted; chunks are never padded


class _SamplingBody(Truncated, CallFields, Constrained):
    """Parameters of both endpoints."""

    model_config = ConfigDict(extra="forbid")
    unasked = UNSUPPORTED

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    expected_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None  # of a choice
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
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops), _STOPS_SCHEMA] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    documents: Annotated[list[str], Field(max_length=2048)] | None = None  # for flows

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refusal("is for calls with stream: true", "stream_options")
        return self

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def repeats_usage(self) -> bool:
        options = self.stream_options
        return self.includes_usage and options is not None and bool(options.continuous_usage_stats)


class ChatBody(WithTools, _SamplingBody):
    """POST /v1/chat/completions."""

    # Only the first error is reported; collecting 60,000, which fit in a body, took two seconds.
    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    chat_template_kwargs: Variables | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise refusal("needs logprobs: true", "top_logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise refusal("differs from max_completion_tokens: give one", "max_tokens")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(_SamplingBody):
    """POST /v1/completions."""

    prompt: Annotated[
        tuple[Annotated[str | tuple[int, ...], BeforeValidator(_prompt)], ...],
        FailFast(),
        BeforeValidator(_prompts),
        _PROMPT_SCHEMA,
    ]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: int | None = None
    echo: bool | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None  # 0: only with echo, to score a prompt

    @model_validator(mode="after")
    def _fits(self) -> Self:
        num_prompts, n = len(self.prompt), self.n or 1
        if num_prompts * n > MAX_CHOICES_IN_ALL:
            message = (
                f"n is {n} for each of {num_prompts} prompts: together {num_prompts * n} choices, "
                f"over the most of one call, {MAX_CHOICES_IN_ALL}"
            )
            raise refusal(message, "n")
        if self.best_of not in (None, n):
            raise unsupported("best_of must equal n", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise refusal("may be 0 with echo: true only", "max_tokens")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


GenerationBody = ChatBody | CompletionBody
