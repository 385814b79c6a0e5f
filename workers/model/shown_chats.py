"""Renders conversations with a chat template, to see how a model writes its answers."""

import json
import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from workers.model.transformers_compat import render_jinja_template

QUESTION = "A question of the probe."
ANSWER = "An answer of the probe."
THOUGHT = "A thought of the probe."
# The call of a probe: strings, numbers and what contains them.
NAME, OTHER_NAME = "probe_one", "probe_two"
ARGUMENTS: dict[str, Any] = {"first": "one text", "second": 2, "third": {"inner": ["x", 3]}}
TOOLS = {NAME: ("first",), OTHER_NAME: ()}
_MAX_REFUSAL_CHARS = 300
_PROPERTIES = {
    "first": {"type": "string", "description": "A text."},
    "second": {"type": "integer", "description": "A number."},
    "third": {
        "type": "object",
        "description": "More.",
        "properties": {},
        "additionalProperties": {"type": "string"},
    },
}
# A mark that a prompt and an answer have begun alike.
_CUT_MARK = regex.compile(r"[<\[][^<>\[\]\s]*\Z")


@dataclass(frozen=True)
class Shown:
    """An answer as the template shows it, with the text before and behind it."""

    prompt_end: str
    text: str


@dataclass(frozen=True)
class ShownChats:
    """A template, and its requirements for messages. `variables`: others that it reads."""

    template: str
    variables: Mapping[str, Any]
    has_system: bool = False
    string_arguments: bool = False  # of calls: JSON strings
    null_content: bool = False  # beside calls
    id_length: int = 9  # of calls

    def calls(self, *calls: tuple[str, dict[str, Any]], content: str = "") -> Shown | None:
        """Renders an answer with calls; None if the template refuses it."""
        return self._answered(self._calling(calls, content))

    def refusal(self, *calls: tuple[str, dict[str, Any]]) -> str:
        """The error with which the template refuses an answer with calls; "" if it accepts it."""
        try:
            self._render([self._calling(calls, "")])
        except Exception as exc:  # jinja2 raises many kinds
            return f"{type(exc).__name__}: {exc}"[:_MAX_REFUSAL_CHARS]
        return ""

    def reasoning(self) -> list[Shown]:
        """Renders an answer with reasoning, in each way that templates accept."""
        names = ("reasoning_content", "reasoning", "thinking", "thought")
        parts = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": ANSWER}]
        messages: list[dict[str, Any]] = [
            {"role": "assistant", "content": ANSWER, **dict.fromkeys(names, THOUGHT)},
            {"role": "assistant", "content": parts},
        ]
        shown = [self._answered(message) for message in messages]
        return [each for each in shown if each is not None and THOUGHT in each.text]

    def turn_end(self) -> str:
        """The text behind an answer."""
        shown = self._answered({"role": "assistant", "content": ANSWER})
        return "" if shown is None else shown.text.rpartition(ANSWER)[2]

    def _calling(self, calls: Sequence[tuple[str, dict[str, Any]]], content: str) -> dict[str, Any]:
        called = [
            {"id": _id(i, self.id_length), "type": "function", "function": self._function(*call)}
            for i, call in enumerate(calls)
        ]
        text = content or (None if self.null_content else "")
        return {"role": "assistant", "content": text, "tool_calls": called}

    def _function(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        given = json.dumps(arguments) if self.string_arguments else arguments
        return {"name": name, "arguments": given}

    def _answered(self, message: dict[str, Any]) -> Shown | None:
        try:
            prompt = self._render([], add_generation_prompt=True)
            text = self._render([message])
        except Exception:  # jinja2 raises many kinds
            return None
        start = len(os.path.commonprefix([prompt, text]))
        if (cut := _CUT_MARK.search(text, 0, start)) is not None:
            start = cut.start()
        return Shown(text[:start], text[start:])

    def _render(self, answer: Sequence[dict[str, Any]], **options: Any) -> str:
        system = [{"role": "system", "content": "A system message."}] if self.has_system else []
        rendered = render_jinja_template(
            conversations=[[*system, {"role": "user", "content": QUESTION}, *answer]],
            tools=[_tool(NAME), _tool(OTHER_NAME)],
            chat_template=self.template,
            **self.variables,
            **options,
        )
        text: str = rendered[0][0]
        return text


def _id(number: int, length: int) -> str:
    return f"callnum{number:02}".ljust(length, "0")


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": _PROPERTIES, "required": ["first"]}
    function = {"name": name, "description": "A tool.", "parameters": parameters}
    return {"type": "function", "function": function}
