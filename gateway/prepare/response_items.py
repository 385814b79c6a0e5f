"""Input items of a response: messages, calls of functions and their results, reasoning, references.

What a text model cannot read is refused by name.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from gateway.prepare.tools import CalledFunction, CallId
from gateway.prepare.unsupported import StrictModel, refusal, unsupported

ItemId = Annotated[str, Field(min_length=1, max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]

_UNREADABLE_PARTS = frozenset({"input_image", "input_file", "input_audio", "refusal"})
# Items of tools that OpenAI hosts, or that only its own models use.
_UNREADABLE_ITEMS = frozenset(
    {
        "additional_tools",
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "compaction",
        "compaction_trigger",
        "computer_call",
        "computer_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)


def _parts(value: Any) -> Any:
    """A string as its one part. Refuses parts that are no text, by name."""
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    if not isinstance(value, list):
        return value
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _UNREADABLE_PARTS:
            raise unsupported("only text parts are supported", f"{i}.type")
    return value


class TextPart(StrictModel):
    """A part of a message."""

    type: Literal["input_text", "output_text"]
    text: str


Text = Annotated[
    list[TextPart], BeforeValidator(_parts, json_schema_input_type=str | list[TextPart])
]


class MessageItem(StrictModel):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text
    id: ItemId | None = None
    status: Status | None = None

    def kept(self) -> dict[str, Any]:
        is_output = self.role == "assistant"
        kind = "output_text" if is_output else "input_text"
        content: list[dict[str, Any]] = [{"type": kind, "text": p.text} for p in self.content]
        if is_output:
            content = [part | {"annotations": [], "logprobs": []} for part in content]
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
    output: Text
    id: ItemId | None = None
    status: Status | None = None

    def kept(self) -> dict[str, Any]:
        return {
            "type": "function_call_output",
            "status": "completed",
            "call_id": self.call_id,
            "output": "\n".join(part.text for part in self.output),
        }


class SummaryPart(StrictModel):
    type: Literal["summary_text"]
    text: str


class ReasoningPart(StrictModel):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(StrictModel):
    """Reasoning of an earlier turn; the chat template decides whether the model sees it again. What
    is encrypted is for OpenAI's models alone."""

    type: Literal["reasoning"]
    summary: list[SummaryPart] | None = None
    content: list[ReasoningPart] | None = None
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
    if kind in _UNREADABLE_ITEMS:
        raise unsupported("items of hosted and custom tools are not supported", "type")
    if kind not in _KINDS:
        raise refusal(f"must be an item of type {', '.join(_KINDS)}", "type")
    return value


_KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
OwnItem = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem
InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind),
    BeforeValidator(_readable),
]
