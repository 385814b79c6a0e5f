"""Splits the text of an output into content, reasoning and tool calls, as it is generated.

The model's response template says how (transformers' `ResponseParser` reads it). The deltas depend
only on the text and on where it is split into tokens, so a resumed job rebuilds the same state from
its log.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from contract.events import ToolCallDelta

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser

_ANCHOR_TOKENS = 256  # the end of the prompt in which the assistant's turn begins
_STRING = r'("(?:[^"\\]|\\.)*")'


@dataclass(slots=True)
class ResponseDelta:
    """What more text has added to a message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def extend(self, later: "ResponseDelta") -> None:
        self.content += later.content
        self.reasoning += later.reasoning
        for call in later.tool_calls:
            self.add_call(call)

    def add_call(self, call: ToolCallDelta) -> None:
        """Joins more arguments of the last call to what is there."""
        if self.tool_calls and self.tool_calls[-1].index == call.index:
            last = self.tool_calls[-1]
            arguments = last.arguments + call.arguments
            self.tool_calls[-1] = ToolCallDelta(call.index, last.name, arguments)
        else:
            self.tool_calls.append(call)


class ResponseFormat:
    """A model's response template. Importing transformers takes about a second."""

    def __init__(self, template: str, tokenizer: Tokenizer) -> None:
        """Raises ValueError if transformers does not accept the template."""
        self.template: dict[str, Any] = json.loads(template)
        self.parser("")
        added = tokenizer.get_added_tokens_decoder().values()
        # Whether special tokens mark the parts of an output.
        self.needs_special = any(t.special and t.content in _literals(self.template) for t in added)
        self.call_head = _call_head(self.template["fields"].get("tool_calls", {}))

    def parser(self, prompt_end: str) -> "ResponseParser":
        from transformers.utils.chat_parsing import ResponseParser

        return ResponseParser(self.template, prefix=prompt_end)


class ResponseText:
    """One choice's output."""

    def __init__(
        self, format_: ResponseFormat, tokenizer: Tokenizer, prompt_ids: Sequence[int]
    ) -> None:
        """The end of the prompt may begin the assistant's message."""
        self._format = format_
        prompt_end = tokenizer.decode(prompt_ids[-_ANCHOR_TOKENS:], skip_special_tokens=False)
        self._parser = format_.parser(prompt_end)
        self._has_failed = False
        self._call = _Call(0, format_.call_head)
        self._in_call = False
        self.num_calls = 0

    def push(self, text: str) -> ResponseDelta:
        delta = ResponseDelta()
        for char in text:  # one by one: the parser forgets what it read together with an error
            if self._has_failed:
                delta.content += char
            else:
                self._run(partial(self._parser.feed, char), delta)
        return delta

    def finish(self) -> ResponseDelta:
        """At the end of the output."""
        delta = ResponseDelta()
        if not self._has_failed:
            self._run(lambda: self._parser.finalize()[1], delta)
        return delta

    def _run(self, step: Callable[[], list[dict[str, Any]]], delta: ResponseDelta) -> None:
        """If the open region does not have its format, what of it has not been given is content, as
        is all that follows."""
        try:
            self._apply(step(), delta)
        except (ValueError, KeyError):
            self._has_failed = True
            if self._in_call and self._call.is_named:
                self.num_calls += 1
            elif self._in_call:
                delta.content += self._call.text

    def _apply(self, events: list[dict[str, Any]], delta: ResponseDelta) -> None:
        for event in events:
            name, kind = event["field"], event["type"]
            if name != "tool_calls":
                if kind == "region_chunk":
                    attribute = "content" if name == "content" else "reasoning"
                    setattr(delta, attribute, getattr(delta, attribute) + event["text"])
            elif kind == "region_open":
                self._call, self._in_call = _Call(self.num_calls, self._format.call_head), True
            elif kind == "region_chunk":
                if (call := self._call.push(event["text"])) is not None:
                    delta.add_call(call)
            else:
                self._close_call(event["value"], delta)

    def _close_call(self, value: Any, delta: ResponseDelta) -> None:
        self._in_call = False
        if self._call.is_named:
            self.num_calls += 1
            return
        for call in value if isinstance(value, list) else [value]:
            function = call.get("function", call) if isinstance(call, Mapping) else {}
            name, arguments = function.get("name"), function.get("arguments")
            if not isinstance(name, str):
                delta.content += self._call.text
                return
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            delta.add_call(ToolCallDelta(self.num_calls, name, arguments))
            self.num_calls += 1


class _Call:
    """The text of one call. If it is a JSON object with the name before the arguments, these are
    passed on as they come."""

    def __init__(self, index: int, head: re.Pattern[str] | None) -> None:
        self._index = index
        self._head = head
        self.text = ""
        self.is_named = False
        self._arguments = _JsonEnd()

    def push(self, text: str) -> ToolCallDelta | None:
        self.text += text
        if self.is_named:
            part = self._arguments.push(text)
            return ToolCallDelta(self._index, "", part) if part else None
        if self._head is None or (match := self._head.match(self.text)) is None:
            return None
        name = json.loads(match[1])
        self.is_named = True
        return ToolCallDelta(self._index, name, self._arguments.push(self.text[match.end() :]))


class _JsonEnd:
    """Passes a JSON object on up to its closing brace."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = self._has_ended = False

    def push(self, text: str) -> str:
        if self._has_ended:
            return ""
        for i, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = char == "\\", char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self._has_ended = True
                    return text[: i + 1]
        return text


def _call_head(calls: Mapping[str, Any]) -> re.Pattern[str] | None:
    """What precedes the arguments in a call that is a JSON object with a name and arguments; None
    if the template describes calls of another kind."""
    if calls.get("content") != "json" or calls.get("content_args") or calls.get("transform_each"):
        return None
    transform = calls.get("transform")
    function = transform.get("function") if isinstance(transform, Mapping) else None
    if function == "{content}":
        function = {"name": "{content.name}", "arguments": "{content.arguments}"}
    if not isinstance(function, Mapping):
        return None
    keys = [str(function.get(name)) for name in ("name", "arguments")]
    if not all(key.startswith("{content.") and key.count(".") == 1 for key in keys):
        return None
    name, arguments = (re.escape(key[len("{content.") : -1]) for key in keys)
    return re.compile(rf'\s*\{{\s*"{name}"\s*:\s*{_STRING}\s*,\s*"{arguments}"\s*:\s*(?=\{{)')


def _literals(spec: Mapping[str, Any]) -> str:
    """What opens and closes the fields. In patterns, backslashes may precede the characters."""
    names = ("open", "open_pattern", "close", "close_pattern")
    fields = spec["fields"].values()
    return json.dumps([each.get(name) for each in fields for name in names]).replace("\\", "")
