"""What each family's model is asked and says, and what the API must make of it."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.real.families import Call, Family

PREFIX = "Please: "  # of the user's message, before the marker
GREETING = "Hello, <b>world</b> & you!\n\n日本 😀 naïve"
THOUGHT = 'The user greets. "Shall" I answer?\n\nYes: 日本.'
ANSWER = "Good day to you."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Finds a text.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "description": "What."},
                    "limit": {"type": "integer", "description": "How many."},
                    "places": {"type": "array", "items": {"type": "string"}},
                    "exact": {"type": "boolean"},
                },
                "required": ["text"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "The time.",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
FIND: Call = ("find", {"text": "a needle", "limit": 3, "places": ["hay", "stack"], "exact": True})
OTHER: Call = ("find", {"text": "another"})
NOW: Call = ("now", {})
HOSTILE = {
    "a closing mark": 'a </tool_call> b </function> c ]} "}; {',
    "opening marks": '<tool_call>{[TOOL_CALLS]<function=find>{"name": "now"',
    "marks of reasoning": "<think>a</think>b",
    "quotes and backslashes": "say \"yes\" or 'no', C:\\new\\\\table",
    "lines": "one\n\n two\t\r\nthree\n",
    "alphabets": "naïve 日本語 😀 \u200b é",
    "braces": '{"a": [1, {"b": null}]}}',
    "nothing": "",
}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "degrees": {"type": "integer", "minimum": -99, "maximum": 99},
    },
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
RECORD = {"city": "São <b>", "degrees": 21}
JSON_SCHEMA = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}
}


@dataclass(frozen=True)
class Answer:
    """A choice's message, with the calls' arguments parsed; streamed or whole, it is the same."""

    content: str | None
    calls: tuple[Call, ...] = ()
    reasoning: str | None = None
    finish_reason: str = "stop"
    num_tokens: int = 0
    num_reasoning_tokens: int = 0


@dataclass(frozen=True)
class Case:
    """`says`: the text of the model. `body`: fields of the request beside its messages."""

    title: str
    says: str
    expected: Answer | Callable[[Answer], bool] | None = None  # None: whatever it is
    body: Mapping[str, Any] = field(default_factory=dict)

    def accepts(self, answer: Answer) -> bool:
        if self.expected is None:
            return True
        if not isinstance(self.expected, Answer):
            return self.expected(answer)
        plain = dataclasses.replace(answer, num_tokens=0, num_reasoning_tokens=0)
        return plain == self.expected


def cases_of(family: Family) -> list[Case]:
    found = [*_plain(family), *_structured(family)]
    if family.think is not None:
        found += _reasoning(family)
    if family.calls_tools:
        found += _tools(family)
    return found


def _plain(family: Family) -> Iterator[Case]:
    def says(text: str) -> str:
        return family.write(text, [])

    off = _switch(family.not_thinking)
    yield Case("plain", says(GREETING), Answer(GREETING), off)
    for ending in family.endings:
        yield Case(f"ends with {ending}", f"{says(ANSWER)}{ending} never", Answer(ANSWER), off)
    yield Case(
        "no end before min_tokens",
        says(ANSWER),
        lambda answer: answer.num_tokens >= 24,
        {"min_tokens": 24, "max_tokens": 40, **off},
    )
    yield Case(
        "stop string", says("one two STOP three"), Answer("one two "), {"stop": ["STOP"], **off}
    )
    yield Case(
        "cut",
        says(GREETING * 9),
        lambda answer: (
            answer.finish_reason == "length" and GREETING.startswith((answer.content or "")[:20])
        ),
        {"max_tokens": 30, **off},
    )


def _structured(family: Family) -> Iterator[Case]:
    off = _switch(family.not_thinking)
    written = json.dumps(RECORD, ensure_ascii=False)
    body = {**JSON_SCHEMA, **off}
    yield Case("schema", family.write(written, []), Answer(written), body)
    yield Case(
        "schema against its will",
        family.write(f"Well, it is {written}, I think.", []),
        lambda answer: set(json.loads(answer.content or "")) == set(RECORD),
        body,
    )
    for text in family.lookalikes:
        choices = {"guided_choice": [text, f"{text}{text}", "zzz"]}
        yield Case(f"choice {text}", family.write(text, []), Answer(text), {**choices, **off})


def _reasoning(family: Family) -> Iterator[Case]:
    assert family.think is not None
    on, off = _switch(family.thinking), _switch(family.not_thinking)

    def thinks(answer: str, thought: str = THOUGHT) -> str:
        assert family.think is not None
        return family.think(thought, family.write(answer, []))

    expected = Answer(ANSWER, reasoning=THOUGHT)
    yield Case("reasoning", thinks(ANSWER), expected, on)
    if family.not_thinking is not None:
        yield Case("no reasoning", family.write(ANSWER, []), Answer(ANSWER), off)
    for effort in family.efforts:
        yield Case(f"effort {effort}", thinks(ANSWER), expected, {"reasoning_effort": effort})
    written = json.dumps(RECORD, ensure_ascii=False)
    structured = Answer(written, reasoning=THOUGHT)
    yield Case("schema behind reasoning", thinks(written), structured, {**JSON_SCHEMA, **on})
    yield Case(
        "schema behind reasoning against its will",
        thinks(f"It is {written}."),
        lambda answer: (
            answer.reasoning == THOUGHT and set(json.loads(answer.content or "")) == set(RECORD)
        ),
        {**JSON_SCHEMA, **on},
    )
    yield Case(
        "little room for reasoning",
        thinks(ANSWER, THOUGHT * 5),
        lambda answer: answer.content == ANSWER and 0 < answer.num_reasoning_tokens <= 40,
        {"thinking_token_budget": 12, **on},
    )
    yield Case(
        "cut in the reasoning",
        thinks(ANSWER, THOUGHT * 5),
        lambda answer: answer.finish_reason == "length" and not answer.content,
        {"max_tokens": 20, **on},
    )
    if family.calls_tools:
        call = family.think(THOUGHT, family.write("", [FIND]))
        expected = Answer(None, (FIND,), THOUGHT, "tool_calls")
        for choice in ("auto", "required"):
            body = {"tools": TOOLS, "tool_choice": choice, **on}
            yield Case(f"reasoning and a call, {choice}", call, expected, body)


def _tools(family: Family) -> Iterator[Case]:
    off = _switch(family.not_thinking)
    body = {"tools": TOOLS, **off}
    strict = {"tools": [_strict(tool) for tool in TOOLS], **off}
    called = Answer(None, (FIND,), finish_reason="tool_calls")
    call = family.write("", [FIND])
    yield Case("call", call, called, body)
    yield Case("no call", family.write(ANSWER, []), Answer(ANSWER), body)
    yield Case("strict call", call, called, strict)
    yield Case("strict, no call", family.write(ANSWER, []), Answer(ANSWER), strict)
    for title, choice in {"required": "required", "named": _named("find")}.items():
        forced = {**body, "tool_choice": choice}
        yield Case(title, call, called, forced)
        yield Case(f"{title} against its will", f"Well. {call}", called, forced)
        yield Case(f"{title} and strict", call, called, {**strict, "tool_choice": choice})
    empty = Answer(None, (NOW,), finish_reason="tool_calls")
    yield Case("no arguments", family.write("", [NOW]), empty, body)
    yield Case("no arguments, required", family.write("", [NOW]), empty, _required(body))
    if family.content_precedes_calls:
        both = dataclasses.replace(called, content=ANSWER)
        yield Case("content and a call", family.write(ANSWER, [FIND]), both, body)
    if family.can_repeat:
        three = Answer(None, (FIND, NOW, OTHER), finish_reason="tool_calls")
        said = family.write("", [FIND, NOW, OTHER])
        yield Case("three calls", said, three, body)
        if family.shows_repeats:
            yield Case("three strict calls", said, three, strict)
    for title, text in HOSTILE.items():
        hostile: Call = ("find", {"text": text, "places": [text]})
        expected = Answer(None, (hostile,), finish_reason="tool_calls")
        yield Case(f"argument with {title}", family.write("", [hostile]), expected, body)
        yield Case(f"{title}, forced", family.write("", [hostile]), expected, _required(strict))
    for text in family.prose:
        yield Case(f"prose: {text}", family.write(text, []), Answer(text), body)
    for text in family.mistakes:
        yield Case(f"mistake: {text}", text, None, body)
    yield Case(
        "a cut call", call, lambda a: a.finish_reason == "length", {**body, "max_tokens": 12}
    )


def _switch(variables: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"chat_template_kwargs": dict(variables)} if variables else {}


def _required(body: Mapping[str, Any]) -> dict[str, Any]:
    return {**body, "tool_choice": "required"}


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _strict(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}}
