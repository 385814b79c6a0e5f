"""Tools in chats: OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`, and messages with
calls and their results."""

import json
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import BeforeValidator, Field, model_validator

from contract.output_formats import ToolFormat
from gateway.grammars.compiler import Constraint
from gateway.grammars.rules.parameter_types import string_parameters
from gateway.prepare.past_calls import arguments_object
from gateway.prepare.structured import Constrained, Schema
from gateway.prepare.unsupported import StrictModel, refusal

MAX_TOOLS = 128

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class Function(StrictModel):
    """A function that the model may call. `strict`: its calls always match `parameters`."""

    name: ToolName
    description: Annotated[str, Field(max_length=16_384)] | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: Function


class FunctionName(StrictModel):
    name: ToolName


class NamedTool(StrictModel):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(StrictModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolChoice(StrictModel):
    """Some of the tools, of which the model decides or must call one."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _arguments(value: Any) -> Any:
    """Some clients send null, or the object itself."""
    return json.dumps(value) if isinstance(value, dict) else value or ""


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


class WithTools(Constrained):
    """Parameters of a chat that concern tools."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice | None = None
    parallel_tool_calls: bool | None = None

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
        if self.offered and self.constraint() is not None:
            given = [n for n in Constrained.model_fields if getattr(self, n) is not None]
            raise refusal("cannot be combined with tools that may be called", given[0])
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
    def string_parameters(self) -> dict[str, tuple[str, ...]]:
        """For each function that may be called, its parameters that are strings: models that write
        arguments without quotes do not show it."""
        functions = [tool.function for tool in self.offered]
        return {each.name: string_parameters(each.parameters or {}) for each in functions}

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
        """The grammar of the calls, if the output must be a call or a function is strict."""
        choice = self.tool_choice
        named = choice.function.name if isinstance(choice, NamedTool) else None
        offered = {tool.function.name for tool in self.offered}
        functions = [
            (number, each.name, each.parameters or {"type": "object"}, bool(each.strict))
            for number, each in enumerate(tool.function for tool in self.tools or ())
            if each.name in offered and named in (None, each.name)
        ]
        if not (self.forces_calls or any(is_strict for *_, is_strict in functions)):
            return None
        calls = {
            "format": msgspec.structs.asdict(format_),
            "is_bare": format_.is_bare,
            "functions": functions,
            "is_forced": self.forces_calls,
            "may_repeat": self.parallel_tool_calls is not False and named is None,
        }
        return Constraint("tools", "tools", calls)
