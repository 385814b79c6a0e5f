"""The body of Anthropic's POST /v1/messages, and the chat that it asks for."""

import hashlib
import itertools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import to_json

from contract.function_types import Submission
from contract.jobs import Job
from gateway.http.errors import MISSING, UNSUPPORTED, ApiError, ContextExceeded
from gateway.prepare import schemas
from gateway.prepare.calls import prepare_call
from gateway.prepare.generation import BUDGET
from gateway.prepare.job_bodies import CallBody
from gateway.prepare.schemas import MAX_PARTS, MAX_TOOLS, CallId, ChatBody, Schema, ToolName
from gateway.prepare.unsupported import (
    MAX_SESSION,
    SESSION,
    CallFields,
    StrictModel,
    refusal,
    unsupported,
)
from gateway.state import Gateway

# Parameter -> values without effect.
_UNSUPPORTED = {"container": (), "mcp_servers": ([],), "speed": ("standard",)}
_OF_TOOLS = {"allowed_callers": (["direct"],), "defer_loading": (False,), "input_examples": ([],)}
# With the same name and meaning in a chat.
_SHARED = ["model", "service_tier", "on_disconnect", "max_tokens", "temperature", "top_p", "top_k"]
_BUDGET = "thinking.budget_tokens"
# Of parameters of a chat -> those of a message, in errors.
_NAMES = (
    (r"^messages.*", "messages"),  # whose positions are others
    (r"^response_format(\.json_schema)?(?=\.|$)", "output_config.format"),
    (r"^(tools\.\d+|tool_choice)\.function\.", r"\1."),
    (r"^(tools\.\d+)\.parameters(?=\.|$)", r"\1.input_schema"),
    (r"^reasoning_effort$", "thinking"),
    (r"^stop(?=\.|$)", "stop_sequences"),
    (rf"^{BUDGET}$", _BUDGET),
)


class Source(StrictModel):
    """Of an image: base64, or a file of this server. URLs are refused, as in chats."""

    type: Literal["base64", "url", "file"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: schemas.FileId | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        schemas.image_source(self.of_chat())
        return self

    def of_chat(self) -> dict[str, str | None]:
        if self.type == "base64":
            return {"url": f"data:{self.media_type};base64,{self.data}"}
        return {"url": self.url, "file_id": self.file_id}


# Where it is, the conversation is a session.
CacheControl = Annotated[dict[str, Any] | None, Field(max_length=16)]


class Part(StrictModel):
    """A text or an image."""

    kinds: ClassVar[Mapping[str, tuple[str, ...]]] = {"text": ("text",), "image": ("source",)}

    type: str = Field(json_schema_extra={"enum": [*kinds]})
    text: str | None = None
    source: Source | None = None
    cache_control: CacheControl = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.type not in self.kinds:
            raise unsupported(f"must be one of {', '.join(self.kinds)}", "type")
        for name in self.kinds[self.type]:
            if getattr(self, name) is None:
                raise refusal("must be given", name, MISSING)
        return self

    def of_chat(self) -> dict[str, Any]:
        if self.type == "image" and self.source is not None:
            return {"type": "image_url", "image_url": self.source.of_chat()}
        return {"type": "text", "text": self.text}


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_ListOfParts = Annotated[list[Part], Field(max_length=MAX_PARTS)]
Parts = Annotated[_ListOfParts, BeforeValidator(_blocks, json_schema_input_type=str | _ListOfParts)]


class Block(Part):
    """Also reasoning of an earlier turn, whose signature is not checked, a call, or its result."""

    kinds: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **Part.kinds,
        "thinking": ("thinking",),
        "redacted_thinking": (),  # of another server: nothing here can read it
        "tool_use": ("id", "name", "input"),
        "tool_result": ("tool_use_id",),
    }

    type: str = Field(json_schema_extra={"enum": [*kinds]})
    thinking: str | None = None
    id: CallId | None = None
    name: Annotated[str, Field(min_length=1)] | None = None
    input: Annotated[dict[str, Any], Field(max_length=MAX_PARTS)] | None = None
    tool_use_id: CallId | None = None
    content: Parts | None = None
    is_error: bool | None = None


_ListOfBlocks = Annotated[list[Block], Field(min_length=1, max_length=MAX_PARTS)]


class MessageParam(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        _ListOfBlocks, BeforeValidator(_blocks, json_schema_input_type=str | _ListOfBlocks)
    ]


class ToolParam(StrictModel):
    """A function that the model may call. Anthropic's own tools have other types."""

    unasked = _OF_TOOLS

    type: Literal["custom"] | None = None
    name: ToolName
    description: schemas.Description | None = None
    input_schema: Schema
    strict: bool | None = None
    cache_control: CacheControl = None

    def of_chat(self) -> dict[str, Any]:
        function = {name: getattr(self, name) for name in ("name", "description", "strict")}
        return {"type": "function", "function": function | {"parameters": self.input_schema}}


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
    budget_tokens: int | None = Field(None, ge=1_024, lt=2**31)
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class PromptBody(CallFields):
    """POST /v1/messages/count_tokens."""

    unasked = _UNSUPPORTED
    ignored = (*CallFields.ignored, "context_management", "diagnostics")

    messages: Annotated[
        list[MessageParam],
        Field(min_length=1, max_length=schemas.MAX_MESSAGES),
        BeforeValidator(schemas.few_parts),
    ] = Field(description="the conversation; `content` is text or blocks")
    system: Parts | None = Field(None, description="the first message: text")
    tools: list[ToolParam] | None = Field(None, max_length=MAX_TOOLS, description="functions")
    tool_choice: ToolChoice | None = Field(None, description="default: `auto`")
    thinking: Thinking | None = Field(None, description="default: as the model does")
    output_config: OutputConfig | None = Field(None, description="effort of reasoning, JSON schema")
    service_tier: Annotated[
        Literal["auto", "default", "priority", "flex"] | None,
        BeforeValidator(lambda tier: "default" if tier == "standard_only" else tier),
    ] = Field(None, description="also `standard_only`; `priority` is the lane `interactive`")
    metadata: dict[str, Any] | None = Field(None, max_length=16, description="checked, ignored")
    cache_control: CacheControl = Field(
        None, description="here, or of blocks: calls of this conversation prefer one worker"
    )
    context_management: dict[str, Any] | None = Field(None, max_length=16, description="ignored")
    diagnostics: dict[str, Any] | None = Field(None, max_length=16, description="ignored")

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    def chat(self) -> ChatBody:
        """The same call as a chat. Raises ApiError."""
        config = self.output_config or OutputConfig()
        fields: dict[str, Any] = {name: getattr(self, name, None) for name in _SHARED}
        fields |= {"messages": self._chat_messages(), "priority": self.priority}
        fields["prompt_cache_key"] = self._session(fields["messages"])
        fields["stop"] = getattr(self, "stop_sequences", None)
        fields["tools"] = [tool.of_chat() for tool in self.tools] if self.tools else None
        fields["reasoning_effort"] = config.effort
        if (choice := self.tool_choice) is not None:
            fields["tool_choice"] = choice.of_chat()
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.thinking is not None:
            is_on = self.thinking.type != "disabled"
            fields["reasoning_effort"] = (config.effort or "medium") if is_on else "none"
            fields[BUDGET] = self.thinking.budget_tokens
        if config.format is not None:
            schema = {"name": "output", "schema": config.format.schema_, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        with schemas.renamed(_NAMES, most=1):
            return schemas.validated_chat(fields)

    def _session(self, messages: list[dict[str, Any]]) -> str | None:
        """The session that the call names; where it has breakpoints, what its conversation begins
        with, up to the first of the user."""
        if self.prompt_cache_key or SESSION in (self.metadata or ()):
            named = self.prompt_cache_key or str((self.metadata or {})[SESSION])
            return named[:MAX_SESSION]
        blocks = itertools.chain(*(message.content for message in self.messages))
        parts = itertools.chain[Part | ToolParam](self.system or (), self.tools or (), blocks)
        if all(each.cache_control is None for each in (self, *parts)):
            return None
        roles = [message["role"] for message in messages]
        first = messages[: 1 + roles.index("user")] if "user" in roles else messages[:1]
        return hashlib.sha256(to_json(first)).hexdigest()

    def _chat_messages(self) -> list[dict[str, Any]]:
        """Turns of one role that follow each other become one, as Anthropic's do."""
        shown: list[dict[str, Any]] = []
        if self.system:
            shown.append({"role": "system", "content": [part.of_chat() for part in self.system]})
        for message in self.messages:
            for block in message.content:
                if block.type == "tool_result":
                    # Chat templates know no errors: the text tells.
                    parts = [{"type": "text", "text": "Error:"}] if block.is_error else []
                    parts += [part.of_chat() for part in block.content or ()]
                    own = {"tool_call_id": block.tool_use_id, "content": parts or ""}
                    shown.append({"role": "tool", **own})
                    continue
                if not shown or shown[-1]["role"] != message.role:
                    shown.append({"role": message.role})
                _add(shown[-1], block)
        return shown


def _add(shown: dict[str, Any], block: Block) -> None:
    """Adds a block to a message of a chat."""
    match block.type:
        case "thinking":
            before = [shown["reasoning_content"]] if "reasoning_content" in shown else []
            shown["reasoning_content"] = "\n".join([*before, block.thinking or ""])
        case "tool_use":
            function = {"name": block.name, "arguments": to_json(block.input).decode()}
            call = {"id": block.id, "type": "function", "function": function}
            shown.setdefault("tool_calls", []).append(call)
        case "text" | "image":
            shown.setdefault("content", []).append(block.of_chat())


class MessagesBody(PromptBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, description="of the answer, its thinking included")
    stop_sequences: list[str] | None = Field(None, max_length=MAX_PARTS, description="as `stop`")
    stream: bool | None = Field(None, description="Anthropic's events; default: false")
    temperature: float | None = Field(None, ge=0, le=2, description="default: the model's, else 1")
    top_p: float | None = Field(None, gt=0, le=1, description="default: the model's, else 1")
    top_k: int | None = Field(None, ge=0, lt=2**31, description="0: off; default: the model's")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.messages[-1].role == "assistant":
            message = "prefill is not supported: the conversation must end with a user message"
            raise unsupported(message, "messages")
        budget = self.thinking.budget_tokens if self.thinking else None
        if budget is not None and budget >= self.max_tokens:
            raise refusal("must be less than max_tokens", _BUDGET)
        return self


async def prepare_any_call(
    gateway: Gateway, body: CallBody | PromptBody, job: Job, submission: Submission
) -> tuple[Job, Submission]:
    """As prepare_call, also for messages: their job is a chat's. Raises ApiError, JobRefused."""
    if not isinstance(body, PromptBody):
        return await prepare_call(gateway, body, job, submission)
    chat = body.chat()
    with schemas.renamed(_NAMES, most=1):
        while True:
            try:
                return await prepare_call(gateway, chat, job, submission)
            except ApiError as exc:
                param = exc.param or ""
                if isinstance(exc, ContextExceeded) and exc.num_prompt >= exc.limit:
                    # In Anthropic's words, by which clients recognise it.
                    num = f"{exc.num_prompt} tokens > {exc.limit} maximum"
                    exc.message = f"prompt is too long: {num}"
                # How much a model thinks is only asked of it, but for not at all.
                is_degree = exc.code == UNSUPPORTED and param in (BUDGET, "reasoning_effort")
                if not is_degree or getattr(chat, param) == "none":
                    raise
                chat = chat.model_copy(update={param: None})
