"""Calls of earlier turns become what chat templates expect, whatever a model wrote."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.strict_json import MAX_DEPTH
from gateway.models.past_calls import (
    UNREADABLE,
    arguments_object,
    fitting_id,
    one_call_each,
)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=4)


@given(OBJECTS, st.sampled_from([None, 2]), st.booleans())
def test_an_object_is_read_as_it_is(value: Any, indent: int | None, ensure_ascii: bool) -> None:
    """In any spelling of JSON."""
    text = json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
    assert arguments_object(text) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Also null, which models write for no arguments.
        *((text, {}) for text in ("", "  \n", "null", " null ")),
        # Another value is not lost, and a template that iterates over arguments works.
        *(
            (json.dumps(value), {UNREADABLE: value})
            for value in (["a"], [], 7, 0.5, True, False, "a", "", [{"a": 1}])
        ),
        # The end of a cut string is kept: the model reads what it had written.
        ('{"n": 1, "q": "a long te', {"n": 1, "q": "a long te"}),
        ('{"q": "two\nlines, cu', {"q": "two\nlines, cu"}),
    ],
)
def test_whatever_a_model_wrote_becomes_an_object(text: str, expected: object) -> None:
    assert arguments_object(text) == expected


@given(OBJECTS.filter(bool), st.data())
def test_cut_arguments_are_an_object(value: Any, data: st.DataObject) -> None:
    """Cut anywhere, by a limit of tokens: what is whole of it is kept."""
    text = json.dumps(value, ensure_ascii=False)
    cut = text[: data.draw(st.integers(1, len(text) - 1))]
    found = arguments_object(cut)
    assert found == {UNREADABLE: cut} or set(found) <= set(value)


@given(TEXTS, TEXTS)
def test_raw_control_characters_are_read(key: str, text: str) -> None:
    """Models write newlines into strings."""
    raw = json.dumps({key: text}, ensure_ascii=False)
    for name, char in (("\\n", "\n"), ("\\t", "\t")):
        if "\\\\" not in raw:
            raw = raw.replace(name, char)
    assert arguments_object(raw) == {key: text}


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_becomes_an_object(text: str) -> None:
    """Without an error."""
    json.dumps(arguments_object(text), ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize(
    "text",
    [
        '{"a": "\\ud800"}',
        '{"\\udfff": 1}',
        '{"a": "\\ud800',
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": ' + "9" * 5000 + "}",
        '{"a": ' + "[" * 964 + "]" * 964 + "}",
        "[" * 100_000,
        '{"a": ' * 40,
    ],
)
def test_what_no_template_can_render_does_not_reach_it(text: str) -> None:
    """Half surrogates, numbers that JSON does not have, deep nesting."""
    found = arguments_object(text)
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    assert _depth(found) <= MAX_DEPTH + 1


def _depth(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, inner), default=0)


@given(st.text(min_size=1), st.integers(1, 64))
def test_an_id_fits_a_template_that_counts_its_characters(call_id: str, length: int) -> None:
    """Equal ids stay equal, so that a result still belongs to its call."""
    found = fitting_id(call_id, length)
    assert len(found) == length
    assert found.isascii()
    assert found.isalnum()
    assert fitting_id(found, length) == found
    assert fitting_id(call_id, 0) == call_id


def call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": {}}}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": f"of {call_id}"}


@given(st.permutations(["a", "b", "c"]), st.integers(0, 3), st.booleans())
def test_each_call_has_a_message_where_a_template_shows_one(
    order: list[str], num_results: int, says: bool
) -> None:
    """Its result follows it, in whatever order the caller sends results, and nothing is lost."""
    content = "I look." if says else ""
    calls = [call(each) for each in "abc"]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": content, "reasoning_content": "hm", "tool_calls": calls},
        *(result(each) for each in order[:num_results]),
        result("x"),
        {"role": "user", "content": "Well?"},
    ]
    shown = one_call_each(messages, apart=False)
    assert [m["tool_calls"] for m in shown if "tool_calls" in m] == [[each] for each in calls]
    assert [m.get("reasoning_content") for m in shown if "tool_calls" in m] == ["hm", None, None]
    for before, after in pairwise(shown):
        if after["role"] == "tool" and after["tool_call_id"] != "x":
            assert before["tool_calls"] == [call(after["tool_call_id"])]
    assert sum(m["role"] == "tool" for m in shown) == num_results + 1
    assert (shown[0], shown[-1]) == (messages[0], messages[-1])


def test_messages_with_a_call_each_stay_as_they_are() -> None:
    """Also without calls."""
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "x", "reasoning_content": "hm", "tool_calls": [call("a")]},
        result("a"),
        {"role": "assistant", "content": "y"},
    ]
    assert one_call_each(messages, apart=False) == messages


def test_content_stands_before_reasoning_and_a_call_where_a_template_takes_two_of_them() -> None:
    """Harmony's template refuses all three in one message."""
    message = {
        "role": "assistant", "content": "x", "reasoning_content": "hm", "tool_calls": [call("a")]
    }  # fmt: skip
    assert one_call_each([message], apart=True) == [
        {"role": "assistant", "content": "x"},
        {**message, "content": ""},
    ]


_IDS = st.lists(st.sampled_from("ab"), min_size=2, max_size=9)


@given(_IDS, _IDS, st.booleans())
def test_each_result_is_shown_once_even_if_calls_share_an_id(
    calls: list[str], results: list[str], apart: bool
) -> None:
    """Otherwise a thousand calls and a thousand results would be a million messages."""
    message = {"role": "assistant", "content": "", "tool_calls": [call(each) for each in calls]}
    shown = one_call_each([message, *map(result, results)], apart=apart)
    assert len(shown) == len(calls) + len(results)
    assert sorted(m["tool_call_id"] for m in shown if m["role"] == "tool") == sorted(results)
