"""Which formats a model writes its reasoning and its tool calls in.

A chat template shows past answers as the model was trained to write them. A format of the tables is
the model's if its parser reads back what the template shows. If no table contains the format, it is
derived from the template, provided that its calls are JSON between marks.
"""

import json
import os.path
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_changes
from itertools import product
from typing import Any, NamedTuple, TypeVar

import msgspec
import regex
from msgspec.structs import replace

from contract.output_formats import MAX_LITERAL_CHARS, ReasoningFormat, ToolFormat
from workers.engine.interface import ModelRefused
from workers.model.transformers_compat import render_jinja_template
from workers.output.formats import REASONING_FORMATS, TOOL_FORMATS
from workers.output.growing_text import compiled, loose
from workers.output.message import ResponseDelta
from workers.output.parser import OutputParser

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
class ShownAnswer:
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

    def calls(self, *calls: tuple[str, dict[str, Any]], content: str = "") -> ShownAnswer | None:
        """Renders an answer with calls; None if the template refuses it."""
        return self._answered(self._calling(calls, content))

    def refusal(self, *calls: tuple[str, dict[str, Any]]) -> str:
        """The error with which the template refuses an answer with calls; "" if it accepts it."""
        try:
            self._render([self._calling(calls, "")])
        except Exception as exc:  # jinja2 raises many kinds
            return f"{type(exc).__name__}: {exc}"[:_MAX_REFUSAL_CHARS]
        return ""

    def reasoning(self) -> list[ShownAnswer]:
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

    def _answered(self, message: dict[str, Any]) -> ShownAnswer | None:
        try:
            prompt = self._render([], add_generation_prompt=True)
            text = self._render([message])
        except Exception:  # jinja2 raises many kinds
            return None
        start = len(os.path.commonprefix([prompt, text]))
        if (cut := _CUT_MARK.search(text, 0, start)) is not None:
            start = cut.start()
        return ShownAnswer(text[:start], text[start:])

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


_Format = TypeVar("_Format", ReasoningFormat, ToolFormat)

_CALL, _OTHER = (NAME, ARGUMENTS), (OTHER_NAME, {"second": 3})
_EMPTY: tuple[str, dict[str, Any]] = (OTHER_NAME, {})


class FoundCalls(NamedTuple):
    """A format, and how the template wants messages with calls."""

    format: ToolFormat
    string_arguments: bool
    null_content: bool


def find_reasoning(chats: ShownChats, parser: str = "auto") -> ReasoningFormat | None:
    """Returns the format of the model's reasoning; None if it does not reason. `parser`: its name,
    "auto" or "none". Raises ModelRefused for an unknown name."""
    if parser == "none":
        return None
    known = _named(parser, REASONING_FORMATS, "reasoning")
    shown = [
        each for form in (chats, with_changes(chats, has_system=True)) for each in form.reasoning()
    ]
    right = [format_ for format_ in known if any(_reads_thought(format_, each) for each in shown)]
    if not right:
        right = [each for each in known if parser != "auto" or _is_in(each, chats)]
    text = "".join(each.text for each in shown)
    return max(right, key=lambda each: _likeness(each, text), default=None)


def find_calls(
    chats: ShownChats, reasoning: ReasoningFormat | None, parser: str = "auto"
) -> FoundCalls | None:
    """The format of the model's calls; None if unknown. `parser`: as of `find_reasoning`."""
    if parser == "none":
        return None
    known = _named(parser, TOOL_FORMATS, "tool call")
    is_harmony = reasoning is not None and reasoning.is_harmony
    if parser == "auto":
        known = [each for each in known if (each.name == "openai") == is_harmony]
    forms = product((False, True), repeat=3)
    for has_system, string_arguments, null_content in forms:
        form = with_changes(
            chats,
            has_system=has_system,
            string_arguments=string_arguments,
            null_content=null_content,
        )
        if (found := _find(form, known, reasoning, parser)) is not None:
            return FoundCalls(found, string_arguments, null_content)
    return None if parser == "auto" else FoundCalls(known[0], False, False)


def why_unknown(chats: ShownChats) -> str:
    """Why no format of calls was found."""
    if refusal := chats.refusal(_CALL):
        return f"the chat template fails on a message with calls: {refusal}"
    shown = chats.calls(_CALL)
    if shown is None or NAME not in shown.text:
        return "the chat template shows no calls"
    return "the chat template shows calls in a format that is not known"


def _find(
    chats: ShownChats,
    known: Sequence[ToolFormat],
    reasoning: ReasoningFormat | None,
    parser: str,
) -> ToolFormat | None:
    one, two = chats.calls(_CALL), chats.calls(_CALL, _OTHER)
    if one is None or NAME not in one.text:
        return None
    is_harmony = reasoning is not None and reasoning.is_harmony
    if not is_harmony:
        known = [each for each in known if each.is_bare or _begins_in(each, one.text)]
    # Some templates show calls behind a prompt that begins reasoning, and do not end the reasoning.
    for before in dict.fromkeys((reasoning, None)):
        right = [each for each in known if _reads(each, before, chats)]
        if not right and parser == "auto" and not is_harmony:
            learned = _learned(chats, before, one, two)
            right = [each for each in learned if _reads(each, before, chats)]
        if right:
            text = one.text if two is None else two.text
            best = max(right, key=lambda each: _likeness(each, text))
            return _fitted(best, before, chats, two)
    return None


def _begins_in(format_: ToolFormat, text: str) -> bool:
    return compiled(loose(format_.begin or format_.open)).search(text) is not None


def _fitted(
    format_: ToolFormat,
    reasoning: ReasoningFormat | None,
    chats: ShownChats,
    two: ShownAnswer | None,
) -> ToolFormat:
    """The format without what the template refuses: several calls in an answer, or long ids."""
    if _calls_of(format_, reasoning, two) != [_CALL, _OTHER]:
        format_ = replace(format_, between=None)
    if with_changes(chats, id_length=24).calls(_CALL) is None:
        format_ = replace(format_, id_length=chats.id_length)
    return format_


def _named(name: str, formats: Sequence[_Format], kind: str) -> Sequence[_Format]:
    found = [each for each in formats if name in ("auto", each.name)]
    if not found:
        known = ", ".join(sorted({each.name for each in formats}))
        raise ModelRefused(f"there is no {kind} parser {name}; known are auto, none, {known}")
    return found


def _reads(format_: ToolFormat, reasoning: ReasoningFormat | None, chats: ShownChats) -> bool:
    """Whether the parser finds the calls in all that the template shows."""
    shown = [(chats.calls(_CALL), _CALL), (chats.calls(_EMPTY), _EMPTY)]
    if not format_.is_bare:
        shown.append((chats.calls(_CALL, content=ANSWER), _CALL))
    return all(
        _calls_of(format_, reasoning, each) == [call]
        for each, call in shown
        if each is not None and call[0] in each.text
    )


def _calls_of(
    format_: ToolFormat, reasoning: ReasoningFormat | None, shown: ShownAnswer | None
) -> list[tuple[str, Any]]:
    if shown is None:
        return []
    calls = _read(format_, reasoning, shown).tool_calls
    try:
        return [(call.name, json.loads(call.arguments)) for call in calls]
    except ValueError:
        return []


def _reads_thought(format_: ReasoningFormat, shown: ShownAnswer) -> bool:
    message = _read(None, format_, shown)
    return message.reasoning == THOUGHT and message.content.startswith(ANSWER)


def _read(
    format_: ToolFormat | None, reasoning: ReasoningFormat | None, shown: ShownAnswer
) -> ResponseDelta:
    parser = OutputParser(format_, reasoning, shown.prompt_end, TOOLS)
    message = parser.push(shown.text)
    message.extend(parser.finish())
    return message


def _is_in(format_: ReasoningFormat, chats: ShownChats) -> bool:
    """Whether a template that shows no reasoning in past answers names the format's marks."""
    opening, close = format_.open.strip(), format_.close.strip()
    is_own = opening in chats.template or close not in chats.turn_end()
    return close in chats.template and is_own


def _likeness(format_: ToolFormat | ReasoningFormat, text: str) -> int:
    """How many literals of the format the text contains exactly."""
    literals = [each for each in msgspec.structs.astuple(format_) if isinstance(each, str)]
    return sum(each in text for each in literals if each.strip())


def _learned(
    chats: ShownChats, reasoning: ReasoningFormat | None, one: ShownAnswer, two: ShownAnswer | None
) -> Iterator[ToolFormat]:
    """Yields the format that the answers show, if their calls are JSON between marks."""
    if (call := _json_call(one.text, 0, *_CALL)) is None:
        return
    before, after = one.text[: call.start], one.text[call.end :].removesuffix(chats.turn_end())
    if reasoning is not None:
        before = before.rpartition(reasoning.close.strip())[2]
    before = before.lstrip()
    opening, close, between = before, after, None
    gap = "" if two is None else _gap(two.text)
    if gap:
        opening = _common(before[::-1], gap[::-1])[::-1]
        gap = gap[: len(gap) - len(opening)]
        close = _common(after, gap)
        between = gap[len(close) :]
    found = ToolFormat(
        begin=before[: len(before) - len(opening)],
        open=opening,
        close=close,
        between=between,
        end=after[len(close) :],
        **call.fields,
    )
    literals = [each for each in msgspec.structs.astuple(found) if isinstance(each, str)]
    if not found.is_bare and max(map(len, literals)) <= MAX_LITERAL_CHARS:
        yield found


def _gap(text: str) -> str:
    """The text between two calls."""
    if (first := _json_call(text, 0, *_CALL)) is None:
        return ""
    second = _json_call(text, first.end, *_OTHER)
    return "" if second is None else text[first.end : second.start]


def _common(one: str, other: str) -> str:
    return os.path.commonprefix([one, other])


class _JsonCall(NamedTuple):
    start: int
    end: int
    fields: dict[str, Any]  # of a ToolFormat


def _json_call(text: str, at: int, name: str, arguments: dict[str, Any]) -> _JsonCall | None:
    """Finds the next JSON object with name and arguments, or name before its arguments."""
    if (named := text.find(name, at)) < 0:
        return None
    start = text.rfind("{", at, named)
    value, end = _decoded(text, start)
    if isinstance(value, dict) and arguments in value.values() and name in value.values():
        keys = {repr(given): key for key, given in value.items()}
        fields = {"name_key": keys[repr(name)], "arguments_key": keys[repr(arguments)]}
        return _JsonCall(start, end, fields)
    start = text.find("{", named)
    value, end = _decoded(text, start)
    middle = text[named + len(name) : start]
    return (
        None if value != arguments else _JsonCall(named, end, {"syntax": "json", "middle": middle})
    )


def _decoded(text: str, start: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, start) if start >= 0 else (None, 0)
    except ValueError:
        return None, 0
