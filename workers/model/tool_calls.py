"""How a model writes tool calls: its own response template, or what its chat template shows.

A chat template renders past tool calls as the model was trained to write them. One that renders
them as JSON objects with a name and arguments tells the format; of another, only the response
template that comes with the tokenizer does (transformers' documentation, "Response Parsing").
"""

import json
import re
from typing import Any

import msgspec

from contract.model_cards import MAX_LITERAL_CHARS, ToolFormat

_NAME, _ARGUMENTS = "probe_of_format", {"first": "one", "second": 2}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {}},
    },
}
_ANSWER = "An answer."
_QUESTION = {"role": "user", "content": "A question."}


def read_tool_format(tokenizer: Any) -> tuple[str | None, ToolFormat | None]:
    """The response template as JSON, and the literal text of calls; None for what is not known."""
    template = getattr(tokenizer, "response_template", None)
    try:
        shown = _Shown(tokenizer) if tokenizer.chat_template else None
    except Exception:  # jinja2 raises many kinds for a template without tools
        shown = None
    if template is None and shown is not None:
        template = _template_of(tokenizer, shown)
    if template is None:
        return None, None
    return json.dumps(template), None if shown is None else shown.format


class _Shown:
    """How the chat template renders calls. Raises what it raises, and ValueError for arguments that
    are no JSON object and for text too long to be published."""

    def __init__(self, tokenizer: Any) -> None:
        prompt = _render(tokenizer, [_QUESTION], add_generation_prompt=True)
        begins = prompt.removeprefix(_render(tokenizer, [_QUESTION]))
        self.anchor = (begins or prompt.rpartition(_QUESTION["content"])[2]).partition("<think>")[0]
        answer = {"role": "assistant", "content": _ANSWER}
        turn_end = _render(tokenizer, [_QUESTION, answer]).partition(_ANSWER)[2]
        call = _after(prompt, _render(tokenizer, [_QUESTION, _assistant(1)]))
        self.call = call.removesuffix(turn_end).rpartition("</think>")[2].lstrip()
        name, arguments, end = _parts(self.call, 0)
        # A prompt that begins the reasoning needs it to end first.
        thinks = prompt.rstrip().endswith("<think>")
        self.format = ToolFormat(
            begin=("\n</think>\n\n" if thinks else "") + self.call[:name],
            middle=self.call[name + len(_NAME) : arguments],
            between=_between(tokenizer, prompt),
            end=self.call[end:],
        )
        literals = msgspec.structs.astuple(self.format)
        if max(len(literal or "") for literal in literals) > MAX_LITERAL_CHARS:
            raise ValueError("the text of a call is too long")


def _parts(text: str, start: int) -> tuple[int, int, int]:
    """Where the next call's name and arguments start, and where these end. Raises ValueError."""
    name = text.index(_NAME, start)
    arguments = text.index("{", name)
    value, end = json.JSONDecoder().raw_decode(text, arguments)
    if value != _ARGUMENTS:
        raise ValueError("the arguments are no JSON object")
    return name, arguments, end


def _between(tokenizer: Any, prompt: str) -> str | None:
    """What stands between the arguments of a call and the name of the next."""
    try:
        calls = _after(prompt, _render(tokenizer, [_QUESTION, _assistant(2)]))
        _, _, end = _parts(calls, 0)
        return calls[end : _parts(calls, end)[0]]
    except Exception:  # a template that takes one call at most
        return None


def _render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    text: str = tokenizer.apply_chat_template(messages, tools=[_TOOL], tokenize=False, **options)
    return text


def _assistant(num_calls: int) -> dict[str, Any]:
    function = {"name": _NAME, "arguments": _ARGUMENTS}
    calls = [
        {"id": f"callnum{i:02}", "type": "function", "function": function} for i in range(num_calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _after(prompt: str, text: str) -> str:
    """What the assistant has written. Some templates add to the prompt of past turns."""
    pairs = enumerate(zip(prompt, text, strict=False))
    return text[next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(text))) :]


def _template_of(tokenizer: Any, shown: _Shown) -> dict[str, Any] | None:
    """The response template of calls that are JSON objects, each with an opening of its own; None
    for others."""
    start = shown.call.rfind("{", 0, shown.call.index(_NAME))
    try:
        value, end = json.JSONDecoder().raw_decode(shown.call, max(0, start))
    except ValueError:
        return None
    keys = {given: key for key, given in value.items() if isinstance(given, str)}
    arguments = [key for key, given in value.items() if given == _ARGUMENTS]
    opening, closing = shown.call[:start].strip(), shown.call[end:].strip()
    between = shown.format.between
    if _NAME not in keys or not arguments or (between is not None and opening not in between):
        return None
    calls: dict[str, Any] = {
        "repeats": True,
        "content": "json",
        "transform": {
            "type": "function",
            "function": {
                "name": f"{{content.{keys[_NAME]}}}",
                "arguments": f"{{content.{arguments[0]}}}",
            },
        },
    }
    if opening:
        calls["open_pattern"] = r"\s*" + re.escape(opening)
    else:
        calls["open_pattern"] = rf"^\s*(?={re.escape(shown.format.begin)})"
    if closing:
        calls["close_pattern"] = re.escape(closing)
    fields = {"tool_calls": calls, "content": {"content": "text"}}
    if "</think>" in tokenizer.chat_template:
        fields["reasoning_content"] = {"open": "<think>", "close": "</think>", "content": "text"}
    return {"start_anchor": shown.anchor, "fields": fields}
