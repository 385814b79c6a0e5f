"""The body of Anthropic's POST /v1/messages, and the chat that it asks for. What no model here can
read is refused by name.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, model_validator
from pydantic_core import to_json

from contract.function_types import Submission
from contract.jobs import Job
from gateway.http.errors import UNSUPPORTED, ApiError, ContextExceeded
from gateway.prepare.calls import prepare_call
from gateway.prepare.generation import BUDGET
from gateway.prepare.schemas import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    CallId,
    ChatBody,
    Description,
    Schema,
    ToolName,
    few_parts,
    image_source,
    validated_chat,
)
from gateway.prepare.unsupported import CallFields, StrictModel, refusal, unsupported
from gateway.state import Gateway

_MIN_BUDGET = 1_024  # Anthropic's
_READABLE = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")

# Parameter -> values without effect.
UNSUPPORTED_OF_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "container": (),
    "fallbacks": ([],),
    "inference_geo": ("global",),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
_OF_TOOLS: Mapping[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}

# Parameters of a chat -> those of a message, in errors.
_NAMES = {
    "reasoning_effort": "thinking",
    "stop": "stop_sequences",
    BUDGET: "thinking.budget_tokens",
}
_WISHES = ("reasoning_effort", BUDGET)


class TextBlock(StrictModel):
    type: Literal["text"]
    text: str


class ImageBlockSource(StrictModel):
    """Bytes in base64, or a file of this server; a URL is refused, as in chats."""

    type: Literal["base64", "url", "file"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.type == "base64" and (self.media_type is None or self.data is None):
            raise refusal("needs media_type and data")
        image_source(self.of_chat())
        return self

    def of_chat(self) -> dict[str, str | None]:
        if self.type == "base64":
            return {"url": f"data:{self.media_type};base64,{self.data}"}
        return {"url": self.url} if self.type == "url" else {"file_id": self.file_id}


class ImageBlock(StrictModel):
    type: Literal["image"]
    source: ImageBlockSource


class ThinkingBlock(StrictModel):
    """Reasoning of an earlier turn; the chat template decides whether the model sees it again. Its
    signature is not checked."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(StrictModel):
    """Of another server: nothing here can read it."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(StrictModel):
    type: Literal["tool_use"]
    id: CallId
    name: Annotated[str, Field(min_length=1)]
    input: Annotated[dict[str, Any], Field(max_length=MAX_PARTS)]

    def of_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": to_json(self.input).decode()}
        return {"id": self.id, "type": "function", "function": function}


def _blocks(value: Any) -> Any:
    """A string as its one block. Refuses blocks of other types, by name."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    for i, block in enumerate(value[:MAX_PARTS] if isinstance(value, list) else ()):
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in _READABLE:
            raise unsupported(f"blocks are of type {', '.join(_READABLE)}", f"{i}.type")
    return value


_Texts = Annotated[list[TextBlock], Field(max_length=MAX_PARTS)]
System = Annotated[_Texts, BeforeValidator(_blocks, json_schema_input_type=str | _Texts)]
_Results = Annotated[
    list[Annotated[TextBlock | ImageBlock, Discriminator("type")]], Field(max_length=MAX_PARTS)
]


class ToolResultBlock(StrictModel):
    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Annotated[
        _Results, BeforeValidator(_blocks, json_schema_input_type=str | _Results)
    ] = Field(default_factory=list)
    is_error: bool | None = None

    def of_chat(self) -> dict[str, Any]:
        """Chat templates know no errors: the text tells."""
        parts = [{"type": "text", "text": "Error:"}] if self.is_error else []
        parts += [_part(block) for block in self.content]
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": parts or ""}


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    return {"type": "image_url", "image_url": block.source.of_chat()}


_Content = Annotated[
    list[
        Annotated[
            TextBlock
            | ImageBlock
            | ThinkingBlock
            | RedactedThinkingBlock
            | ToolUseBlock
            | ToolResultBlock,
            Discriminator("type"),
        ]
    ],
    Field(min_length=1, max_length=MAX_PARTS),
]
_OF_ROLES = {"system": ("text",), "user": ("text", "image", "tool_result")}


class MessageParam(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[_Content, BeforeValidator(_blocks, json_schema_input_type=str | _Content)]

    @model_validator(mode="after")
    def _fits_role(self) -> Self:
        kinds = _OF_ROLES.get(self.role, ("text", "thinking", "redacted_thinking", "tool_use"))
        for i, block in enumerate(self.content):
            if block.type not in kinds:
                raise refusal(f"is not for messages of the {self.role}", f"content.{i}.type")
        return self


class ToolParam(StrictModel):
    """A function that the model may call. Tools of Anthropic's own have other types."""

    unasked = _OF_TOOLS

    type: Literal["custom"] | None = None
    name: ToolName
    description: Description | None = None
    input_schema: Schema
    strict: bool | None = None

    def of_chat(self) -> dict[str, Any]:
        function = {name: getattr(self, name) for name in ("name", "description", "strict")}
        return {"type": "function", "function": function | {"parameters": self.input_schema}}


def _tools(value: Any) -> Any:
    for i, tool in enumerate(value[:MAX_TOOLS] if isinstance(value, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            message = "only tools with an input_schema are supported: this server hosts none"
            raise unsupported(message, f"{i}.type")
    return value


class ToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.name is not None) != (self.type == "tool"):
            raise refusal("must be given with type tool, and only then", "name")
        return self

    def of_chat(self) -> str | dict[str, Any]:
        if self.name is not None:
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(StrictModel):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=_MIN_BUDGET, lt=2**31)
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.budget_tokens is not None) != (self.type == "enabled"):
            raise refusal("must be given with type enabled, and only then", "budget_tokens")
        return self


class JsonFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


def _tier(value: Any) -> Any:
    return "default" if value == "standard_only" else value


def _given(value: Any) -> Any:
    is_object = isinstance(value, dict)
    return {k: v for k, v in value.items() if v is not None} if is_object else value


class PromptBody(CallFields):
    """POST /v1/messages/count_tokens: what makes the prompt."""

    unasked = UNSUPPORTED_OF_MESSAGES
    ignored = (*CallFields.ignored, "context_management", "diagnostics")

    messages: Annotated[
        list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES), BeforeValidator(few_parts)
    ] = Field(description="the conversation; `content` is text or blocks")
    system: System | None = Field(None, description="the first message")
    tools: (
        Annotated[list[ToolParam], Field(max_length=MAX_TOOLS), BeforeValidator(_tools)] | None
    ) = Field(None, description="functions to call")
    tool_choice: ToolChoice | None = Field(None, description="default: `auto`")
    thinking: Thinking | None = Field(
        None, description="whether the model reasons, if it can be told; default: the model's"
    )
    output_config: OutputConfig | None = Field(None, description="effort of the reasoning, format")
    output_format: JsonFormat | None = Field(None, description="as `output_config.format`")
    service_tier: Annotated[
        Literal["auto", "default", "priority", "flex"] | None, BeforeValidator(_tier)
    ] = Field(None, description="also `standard_only`; `priority` is the lane `interactive`")
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_given)] = Field(
        None, max_length=16, description="checked, ignored"
    )
    context_management: dict[str, Any] | None = Field(
        None, max_length=16, description="ignored: nothing is edited"
    )
    diagnostics: dict[str, Any] | None = Field(None, max_length=16, description="ignored")

    @model_validator(mode="after")
    def _has_one_format(self) -> Self:
        if self.output_format and self.output_config and self.output_config.format:
            raise refusal("cannot be combined with output_config.format", "output_format")
        return self

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    def chat(self, *, folds_system: bool = False) -> ChatBody:
        """The same call as a chat. `folds_system`: system messages after the first become the
        user's, for templates that take none there. Raises ApiError."""
        config = self.output_config or OutputConfig()
        fields: dict[str, Any] = {
            "model": self.model,
            "service_tier": self.service_tier,
            "on_disconnect": self.on_disconnect,
            "messages": self._chat_messages(folds_system),
            "tools": [tool.of_chat() for tool in self.tools] if self.tools else None,
            "reasoning_effort": config.effort,
        }
        if self.tool_choice is not None:
            fields["tool_choice"] = self.tool_choice.of_chat()
            if self.tool_choice.disable_parallel_tool_use:
                fields["parallel_tool_calls"] = False
        if self.thinking is not None:
            is_on = self.thinking.type != "disabled"
            fields["reasoning_effort"] = (config.effort or "medium") if is_on else "none"
            fields[BUDGET] = self.thinking.budget_tokens
        if (format_ := self.output_format or config.format) is not None:
            schema = {"name": "output", "schema": format_.schema_, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        try:
            return validated_chat(fields | self._of_output())
        except ApiError as exc:
            raise self.renamed(exc) from None

    def renamed(self, error: ApiError) -> ApiError:
        """The error of a chat, with the names of a message's parameters, and in Anthropic's words
        where clients recognise them."""
        given = error.param or ""
        name, _, rest = given.partition(".")
        match name:
            case "messages":  # the places among a chat's are others
                rest = ""
            case "response_format":
                name = "output_format" if self.output_format else "output_config.format"
                rest = rest.removeprefix("json_schema").removeprefix(".")
            case "tools" | "tool_choice":
                rest = rest.replace("function.parameters", "input_schema", 1)
                rest = rest.replace("function.", "", 1)
        error.param = ".".join(part for part in (_NAMES.get(name, name), rest) if part)
        error.message = error.message.replace(given, error.param) if given else error.message
        if isinstance(error, ContextExceeded):
            error.message = f"prompt is too long: {error.num_prompt} tokens > {error.limit} maximum"
            if error.num_prompt < error.limit:
                error.message = (
                    "input length and `max_tokens` exceed context limit: "
                    f"{error.num_prompt} + {error.num_output} > {error.limit}, decrease input "
                    "length or `max_tokens` and try again"
                )
        return error

    def _of_output(self) -> dict[str, Any]:
        return {}

    def _chat_messages(self, folds_system: bool) -> list[dict[str, Any]]:
        """Turns of one role that follow each other become one, as Anthropic's do."""
        shown: list[dict[str, Any]] = []
        if self.system:
            shown.append({"role": "system", "content": [_part(block) for block in self.system]})
        for message in self.messages:
            role = "user" if folds_system and message.role == "system" else message.role
            for block in message.content:
                if isinstance(block, ToolResultBlock):
                    shown.append(block.of_chat())
                    continue
                if not shown or shown[-1]["role"] != role:
                    shown.append({"role": role})
                _add(shown[-1], block)
        return shown


def _add(
    shown: dict[str, Any],
    block: TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock,
) -> None:
    """Adds a block to a message of a chat."""
    match block:
        case ThinkingBlock():
            before = shown.get("reasoning_content")
            text = f"{before}\n{block.thinking}" if before else block.thinking
            shown["reasoning_content"] = text
        case ToolUseBlock():
            shown.setdefault("tool_calls", []).append(block.of_chat())
        case TextBlock() | ImageBlock():
            shown.setdefault("content", []).append(_part(block))


class MessagesBody(PromptBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, description="of the answer, its thinking included")
    stop_sequences: list[str] | None = Field(
        None, max_length=MAX_PARTS, description="as `stop` of a chat"
    )
    stream: bool | None = Field(None, description="Anthropic's events; default: false")
    temperature: float | None = Field(None, ge=0, le=2, description="default: the model's, else 1")
    top_p: float | None = Field(None, gt=0, le=1, description="default: the model's, else 1")
    top_k: int | None = Field(None, ge=0, lt=2**31, description="0: off; default: the model's")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.messages[-1].role == "assistant":
            message = (
                "the last message may not be the assistant's: prefill is not supported, the "
                "conversation must end with a user message"
            )
            raise unsupported(message, "messages")
        budget = self.thinking.budget_tokens if self.thinking else None
        if budget is not None and budget >= self.max_tokens:
            raise refusal("must be less than max_tokens", "thinking.budget_tokens")
        return self

    def _of_output(self) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "top_p", "top_k")
        return {name: getattr(self, name) for name in names} | {"stop": self.stop_sequences}


async def prepare_message(
    gateway: Gateway, body: PromptBody, job: Job, submission: Submission
) -> tuple[Job, Submission]:
    """Returns the job of a call, which is a chat's, and its submission. Raises ApiError."""
    chat = body.chat()
    while True:
        try:
            return await prepare_call(gateway, chat, job, submission)
        except ApiError as exc:
            other = _otherwise(chat, body, exc)
            if other is None:
                raise body.renamed(exc) from None
            chat = other


async def count_tokens(gateway: Gateway, body: PromptBody, job: Job, submission: Submission) -> int:
    """The tokens of the prompt; where it is beyond the context, at least so many. Raises
    ApiError."""
    try:
        job, _ = await prepare_message(gateway, body, job, submission)
    except ContextExceeded as exc:
        return exc.num_prompt
    return job.num_prompt_tokens


def _otherwise(chat: ChatBody, body: PromptBody, error: ApiError) -> ChatBody | None:
    """The chat in a form that the model may take; None if there is none. How much it thinks is only
    asked of it, but for not at all."""
    param = error.param or ""
    if error.code == UNSUPPORTED and param in _WISHES and getattr(chat, param) != "none":
        return chat.model_copy(update={param: None})
    if param == "messages" and any(each.role == "system" for each in chat.messages[1:]):
        return chat.model_copy(update={"messages": body.chat(folds_system=True).messages})
    return None
