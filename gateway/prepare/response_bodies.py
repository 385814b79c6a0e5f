"""The body of POST /v1/responses with its items, and the chat that it asks for. What no model here
can read is refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from gateway.prepare.schemas import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    CalledFunction,
    CallId,
    ChatBody,
    Effort,
    FileId,
    Function,
    Sampled,
    Schema,
    Templated,
    ToolName,
    TopLogprobs,
    few_parts,
    image_source,
    renamed,
    validated_chat,
)
from gateway.prepare.unsupported import (
    DESCRIPTIONS,
    UNSUPPORTED,
    CallFields,
    Metadata,
    StrictModel,
    Wanted,
    none_of,
    refusal,
    unsupported,
)

ItemId = Annotated[str, Field(min_length=1, max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]

_UNREADABLE_PARTS = frozenset({"input_file", "input_audio"})
# Of items of tools that OpenAI hosts, or that only its own models use.
_UNREADABLE_ENDS = ("_call", "_call_output", "_tools", "_search_output")
_UNREADABLE_STARTS = ("compaction", "mcp_approval_", "program")

LOGPROBS = "message.output_text.logprobs"
HOSTED = "only functions are supported: this server hosts no tools"

# Parameter -> values without effect.
UNSUPPORTED_OF_RESPONSES = {
    **UNSUPPORTED,
    **none_of("allowed_token_ids background_options chat_template conversation prompt"),
    **none_of("bad_words context_management previous_input_messages stop stop_token_ids", []),
    **none_of("continue_final_message enable_response_messages ignore_eos", False),
    **none_of("add_generation_prompt skip_special_tokens spaces_between_special_tokens", True),
    **none_of("include_stop_str_in_output", False),
    **none_of("logit_bias", {}),
    **none_of("max_output_tokens seed", -1),
    **none_of("min_p", 0),
    **none_of("repetition_penalty", 1),
    **none_of("structured_outputs"),
    **none_of("top_k", 0, -1),
    **none_of("truncation", "disabled"),
}

# Of parameters of a chat -> those of a response, in errors.
NAMES = (
    (r"^response_format(\.json_schema)?(?=\.|$)", "text.format"),
    (r"^max_completion_tokens$", "max_output_tokens"),
    (r"^messages.*", "input"),  # whose positions are others
    (r"^reasoning_effort$", "reasoning.effort"),
    (r"^(tool.*?)\.function\b", r"\1"),
    (r"^tool_choice\.allowed_tools\b", "tool_choice"),
)


def _parts(value: Any) -> Any:
    """A string as its one part. Refuses parts that are no text, by name."""
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    if not isinstance(value, list):
        return value
    for i, part in enumerate(value[:MAX_PARTS]):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _UNREADABLE_PARTS:
            raise unsupported("only text and images are supported", f"{i}.type")
    return value


class TextPart(StrictModel):
    """A part of a message."""

    type: Literal["input_text", "output_text"]
    text: str


class ImagePart(StrictModel):
    """An image of a message: exactly one of both."""

    type: Literal["input_image"]
    image_url: str | None = Field(None, description="`data:image/…;base64,…`")
    file_id: FileId | None = Field(None, description="a file with purpose `vision` or `user_data`")

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        image_source({"url": self.image_url, "file_id": self.file_id})
        return self


class RefusalPart(StrictModel):
    """Text by which a model declined in an earlier turn."""

    type: Literal["refusal"]
    refusal: str


_OutputParts = Annotated[
    list[Annotated[TextPart | ImagePart, Discriminator("type")]], Field(max_length=MAX_PARTS)
]
Output = Annotated[_OutputParts, BeforeValidator(_parts, json_schema_input_type=str | _OutputParts)]
_InputParts = Annotated[
    list[Annotated[TextPart | ImagePart | RefusalPart, Discriminator("type")]],
    Field(max_length=MAX_PARTS),
]
Content = Annotated[_InputParts, BeforeValidator(_parts, json_schema_input_type=str | _InputParts)]


class MessageItem(StrictModel):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: ItemId | None = None
    status: Status | None = None

    def kept(self) -> dict[str, Any]:
        is_output = self.role == "assistant"
        content = [part.model_dump(exclude_none=True) for part in self.content]
        for part in content:
            if "text" in part:
                part["type"] = "output_text" if is_output else "input_text"
                part.update({"annotations": [], "logprobs": []} if is_output else {})
        return {"type": "message", "role": self.role, "status": "completed", "content": content}


class FunctionCallItem(CalledFunction):
    """A call that the model made in an earlier turn."""

    type: Literal["function_call"]
    call_id: CallId
    id: ItemId | None = None
    status: Status | None = None

    def kept(self) -> dict[str, Any]:
        return {
            "type": "function_call",
            "status": "completed",
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
        }


class FunctionOutputItem(StrictModel):
    type: Literal["function_call_output"]
    call_id: CallId
    output: Output
    id: ItemId | None = None
    status: Status | None = None

    def kept(self) -> dict[str, Any]:
        return {
            "type": "function_call_output",
            "status": "completed",
            "call_id": self.call_id,
            "output": [part.model_dump(exclude_none=True) for part in self.output]
            if any(part.type == "input_image" for part in self.output)
            else "\n".join(part.text for part in self.output if part.type != "input_image"),
        }


class SummaryPart(StrictModel):
    type: Literal["summary_text"]
    text: str


class ReasoningPart(StrictModel):
    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(StrictModel):
    """Reasoning of an earlier turn; the chat template decides whether the model sees it again. What
    is encrypted is for OpenAI's models alone."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryPart] | None, Field(max_length=MAX_PARTS)] = None
    content: Annotated[list[ReasoningPart] | None, Field(max_length=MAX_PARTS)] = None
    id: ItemId | None = None
    status: Status | None = None

    def kept(self) -> dict[str, Any]:
        return {
            "type": "reasoning",
            "status": "completed",
            "summary": [part.model_dump() for part in self.summary or ()],
            "content": [part.model_dump() for part in self.content or ()],
        }


class ItemReference(StrictModel):
    """An item of an earlier response, by its id."""

    type: Literal["item_reference"] | None = None
    id: ItemId


def _kind(value: Any) -> str | None:
    """The type of an item; clients leave it out of messages and references."""
    if isinstance(value, StrictModel):
        return str(getattr(value, "type", None) or "item_reference")
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if kind is None:
        return "message" if "role" in value else "item_reference"
    return kind if isinstance(kind, str) else None


def _readable(value: Any) -> Any:
    kind = _kind(value)
    if kind not in _KINDS:
        if kind and (kind.endswith(_UNREADABLE_ENDS) or kind.startswith(_UNREADABLE_STARTS)):
            raise unsupported("items of hosted and custom tools are not supported", "type")
        raise refusal(f"must be an item of type {', '.join(_KINDS)}", "type")
    return value


_KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind),
    BeforeValidator(_readable),
]


def _items(value: Any) -> Any:
    """A string is one message of the user."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _choice(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in ("function", "allowed_tools"):
        raise unsupported(HOSTED, "type")
    return value


class FunctionTool(Function):
    """OpenAI's function of a response: as a chat's, without a level of its own."""

    type: Literal["function"]


def _is_hosted(kind: str) -> str:
    if kind == "function":
        raise refusal("is for functions")
    return kind


class HostedTool(BaseModel):
    """A tool of another type, such as `web_search` or `custom`, which is left out."""

    type: Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_is_hosted)]


class NamedFunction(Wanted):
    type: Literal["function"]
    name: ToolName


class AllowedFunctions(Wanted):
    """Some of the functions, of which the model decides or must call one."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[Annotated[NamedFunction, BeforeValidator(_choice)]],
        Field(min_length=1, max_length=MAX_TOOLS),
    ]


class TextFormat(Wanted):
    """Text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: ToolName | None = None
    description: Annotated[str, Field(max_length=4096)] | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name in ("name", "schema"):
            is_given = getattr(self, "schema_" if name == "schema" else name) is not None
            if is_given != (self.type == "json_schema"):
                raise refusal("must be given with type json_schema, and only then", name)
        return self

    def shown(self) -> dict[str, Any]:
        given = self.model_dump(by_alias=True, exclude_unset=True)
        if self.type != "json_schema":
            return given
        return {"description": None} | given | {"strict": bool(self.strict)}

    def of_chat(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        fields = {name: getattr(self, name) for name in ("name", "description", "strict")}
        return {"type": self.type, "json_schema": {**fields, "schema": self.schema_}}


class TextOptions(Wanted):
    unasked = none_of("verbosity", "medium")

    format: TextFormat | None = None


class ReasoningOptions(Wanted):
    """Summaries have no effect: the reasoning itself is in the response."""

    harmless = DESCRIPTIONS | {"context"}  # which earlier reasoning is shown: the template decides

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(StrictModel):
    include_obfuscation: bool | None = None  # accepted; events are never padded


_Items = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
Input = Annotated[
    _Items,
    Field(description="text, or items of earlier turns and this one"),
    BeforeValidator(few_parts),
    BeforeValidator(_items, json_schema_input_type=str | _Items),
]


class ResponseBody(Templated, Sampled, CallFields):
    """POST /v1/responses."""

    unasked = UNSUPPORTED_OF_RESPONSES
    # Metadata is kept and shown.
    ignored = ("prompt_cache_retention", "safety_identifier", "user")

    input: Input
    instructions: str | None = Field(None, description="first system message; no chain inherits it")
    previous_response_id: ItemId | None = Field(None, description="its input and output come first")
    store: bool | None = Field(None, description="false: deleted when it ends; default: true")
    background: bool | None = Field(None, description="answers at once; default: false")
    stream: bool | None = Field(None, description="OpenAI's events; default: false")
    stream_options: StreamOptions | None = Field(None, description="no effect")
    max_output_tokens: int | None = Field(None, ge=1, description="as `max_tokens` of a chat")
    max_tool_calls: int | None = Field(None, ge=1, description="no effect")
    top_logprobs: TopLogprobs = Field(None, description="alternatives for each token of the output")
    include: (
        list[
            Literal[
                "code_interpreter_call.outputs",
                "computer_call_output.output.image_url",
                "file_search_call.results",
                "message.input_image.image_url",
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                "web_search_call.action.sources",
                "web_search_call.results",
            ]
        ]
        | None
    ) = Field(None, max_length=32, description="only `message.output_text.logprobs` has an effect")
    tools: Annotated[list[FunctionTool | HostedTool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="functions in this API's flat form; others are left out"
    )
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None,
        BeforeValidator(_choice),
    ] = Field(None, description="as of a chat, in the flat form; default: `auto`")
    text: TextOptions | None = Field(None, description="form of the output; default: `text`")
    reasoning: ReasoningOptions | None = Field(None, description="`effort` alone has an effect")
    metadata: Metadata | None = Field(None, description="the job's; names of up to 64 characters")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.background and self.store is False:
            raise refusal("needs store: a response that nobody waits for is read later", "store")
        if self.stream_options is not None and not self.stream:
            raise refusal("is for calls with stream: true", "stream_options")
        return self

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> ChatBody:
        """The same call as a chat with these messages. Raises ApiError."""
        if self.instructions:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        fields: dict[str, Any] = {name: getattr(self, name) for name in _SHARED}
        fields |= {"messages": messages, "max_completion_tokens": self.max_output_tokens}
        fields |= {"tools": self._chat_tools(), "tool_choice": self._chat_choice()}
        fields["reasoning_effort"] = None if self.reasoning is None else self.reasoning.effort
        if self.top_logprobs or LOGPROBS in (self.include or ()):
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.of_chat()
        with renamed(NAMES):
            return validated_chat(fields)

    @property
    def functions(self) -> list[FunctionTool]:
        return [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]

    def left_out(self) -> list[str]:
        return [f"tools.{tool.type}" for tool in self.tools or () if isinstance(tool, HostedTool)]

    def _chat_tools(self) -> list[dict[str, Any]] | None:
        functions = [{name: v for name, v in tool if name != "type"} for tool in self.functions]
        return [{"type": "function", "function": function} for function in functions] or None

    def _chat_choice(self) -> str | dict[str, Any] | None:
        match self.tool_choice:
            case NamedFunction() as tool:
                return _named(tool)
            case AllowedFunctions(mode=mode, tools=tools):
                allowed = {"mode": mode, "tools": [_named(tool) for tool in tools]}
                return {"type": "allowed_tools", "allowed_tools": allowed}
        return self.tool_choice


def _named(tool: NamedFunction) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


class InputTokensBody(ResponseBody):
    """POST /v1/responses/input_tokens. An earlier response may be counted alone."""

    input: Input = Field(default_factory=list)


# Parameters with the same name and meaning in a chat.
_SHARED = (
    "model",
    "service_tier",
    "priority",
    "on_disconnect",
    *Templated.model_fields,
    *Sampled.model_fields,
)
