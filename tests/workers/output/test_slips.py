"""What models slip in around calls is read as they meant it; mentions of calls stay text."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from contract.output_formats import ReasoningFormat, ToolFormat
from gateway.grammars.rules.arguments import string_parameters
from tests.workers.output.reading import (
    calls_of,
    reasoning_format,
    same_for_all_splits,
    tool_format,
)
from tests.workers.output.writing import Call, write_calls
from workers.output.formats import TOOL_FORMATS

TAGS = [each for each in TOOL_FORMATS if each.syntax == "tags"]
MARKED = [each for each in TOOL_FORMATS if not each.is_bare and each.name != "openai"]
NESTED = [each for each in TAGS if "\n" in each.open.strip()]  # with a mark around the call's own


def named(formats: list[ToolFormat]) -> pytest.MarkDecorator:
    ids = [f"{each.name}-{each.syntax}-{number}" for number, each in enumerate(formats)]
    return pytest.mark.parametrize("format_", formats, ids=ids)


STRING, NULL = {"type": "string"}, {"type": "null"}
DEFS = {"text": STRING, "maybe": {"oneOf": [{"$ref": "#/$defs/text"}, NULL]}}
SPELLED: dict[str, Any] = {  # ways to say a string, or null
    "anyOf": {"anyOf": [STRING, NULL], "default": None},
    "oneOf": {"oneOf": [NULL, STRING]},
    "types": {"type": ["string", "null"]},
    "reference": {"$ref": "#/$defs/maybe"},
    "allOf": {"allOf": [{"$ref": "#/$defs/maybe"}, {"description": "x"}]},
    "nested": {"anyOf": [{"anyOf": [{"allOf": [STRING]}, NULL]}, {"enum": [None]}]},
    "enum": {"enum": ["12345", "1e5", "true", '{"a": 1}', "null", "-", None]},
    "itself": {"anyOf": [STRING, NULL, {"$ref": "#/properties/text"}]},
}


def read_value(format_: ToolFormat, schema: Any, text: str) -> Any:
    """The value of an argument with this text, in a format whose marks tell nothing of types."""
    root = {"type": "object", "properties": {"text": schema}, "$defs": DEFS}
    strings = {"find": string_parameters(root)}
    tools = {name: tuple(found) for name, found in strings.items()}
    written = write_calls(format_, [("find", {"text": text})])
    message = same_for_all_splits(written, format_, tools=tools, alternatives=strings)
    [(_, arguments)] = calls_of(message)
    return arguments["text"]


UNTYPED = [each for each in TAGS if "{type}" not in each.key_close]


@named(UNTYPED)
@pytest.mark.parametrize("schema", SPELLED.values(), ids=SPELLED)
@pytest.mark.parametrize("text", ["12345", "1e5", "true", '{"a": 1}', "nul", "null"])
@pytest.mark.each_value
def test_a_string_that_may_be_null_is_a_string_or_null(
    format_: ToolFormat, schema: Any, text: str
) -> None:
    assert read_value(format_, schema, text) == (None if text == "null" else text)


MIXED: list[tuple[Any, str, Any]] = [
    (STRING, "null", "null"),
    ({"allOf": [{"$ref": "#/$defs/text"}]}, "null", "null"),
    ({"enum": ["a", 1, True]}, "1", 1),
    ({"enum": ["a", 1, True]}, "2", "2"),
    ({"type": "string", "enum": ["a", None]}, "null", "null"),
    ({"anyOf": [STRING, {"type": "integer"}]}, "5", 5),
    ({"anyOf": [STRING, {"type": "integer"}]}, "5.5", "5.5"),
    ({"type": ["boolean", "string"]}, "true", True),
    ({"type": ["boolean", "string"]}, "True", "True"),
    ({"anyOf": [{"type": "array"}, STRING]}, '["a"]', ["a"]),
    ({"anyOf": [{"type": "array"}, STRING]}, '{"a": 1}', '{"a": 1}'),
    ({"type": ["string", "object"]}, '{"a": 1}', {"a": 1}),
    ({"type": "integer"}, "5", 5),
    ({}, "5", 5),
]


@named(UNTYPED)
@pytest.mark.parametrize(("schema", "text", "value"), MIXED)
@pytest.mark.each_value
def test_a_string_is_another_value_only_of_a_type_or_value_that_the_schema_names(
    format_: ToolFormat, schema: Any, text: str, value: Any
) -> None:
    found = read_value(format_, schema, text)
    assert (found, type(found)) == (value, type(value))


@named([each for each in TAGS if "{type}" in each.key_close])
def test_a_value_s_type_may_be_left_out(format_: ToolFormat) -> None:
    """Then the schema tells it."""
    written = write_calls(format_, [("find", {"text": "12", "number": 2})])
    text = re.sub(r' \w+="(?:string|object|true|false)"', "", written)
    assert text != written
    assert calls_of(same_for_all_splits(text, format_)) == [("find", {"text": "12", "number": 2})]


ARGUMENTS: list[Mapping[str, Any]] = [{"text": "x"}, {"number": 2, "text": "x"}, {"text": "x\ny"}]


@named(NESTED)
@pytest.mark.parametrize("arguments", [*ARGUMENTS, {}])
def test_the_outer_opening_mark_may_be_missing(
    format_: ToolFormat, arguments: Mapping[str, Any]
) -> None:
    """Of functions that are offered; and prose about the inner mark stays prose."""
    mark = format_.open.partition("\n")[0]
    calls: list[Call] = [("find", arguments), ("now", {})]
    for written in (write_calls(format_, calls), write_calls(format_, calls[:1])):
        text = f"I look.\n\n{written.replace(mark, '').strip()}"
        message = same_for_all_splits(text, format_)
        assert message.content == "I look."
        assert calls_of(message) == calls[: len(message.tool_calls)]
        other = text.replace("find", "other")
        assert not any(name == "other" for name, _ in calls_of(same_for_all_splits(other, format_)))
    for prose in ("Write <function=find> to call find.", "<function=find", "A <function=find>\n"):
        assert same_for_all_splits(prose, format_).content == prose


@named(TAGS)
@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("behind", ["", "\nDone.", "again"])
@pytest.mark.each_value
def test_a_value_without_its_closing_mark_ends_with_the_call_or_before_the_next(
    format_: ToolFormat, arguments: Mapping[str, Any], behind: str
) -> None:
    call: Call = ("find", arguments)
    written = write_calls(format_, [call])
    close = format_.value_close.strip()
    again = behind == "again"
    more = write_calls(format_, [("now", {"text": "z"})])
    for number in range(len(arguments)):
        parts = written.split(close)
        parts[number : number + 2] = ["".join(parts[number : number + 2])]
        text = re.sub(r"\n\n+", "\n", close.join(parts)) + (more if again else behind)
        message = same_for_all_splits(text, format_)
        assert calls_of(message) == [call, *([("now", {"text": "z"})] if again else [])], text
        assert message.content == ("" if again else behind.strip())


@named(TAGS)
def test_a_call_s_closing_marks_in_a_value_are_text(format_: ToolFormat) -> None:
    """So are mentions of other keys within a line."""
    key = "" if format_.value_close[:1] != "\n" else f" {format_.key_open}text."
    text = f"a {format_.close}{format_.end} b{key}"
    calls: list[Call] = [("find", {"text": text, "number": 2}), ("now", {})]
    assert calls_of(same_for_all_splits(write_calls(format_, calls), format_)) == calls


THINKING = [
    (reasoning_format(name), prompt_end)
    for name in ("qwen3", "kimi_k2", "seed_oss", "minimax_m3")
    for prompt_end in ("open", "")
]


@named(MARKED)
@pytest.mark.parametrize(("reasoning", "state"), THINKING)
@pytest.mark.each_value
def test_calls_end_a_reasoning_that_nothing_else_ends(
    format_: ToolFormat, reasoning: ReasoningFormat, state: str
) -> None:
    """Also if its closing mark comes behind them, with no answer. With an answer behind it, the
    reasoning has only mentioned them; so it has with a mark alone."""
    calls: list[Call] = [("find", {"text": "x"})]
    written = write_calls(format_, calls)
    mark = (format_.begin or format_.open).strip()
    prompt_end = reasoning.open if state else ""
    begin = "" if state else reasoning.open

    def read(text: str) -> tuple[str, str, list[Call]]:
        message = same_for_all_splits(begin + text, format_, reasoning, prompt_end)
        return message.reasoning, message.content, calls_of(message)

    assert read(f"I look.\n\n{written}") == ("I look.", "", calls)
    if (format_.end or format_.close).strip():
        assert read(f"I look.\n\n{written}{reasoning.close}") == ("I look.", "", calls)
    closed = read(f"I look.\n\n{written}{reasoning.close}Hello.")
    assert closed == (f"I look.\n\n{written.strip()}", "Hello.", [])
    mentioned = read(f"Or {mark} here.{reasoning.close}Hello.")
    assert mentioned == (f"Or {mark} here.", "Hello.", [])


@pytest.mark.parametrize("name", ["f:0", "functions.f:0", "functions.f:call_1"])
@pytest.mark.parametrize("section", ["tool_calls_section", "tool_call_section", ""])
def test_kimi_s_ids_and_section_marks_may_differ(name: str, section: str) -> None:
    begin, end = (f"<|{section}_{each}|>" if section else "" for each in ("begin", "end"))
    call = f'<|tool_call_begin|>{name}<|tool_call_argument_begin|>{{"q": 1}}<|tool_call_end|>'
    message = same_for_all_splits(f"So.{begin}{call}{call}{end}", tool_format("kimi_k2"))
    assert (message.content, calls_of(message)) == ("So.", [("f", {"q": 1})] * 2)


@pytest.mark.parametrize("group", ["tool_calls", "toolcalls", "tool"])
def test_deepseek_s_group_of_calls_has_several_spellings(group: str) -> None:
    format_, calls = tool_format("deepseek_v4"), [("find", {"text": "x"})]
    written = write_calls(format_, calls).replace("tool_calls", group)
    message = same_for_all_splits(written, format_)
    assert (message.content, calls_of(message)) == ("", calls)


def test_arguments_may_be_args() -> None:
    text = '<tool_call>\n{"name": "find", "args": {"q": "x"}}\n</tool_call>'
    assert calls_of(same_for_all_splits(text, tool_format("hermes"))) == [("find", {"q": "x"})]
