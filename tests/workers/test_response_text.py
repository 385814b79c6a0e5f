"""Outputs are split into content, reasoning and tool calls, wherever their text is cut."""

import functools
import json
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer

from contract.events import ToolCallDelta
from tests.fakes import hash_tokenizer
from workers.supervisor.response_text import ResponseDelta, ResponseFormat, ResponseText

_CALL = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.args}"}}
TAGS = {
    "start_anchor": "assistant: ",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": _CALL,
        },
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "content": {"content": "text"},
    },
}
BARE = {  # one call, without anything that opens it
    "start_anchor": "assistant: ",
    "fields": {
        "tool_calls": {
            "open_pattern": r'^\s*(?=\{"name": ")',
            "repeats": True,
            "content": "json",
            "transform": _CALL,
        },
        "content": {"content": "text"},
    },
}
XML = {
    "start_anchor": "assistant: ",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<function=(?P<name>[^>\n]+)>",
            "close": "</function>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>"},
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"content": "text"},
    },
}
ADD = '{"name": "add", "args": {"a": "}\\"{", "b": [2]}}'
Call = tuple[str, str]

# Template, output; content, reasoning and calls.
FIXTURES: dict[str, tuple[dict[str, Any], str, str, str, list[Call]]] = {
    "text": (TAGS, "Hi <b> there", "Hi <b> there", "", []),
    "call": (TAGS, f"<call>{ADD}</call>", "", "", [("add", '{"a": "}\\"{", "b": [2]}')]),
    "text, then two calls": (
        TAGS,
        f"Well.\n<call>\n{ADD}\n</call>\n<call>{ADD}</call>",
        "Well.",
        "",
        [("add", '{"a": "}\\"{", "b": [2]}')] * 2,
    ),
    "reasoning": (TAGS, "<think>so</think>Yes<", "Yes<", "so", []),
    "cut off": (TAGS, '<call>{"name": "add", "args": {"a": 1', "", "", [("add", '{"a": 1')]),
    "not a call": (TAGS, 'Hm <call>{"name": 3}</call> !', 'Hm{"name": 3} !', "", []),
    "bare": (BARE, ADD, "", "", [("add", '{"a": "}\\"{", "b": [2]}')]),
    "bare text": (BARE, 'It is {"name": "add"}', 'It is {"name": "add"}', "", []),
    "xml": (XML, "Ok <function=add><a>x\ny</a></function>", "Ok", "", [("add", '{"a": "x\\ny"}')]),
}  # fmt: skip


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(hash_tokenizer().tokenizer_json)


@functools.cache
def format_of(name: str) -> ResponseFormat:
    return ResponseFormat(json.dumps(FIXTURES[name][0]), tokenizer())


def deltas_of(name: str, parts: list[str]) -> list[ResponseDelta]:
    response = ResponseText(format_of(name), tokenizer(), list(b"user: x\nassistant: "))
    return [*(response.push(part) for part in parts), response.finish()]


def joined(deltas: list[ResponseDelta]) -> ResponseDelta:
    whole = ResponseDelta()
    for delta in deltas:
        whole.extend(delta)
    return whole


def check(name: str, splits: Sequence[list[str]]) -> None:
    """Each split of the fixture's output gives its message."""
    _, _, content, reasoning, calls = FIXTURES[name]
    expected = ResponseDelta(
        content, reasoning, [ToolCallDelta(i, *call) for i, call in enumerate(calls)]
    )
    for parts in splits:
        assert joined(deltas_of(name, parts)) == expected, parts


def splits_of(text: str, num_cuts: int) -> list[list[str]]:
    cuts = combinations(range(len(text) + 1), num_cuts)
    return [[text[a:b] for a, b in pairwise([0, *cut, len(text)])] for cut in cuts]


@pytest.mark.parametrize("name", FIXTURES)
def test_every_split_in_two_gives_the_same_message(name: str) -> None:
    """Also the whole output at once, and character by character."""
    text = FIXTURES[name][1]
    check(name, [[text], list(text), *splits_of(text, 1)])


@pytest.mark.campaign
@pytest.mark.parametrize("name", FIXTURES)
def test_every_split_in_three_gives_the_same_message(name: str) -> None:
    check(name, splits_of(FIXTURES[name][1], 2))


def test_arguments_are_passed_on_as_they_come() -> None:
    """Character by character, each within one character of its generation."""
    text = FIXTURES["call"][1]
    given = ""
    for i, delta in enumerate(deltas_of("call", list(text))):
        given += "".join(call.arguments for call in delta.tool_calls)
        start = text.index('{"a"')
        assert given == text[start : max(start, min(i + 1, text.index("}</call>")))]


def test_a_prompt_that_begins_the_reasoning_is_read() -> None:
    """Templates may open the reasoning in the prompt."""
    response = ResponseText(format_of("reasoning"), tokenizer(), list(b"assistant: <think>"))
    delta = joined([response.push("so</think>Yes"), response.finish()])
    assert (delta.reasoning, delta.content) == ("so", "Yes")


def test_text_after_a_broken_call_is_content() -> None:
    """Nothing that the model wrote is lost."""
    broken = 'a<call>{"name" "add"}</call>b<call>'
    response = ResponseText(format_of("call"), tokenizer(), list(b"assistant: "))
    delta = joined([*(response.push(char) for char in broken), response.push("c")])
    assert delta.content.startswith('a{"name" "add"}')
    assert delta.content.endswith("b<call>c")
    assert not delta.tool_calls
