"""Request bodies in OpenAI's format: types and ranges of all fields, also of vLLM's.

generation.py checks what depends on the model: vocabulary, context length, defaults.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import to_json

from contract.model_cards import ModelCard, TokenizerFiles
from contract.output_formats import ToolFormat
from gateway.grammars.compiler import Constraint
from gateway.http.errors import MISSING, ApiError, invalid_value
from gateway.http.handlers import translated
from gateway.models.past_calls import arguments_object, fitting_id
from gateway.models.tokens import Cut
from gateway.prepare.unsupported import (
    OF_MESSAGES,
    PARTS,
    ROLES,
    TEXT_PART,
    UNSUPPORTED,
    CallFields,
    StrictModel,
    Wanted,
    none_of,
    refusal,
    unsupported,
)

_MAX_LISTED = 10_000  # outputs of which one is to be chosen
_MAX_TEXT = 64 * 1024
_MAX_KEYWORDS = 1_024  # of the outermost object of a schema

Schema = Annotated[dict[str, Any], Field(max_length=_MAX_KEYWORDS)]
Expression = Annotated[str, Field(min_length=1, max_length=_MAX_TEXT)]
Choices = Annotated[list[str], Field(min_length=1, max_length=_MAX_LISTED)]

# Parameter -> values without effect.
_OF_SAMPLED = {**UNSUPPORTED, **none_of("max_tokens seed", -1), **none_of("logit_bias", [])}
_OF_CHATS = {**_OF_SAMPLED, **none_of("max_completion_tokens", -1)}

MAX_TOOLS = 128

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
Description = Annotated[str, Field(max_length=_MAX_TEXT)]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_MAX_VARIABLES = 64
# Variables that the gateway sets itself, or that have a parameter of the call.
_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

MAX_STOPS = 1_024
MAX_STOP_BYTES = 16_384  # of all stop strings of a call
MAX_PROMPTS = 64
MAX_TOKEN_IDS = 2**20  # of one prompt or input
MAX_MESSAGES = 4_096  # or items
MAX_PARTS = 8_192  # of the content of all messages, and calls in them
MAX_LOGIT_BIASES = 300
MAX_CHOICES = 8  # of one prompt
MAX_CHOICES_IN_ALL = 128  # of all prompts of a call
MAX_TOP_LOGPROBS = 20
MAX_LISTED_IDS = 1_024  # as many as vLLM takes
_INT64 = 2**63
_MAX_NAME = 64


# What the OpenAPI document says of fields with validators of their own.
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_BYTES)]
_Stops = _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)]
_Parts = Field(min_length=1, max_length=MAX_PARTS)
_Ids = list[Annotated[int, Field(ge=0)]]
TokenIds = Annotated[_Ids, Field(min_length=1, max_length=MAX_TOKEN_IDS)]
_Several = Annotated[list[str | TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
_Prompt = str | TokenIds | _Several

TopLogprobs = Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)]
_Penalty = Annotated[float | None, Field(ge=-2, le=2, description="default: the model's, else 0")]


class JsonSchemaFormat(Wanted):
    """The `json_schema` of a response format."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Annotated[str, Field(max_length=4096)] | None = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Wanted):
    """Text, any JSON object, or JSON of a schema, which other servers take beside `json_object`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.schema_ is not None and self.type != "json_object":
            raise refusal("must be given with type json_object, and only then", "schema")
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise refusal("must be given with type json_schema, and only then", "json_schema")
        return self


class StructuredOutputs(Wanted):
    """vLLM's parameter: exactly one of these."""

    unasked = none_of(
        "disable_additional_properties disable_any_whitespace disable_fallback _backend_was_auto",
        False,
    ) | none_of("structural_tag whitespace_pattern _backend")

    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    regex: Expression | None = None
    choice: Choices | None = None
    grammar: Expression | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if sum(value not in (None, False) for _, value in self) != 1:
            raise refusal("give exactly one of json, regex, choice, grammar and json_object")
        return self


class Constrained(StrictModel):
    """The parameters of a call that constrain its output: OpenAI's `response_format`, vLLM's
    `structured_outputs` and `guided_*`. At most one may be given. It becomes the job's grammar."""

    response_format: ResponseFormat | None = Field(None, description="form of the output")
    structured_outputs: StructuredOutputs | None = Field(None, description="exactly one of these")
    guided_json: Schema | str | None = Field(None, description="as `structured_outputs.json`")
    guided_regex: Expression | None = Field(None, description="as `structured_outputs.regex`")
    guided_choice: Choices | None = Field(None, description="as `structured_outputs.choice`")
    guided_grammar: Expression | None = Field(None, description="as `structured_outputs.grammar`")

    @model_validator(mode="after")
    def _constrains_once(self) -> Self:
        given = [name for name in Constrained.model_fields if getattr(self, name) is not None]
        if len(given) > 1:
            raise refusal(f"cannot be combined with {given[0]}", given[1])
        return self

    @property
    def constraint(self) -> "Constraint | None":
        """The constraint on the output, if any."""
        if (format_ := self.response_format) is not None:
            if format_.json_schema is not None:
                schema, strict = format_.json_schema.schema_, format_.json_schema.strict
                name = "response_format.json_schema.schema"
                return Constraint(name, "json_schema", schema, bool(strict))
            if format_.schema_ is not None:
                return Constraint("response_format.schema", "json_schema", format_.schema_)
            if format_.type == "json_object":
                return Constraint("response_format", "json_schema", {"type": "object"})
            return None
        asked = self.structured_outputs
        if asked is not None and asked.json_object:
            return Constraint("structured_outputs", "json_schema", {"type": "object"})
        prefix = "guided_" if asked is None else "structured_outputs."
        for name in ("json", "regex", "choice", "grammar"):
            if asked is None:
                value = getattr(self, f"guided_{name}")
            else:
                value = asked.json_ if name == "json" else getattr(asked, name)
            if value is not None:
                kind = "json_schema" if name == "json" else name
                return Constraint(prefix + name, kind, value)
        return None


class Function(Wanted):
    """A function that the model may call. `strict`: its calls always match `parameters`."""

    name: ToolName
    description: Description | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Wanted):
    unasked = none_of("strict", False)

    type: Literal["function"]
    function: Function


class FunctionName(Wanted):
    name: ToolName


class NamedTool(Wanted):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Wanted):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolChoice(Wanted):
    """Some of the tools, of which the model decides or must call one."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _arguments(value: Any) -> Any:
    """Some clients send null, or the object itself."""
    return to_json(value).decode() if isinstance(value, dict) else value or ""


class CalledFunction(StrictModel):
    """A function's name and arguments, whatever a model wrote."""

    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[str, BeforeValidator(_arguments, json_schema_input_type=str)] = ""

    def rendered(self, *, as_text: bool) -> dict[str, Any]:
        """The call as chat templates expect it: arguments are an object, or JSON as text."""
        arguments = arguments_object(self.arguments)
        text = json.dumps(arguments, ensure_ascii=False)
        return {"name": self.name, "arguments": text if as_text else arguments}


class ToolCall(StrictModel):
    """A call that the model made in an earlier turn."""

    id: CallId
    type: Literal["function"]
    function: CalledFunction


def _checked(variables: dict[str, Any]) -> dict[str, Any]:
    for name in variables:
        if name in _OWN or name.endswith("_token"):
            raise refusal("is not for chat_template_kwargs", name)
    return variables


Variables = Annotated[dict[str, Any], Field(max_length=_MAX_VARIABLES), AfterValidator(_checked)]


class Templated(StrictModel):
    """What a chat and a response ask of the chat template and its formats."""

    parallel_tool_calls: bool | None = Field(None, description="false: at most one; default: true")
    chat_template_kwargs: Variables | None = Field(None, description="variables of the template")
    thinking_token_budget: int | None = Field(None, ge=0, lt=2**31, description="reasoning tokens")


class WithTools(Templated, Constrained):
    """Parameters of a chat that concern tools."""

    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, description="functions to call")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice | None = Field(
        None, description="whether functions are called, and which; default: `auto`"
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise refusal("has two functions of one name", "tools")
        for path, tool in self._chosen():
            if tool.function.name not in names:
                raise refusal("names no function of tools", f"tool_choice.{path}function.name")
        if self.tool_choice == "required" and not names:
            raise refusal("needs tools", "tool_choice")
        return self

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model may call, the only ones in its prompt."""
        if self.tool_choice == "none":
            return []
        allowed = self.tools or []
        if isinstance(self.tool_choice, AllowedToolChoice):
            names = {tool.function.name for _, tool in self._chosen()}
            allowed = [tool for tool in allowed if tool.function.name in names]
        return allowed

    @property
    def forces_calls(self) -> bool:
        """Whether the output must be a call."""
        if isinstance(choice := self.tool_choice, AllowedToolChoice):
            return choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, NamedTool)

    def _chosen(self) -> list[tuple[str, NamedTool]]:
        """The functions that `tool_choice` names, and where."""
        match self.tool_choice:
            case NamedTool() as tool:
                return [("", tool)]
            case AllowedToolChoice(allowed_tools=allowed):
                return [(f"allowed_tools.tools.{i}.", tool) for i, tool in enumerate(allowed.tools)]
        return []

    def tool_constraint(self, format_: ToolFormat) -> Constraint | None:
        """The grammar of the calls, if the output must be a call or a function is strict; and of
        the answer beside them, if that is constrained."""
        choice = self.tool_choice
        answer = None if self.forces_calls else self.constraint
        named = choice.function.name if isinstance(choice, NamedTool) else None
        offered = {tool.function.name for tool in self.offered}
        functions = [
            (number, each.name, each.parameters or {"type": "object"}, bool(each.strict))
            for number, each in enumerate(tool.function for tool in self.tools or ())
            if each.name in offered and named in (None, each.name)
        ]
        is_any_strict = any(is_strict for *_, is_strict in functions)
        if not (self.forces_calls or is_any_strict or answer is not None):
            return None
        calls = {
            "format": msgspec.structs.asdict(format_),
            "is_bare": format_.is_bare,
            "functions": functions,
            "is_forced": self.forces_calls,
            "answer": None if answer is None else answer.request,
            "may_repeat": self.parallel_tool_calls is not False and named is None,
        }
        return Constraint("tools", "tools", calls)


WHOLE = -1  # the model's length


def _not_zero(value: Any) -> Any:
    if value == 0:
        raise refusal("must be at least 1, or -1: the model's length")
    return value


class Truncated(StrictModel):
    """How a call asks that long prompts be cut, in vLLM's words. tokens.py cuts them."""

    truncate_prompt_tokens: (
        Annotated[int, Field(ge=WHOLE, lt=2**31), AfterValidator(_not_zero)] | None
    ) = Field(None, description="longer prompts are cut to it; -1: to the context")
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="which is cut off; default: `left`, of vectors `right`"
    )

    def cut(self, card: ModelCard, *, room: int, cuts_left: bool) -> Cut | None:
        """Returns how the model's prompts are cut; None if they are not. `room`: the tokens of the
        longest prompt that the model allows; `cuts_left`: the default side. Raises ApiError."""
        asked = self.truncate_prompt_tokens
        if asked is None:
            if not card.truncates:
                return None
            asked = WHOLE
        if asked > card.context_length:
            name = "truncate_prompt_tokens"
            raise invalid_value(name, f"{name} may be at most {card.context_length} here")
        side = self.truncation_side
        return Cut(room if asked == WHOLE else asked, cuts_left if side is None else side == "left")


class TruncatedTexts(Truncated):
    """How a call for vectors asks that long texts be cut: also in Cohere's words."""

    truncate: Literal["NONE", "START", "END"] | bool | None = Field(
        None, description="the side that is cut off; true: `END`, false: `NONE`"
    )

    @model_validator(mode="after")
    def _is_one_wish(self) -> Self:
        if self.truncate is not None and self.truncation_side is not None:
            raise refusal("cannot be combined with truncate", "truncation_side")
        if self.truncate in ("NONE", False) and self.truncate_prompt_tokens is not None:
            raise refusal("cannot be combined with truncate_prompt_tokens", "truncate")
        return self

    def cut_texts(self, card: ModelCard) -> Cut | None:
        """Returns how texts are cut; None if they are not. Raises ApiError."""
        if self.truncate in ("NONE", False):
            return None
        cut = self.cut(card, room=card.context_length, cuts_left=self.truncate == "START")
        if cut is None and self.truncate is not None:
            return Cut(card.context_length, self.truncate == "START")
        return cut


def no_room(param: str) -> ApiError:
    """The error for a text of which nothing would be left."""
    message = f"{param}: nothing would be left of it: allow more tokens"
    return invalid_value(param, message)


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise refusal("must be a string or a list of strings")
    if not all(stops):
        raise refusal("a stop string must not be empty")
    if len(stops) > MAX_STOPS or sum(len(stop.encode()) for stop in stops) > MAX_STOP_BYTES:
        raise refusal(f"at most {MAX_STOPS} stop strings, of {MAX_STOP_BYTES} bytes together")
    return tuple(stops)


def _content(value: Any) -> Any:
    """Returns a string unchanged, and joins text parts by newlines where there is no image."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise refusal("must be a string or a non-empty list of parts, text or images")
    parts = [_part(part, i) for i, part in enumerate(value)]
    if any(part["type"] == "image_url" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _part(part: Any, i: int) -> Any:
    """A part of text or an image. Raises PydanticCustomError."""
    match part:
        case {"type": "text", "text": str()}:
            return part
        case {"type": "image_url"}:
            source = image_source(part.get("image_url"), f"{i}.image_url")
            return {"type": "image_url", "image_url": source}
        case {"type": "file", "file": {"file_id": _}}:
            return {"type": "image_url", "image_url": image_source(part["file"], f"{i}.file")}
        case {"type": str(kind)} if kind in PARTS:
            raise unsupported("only text and images are supported", f"{i}.type")
        case {"type": "text", "text": _}:
            raise refusal("the text of a part must be a string")
    raise refusal('each part must be {"type": "text", "text": …} or an image')


def image_source(source: Any, param: str | None = None) -> dict[str, str]:
    """Returns the data URL or the file of an image. Raises PydanticCustomError at `param`, also for
    another URL: this server fetches none."""
    given = source if isinstance(source, dict) else {}
    found = {name: given[name] for name in ("url", "file_id") if given.get(name) is not None}
    if len(found) != 1:
        raise refusal("an image has either a url, which is a data URL, or a file_id", param)
    [(name, value)] = found.items()
    if name == "file_id" and not (isinstance(value, str) and FILE_ID.fullmatch(value)):
        raise refusal("file_id must be the id of a file: file-…", param)
    if name == "url" and not (isinstance(value, str) and _DATA_URL.match(value)):
        raise refusal("url must be data:image/…;base64,…: this server fetches no URLs", param)
    return found


def few_parts(value: Any) -> Any:
    """Refuses messages, or items, whose lists are too long together, before any is read."""
    items = value[: MAX_MESSAGES + 1] if isinstance(value, list) else ()
    held = (each for item in items if isinstance(item, dict) for each in item.values())
    if sum(len(each) for each in held if isinstance(each, list)) > MAX_PARTS:
        raise refusal(f"at most {MAX_PARTS} parts of content, and calls, in all")
    return value


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
    return token_ids(value, "must be a string or a non-empty list of token ids")


def token_ids(value: Any, message: str, param: str | None = None) -> tuple[int, ...]:
    """Raises PydanticCustomError with the message."""
    if isinstance(value, list | tuple) and len(value) > MAX_TOKEN_IDS:
        raise refusal(f"at most {MAX_TOKEN_IDS} token ids", param)
    # `isinstance` takes a bool for an int.
    if not isinstance(value, list | tuple) or set(map(type, value)) != {int}:
        raise refusal(message, param)
    return tuple(value)


_OBJECTS = {"content": TEXT_PART | {"image_url", "file"}}
FILE_ID = re.compile(r"file-([0-9]{1,4}-)?[0-9a-f]{32}")
FileId = Annotated[str, Field(pattern=f"^{FILE_ID.pattern}$")]
_DATA_URL = re.compile(r"data:image/[a-z]{3,5};base64,")


class ChatTextPart(StrictModel):
    type: Literal["text"]
    text: str


class ImageSource(StrictModel):
    """Exactly one of both."""

    url: str | None = Field(None, description="`data:image/…;base64,…` of a PNG, JPEG, WebP, GIF")
    file_id: FileId | None = Field(None, description="a file with purpose `vision` or `user_data`")

    @property
    def kind(self) -> str:
        return "url" if self.file_id is None else "file_id"


class ChatImagePart(StrictModel):
    type: Literal["image_url"]
    image_url: ImageSource


class Message(StrictModel):
    """Assistants may have `tool_calls` and `reasoning_content`, which not all chat templates show;
    messages with the role `tool` have a `tool_call_id`."""

    unasked = OF_MESSAGES
    names_of_objects = _OBJECTS

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_role)
    ]
    content: Annotated[
        str | Annotated[list[ChatTextPart | ChatImagePart], _Parts], BeforeValidator(_content)
    ] = ""
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

    @property
    def parts(self) -> "list[ChatTextPart | ChatImagePart]":
        """Those of its content; none if it is text alone."""
        return [] if isinstance(self.content, str) else self.content

    @property
    def text(self) -> str:
        texts = (part.text for part in self.parts if part.type == "text")
        return self.content if isinstance(self.content, str) else "\n".join(texts)

    def rendered(self, files: TokenizerFiles) -> dict[str, Any]:
        """The message as the model's chat template expects it: with images as transformers'
        templates read them."""
        fields = self.model_dump(exclude_none=True, exclude={"tool_calls", "reasoning", "content"})
        fields["content"] = self.content
        if self.parts:
            fields["content"] = [
                part.model_dump() if part.type == "text" else {"type": "image"}
                for part in self.parts
            ]
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


class Sampled(StrictModel):
    """Parameters of chats, completions and responses."""

    temperature: float | None = Field(
        None, ge=0, le=2, description="0 is greedy; default: the model's, else 1"
    )
    top_p: float | None = Field(None, gt=0, le=1, description="default: the model's, else 1")
    presence_penalty: _Penalty = None
    frequency_penalty: _Penalty = None
    documents: list[str | Annotated[dict[str, str], Field(max_length=16)]] | None = Field(
        None, max_length=2048, description="for templates of flows, and of chats that read them"
    )


class _SamplingBody(Truncated, Sampled, CallFields, Constrained):
    """Parameters of both endpoints."""

    model_config = ConfigDict(extra="forbid")
    unasked = _OF_SAMPLED

    max_tokens: int | None = Field(None, ge=1, description="of a choice; default: as many as fit")
    min_tokens: int | None = Field(None, ge=0, description="up to `max_tokens`; default: 0")
    expected_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="estimate for times; limits count it where it is over what was learned"
    )
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0, -1: off; default: the model's")
    min_p: float | None = Field(None, ge=0, le=1, description="default: the model's, else 0")
    repetition_penalty: float | None = Field(
        None, gt=0, le=2, description="default: the model's, else 1"
    )
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MAX_LOGIT_BIASES, description="by token id; -100 forbids it"
    )
    add_special_tokens: bool | None = Field(None, description="default: true, of chats false")
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = Field(
        None, description="64 bits, the highest ignored; -1, default: by chance"
    )
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="choices per prompt; default: 1")
    stop: (
        Annotated[tuple[str, ...], BeforeValidator(_stops, json_schema_input_type=_Stops)] | None
    ) = Field(None, description="what ends a choice; 16,384 bytes are for all together")
    stop_token_ids: list[int] | None = Field(None, max_length=64, description="these end a choice")
    include_stop_str_in_output: bool | None = Field(None, description="what ended it stays in it")
    allowed_token_ids: list[int] | None = Field(
        None, min_length=1, max_length=MAX_LISTED_IDS, description="no other tokens are generated"
    )
    bad_words: list[Annotated[str, Field(min_length=1, max_length=256)]] | None = Field(
        None, max_length=64, description="texts that are not generated, as vLLM tokenizes them"
    )
    skip_special_tokens: bool | None = Field(None, description="in texts; default: true")
    spaces_between_special_tokens: bool | None = Field(None, description="default: true")
    return_tokens_as_token_ids: bool | None = Field(None, description="in log probabilities")
    ignore_eos: bool | None = Field(None, description="goes on to `max_tokens`; default: false")
    stream: bool | None = Field(None, description="the answer in events; default: false")
    stream_options: StreamOptions | None = Field(None, description="usage in the last chunk or all")
    return_token_ids: bool | None = Field(None, description="adds `token_ids`, `prompt_token_ids`")
    prompt_logprobs: TopLogprobs = Field(
        None, description="alternatives for each token of the prompt, in vLLM's form"
    )

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

    unasked = _OF_CHATS
    # Metadata of a stored chat is kept and shown.
    ignored = ("prompt_cache_retention", "safety_identifier", "user")

    messages: Annotated[
        list[Message],
        Field(min_length=1, max_length=MAX_MESSAGES),
        BeforeValidator(few_parts),
    ] = Field(description="the conversation; `content` is text, or parts: text and images")
    max_completion_tokens: int | None = Field(None, ge=1, description="as `max_tokens`")
    reasoning_effort: Effort | None = Field(None, description="default: the model's")
    add_generation_prompt: bool | None = Field(None, description="default: true")
    continue_final_message: bool | None = Field(None, description="answers go on with the last")
    chat_template: Annotated[str, Field(min_length=1, max_length=_MAX_TEXT)] | None = Field(
        None, description="in the place of the model's; needs the scope `templates`"
    )
    logprobs: bool | None = Field(None, description="of the output's tokens; default: false")
    top_logprobs: TopLogprobs = Field(None, description="alternatives per token; needs `logprobs`")
    store: bool | None = Field(None, description="true: the answer can be read again, and listed")
    metadata: dict[str, str] | None = Field(None, max_length=16, description="with `store`: shown")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise refusal("needs logprobs: true", "top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise refusal("excludes add_generation_prompt", "continue_final_message")
        known = self.metadata.items() if self.store and self.metadata else ()
        if any(not 1 <= len(name) <= 64 or len(value) > 512 for name, value in known):
            raise refusal("names have 1 to 64 characters, values up to 512", "metadata")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise refusal("differs from max_completion_tokens: give one", "max_tokens")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def left_out(self) -> list[str]:
        return [] if self.store or self.metadata is None else ["metadata"]


# What a stored chat shows of its request.
SHOWN = {"messages", "tools", "tool_choice", "response_format", "service_tier", "user", "seed"}
SHOWN |= {"temperature", "top_p", "presence_penalty", "frequency_penalty"}


class CompletionBody(_SamplingBody):
    """POST /v1/completions."""

    prompt: Annotated[
        tuple[Annotated[str | tuple[int, ...], BeforeValidator(_prompt)], ...],
        BeforeValidator(_prompts, json_schema_input_type=_Prompt),
    ] = Field(description="text or token ids, or several of these")
    logprobs: TopLogprobs = Field(None, description="of the output, with so many alternatives")
    best_of: int | None = Field(None, description="must equal `n`")
    echo: bool | None = Field(None, description="choices begin with the prompt and its `logprobs`")
    max_tokens: int | None = Field(None, ge=0, description="0: `echo` scores a text; default: 16")

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


def validated_chat(fields: dict[str, Any]) -> ChatBody:
    """A chat that another call asks for. Raises ApiError."""
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as exc:
        error = exc.errors()[0]
        raise translated({**error, "loc": ("body", *error["loc"])}, fields) from None


@contextlib.contextmanager
def renamed(names: Sequence[tuple[str, str]], most: int = -1) -> Iterator[None]:
    """Names parameters in errors of a chat as the call that asks for it does: patterns of their
    paths, and what is in their place there. `most`: places in a message; -1: all."""
    try:
        yield
    except ApiError as exc:
        if given := exc.param:
            for pattern, name in names:
                exc.param = re.sub(pattern, name, exc.param)
            exc.message = exc.message.replace(given, exc.param, most)
        raise
