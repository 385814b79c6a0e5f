"""Every format of calls in the table: what is written by it is read back, wherever it is cut."""

import re
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.output_formats import ToolFormat
from tests.workers.output.reading import TOOLS, calls_of, read, same_for_all_splits, split
from tests.workers.output.writing import Call, write_calls
from workers.output.formats import TOOL_FORMATS

# Harmony's calls are messages, which have tests of their own.
FORMATS = [each for each in TOOL_FORMATS if each.name != "openai"]
MARKED = [each for each in FORMATS if not each.is_bare]
names = [f"{each.name}-{each.syntax}-{each.open or each.begin}" for each in FORMATS]
every_format = pytest.mark.parametrize("format_", FORMATS, ids=names)
every_mark = pytest.mark.parametrize(
    "format_", MARKED, ids=[f"{each.name}-{each.open or each.begin}" for each in MARKED]
)

scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(-1e9, 1e9)


def hostile(format_: ToolFormat) -> st.SearchStrategy[str]:
    """Text with the format's own marks, and what quotes, escapes and nests."""
    marks = [format_.begin, format_.open, format_.close, format_.end, format_.value_close]
    pieces = [each for mark in marks for each in (mark, mark.strip()) if each]
    others = ['"', "'", "\\", "\n", "{", "}", "[", "]", "</", "a b", "é🎉", "\t", ",", ": ", "\\n"]
    text = st.lists(st.sampled_from([*pieces, *others]) | st.text(max_size=3), max_size=6)
    return text.map("".join).filter(lambda value: is_writable(format_, value))


def is_writable(format_: ToolFormat, value: str) -> bool:
    """Formats without escapes cannot write their own marks in a value."""
    if format_.syntax == "gemma":
        return "<|" not in value and "|>" not in value
    if format_.syntax != "tags":
        return True
    ends = "|".join(
        map(re.escape, (format_.key_open, *format_.close.split(), *format_.end.split()))
    )
    close = re.escape(format_.value_close.strip())
    followed = re.search(rf"{close}\s*(?:{ends}|\Z)", value + "x".join(format_.value_close.split()))
    partial = value.endswith(format_.value_close.strip()[:1]) or "<![CDATA[" in value
    return followed is None and not partial and format_.value_close.strip() not in value


def arguments(format_: ToolFormat) -> st.SearchStrategy[dict[str, Any]]:
    keys = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
    text = hostile(format_)
    values = st.recursive(
        scalars | text,
        lambda more: st.lists(more, max_size=3) | st.dictionaries(keys, more),
        max_leaves=5,
    )
    if format_.syntax == "tags":  # what is written without quotes is a string by the schema alone
        values = values.filter(lambda value: not isinstance(value, str))
        values = values.filter(lambda value: is_writable(format_, str(value)))
    known = st.fixed_dictionaries({}, optional={"text": text, "place": text})
    others = st.dictionaries(keys, values, max_size=3)
    return st.tuples(known, others).map(lambda pair: {**pair[1], **pair[0]})


@cache
def messages(format_: ToolFormat) -> st.SearchStrategy[list[Call]]:
    """Calls of functions that are offered."""
    call: st.SearchStrategy[Call] = st.one_of(
        st.tuples(st.just("find"), arguments(format_)),
        st.just(("now", {})),
        st.just(("a-b_2", {"text": "x"})),
    )
    return st.lists(call, min_size=1, max_size=most_calls(format_))


def most_calls(format_: ToolFormat) -> int:
    return 1 if format_.between is None else 3


@every_format
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_written_calls_are_read_back(format_: ToolFormat, data: st.DataObject) -> None:
    """Whatever strings the arguments hold, and wherever the text is cut."""
    calls = data.draw(messages(format_))
    text = write_calls(format_, calls)
    cuts = data.draw(st.lists(st.integers(0, 2**16), max_size=8))
    message = read(split(text, cuts), format_)
    assert calls_of(message) == calls
    assert message.content == ""
    assert read(list(text), format_) == message


@every_format
def test_text_around_calls_is_content(format_: ToolFormat) -> None:
    """Without the white space between them."""
    calls: list[Call] = [("find", {"text": "x y", "number": 2}), ("now", {})]
    calls = calls[: most_calls(format_)]
    written = write_calls(format_, calls)
    before = "" if format_.is_bare else "Well, <b>.\n\n"
    message = same_for_all_splits(f"{before}{written}\nDone [1].", format_)
    assert calls_of(message) == calls
    assert message.content == ("Well, <b>.\nDone [1]." if before else "Done [1].")


@every_mark
@pytest.mark.parametrize("prose", ["The mark {} opens a call.", "{}", "{}{}", "{} {{}} {}\n"])
@pytest.mark.each_value
def test_marks_in_prose_are_content(format_: ToolFormat, prose: str) -> None:
    """Text that is no call is unchanged, and a call behind it is read."""
    mark = (format_.begin or format_.open).strip()
    text = prose.replace("{{}}", "...").replace("{}", mark)
    message = same_for_all_splits(text, format_)
    assert (message.content, message.tool_calls) == (text, [])
    call: list[Call] = [("find", {"text": "x"})]
    message = same_for_all_splits(f"{text}. {write_calls(format_, call)}", format_)
    assert (message.content, calls_of(message)) == (f"{text}.", call)


@every_format
def test_white_space_may_differ(format_: ToolFormat) -> None:
    """Models write more or less of it than their templates, except in values."""
    calls: list[Call] = [("find", {"number": 2}), ("now", {})]
    calls = calls[: most_calls(format_)]
    written = write_calls(format_, calls)
    if format_.syntax == "python":
        return
    for change in (r"\n", r"(?<=[>\]}])(?=[<\[{])"):
        text = re.sub(change, "\n \n" if change != r"\n" else "", written)
        assert calls_of(read(text, format_)) == calls, text


@every_mark
def test_closing_marks_may_be_missing(format_: ToolFormat) -> None:
    """Models end their turn instead."""
    call: list[Call] = [("find", {"number": 2})]
    bare = format_.syntax in ("tags", "python", "gemma")
    written = write_calls(format_, call).removesuffix(format_.end)
    text = written.removesuffix(format_.close if not bare or format_.syntax == "tags" else "")
    assert calls_of(read(text, format_)) == call


@every_format
def test_without_tools_everything_is_content(format_: ToolFormat) -> None:
    text = write_calls(format_, [("find", {"text": "x"})])
    message = same_for_all_splits(text, format_, tools={})
    assert (message.content, message.tool_calls) == (text, [])


@every_format
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_call_that_is_cut_gives_what_there_is(format_: ToolFormat, data: st.DataObject) -> None:
    """Its name and the beginning of its arguments, or all of it as content."""
    arguments = {"number": 12, "text": "one two three", "place": "x"}
    text = write_calls(format_, [("find", arguments)])
    cut = text[: data.draw(st.integers(0, len(text)))]
    message = read(cut, format_)
    assert read(list(cut), format_) == message
    if not message.tool_calls:
        assert message.content == cut
        return
    [given] = message.tool_calls
    assert given.name == "find"
    whole = read(text, format_).tool_calls[0].arguments
    common = 0
    while (
        common < min(len(whole), len(given.arguments)) and whole[common] == given.arguments[common]
    ):
        common += 1
    rest = given.arguments[common:]
    # A cut closing mark, or a number that is shown as text, is all that may differ.
    assert rest == "" or format_.syntax in ("tags", "gemma", "python"), (whole, given.arguments)


@pytest.mark.parametrize("format_", [each for each in FORMATS if each.is_bare])
def test_calls_without_marks_begin_the_answer_and_name_a_tool(format_: ToolFormat) -> None:
    """Other JSON and lists are text."""
    call = write_calls(format_, [("find", {"text": "x"})])
    for text in (f"Say {call}", write_calls(format_, [("other", {"text": "x"})]), "{}", "[1, 2]"):
        message = same_for_all_splits(text, format_)
        assert (message.content, message.tool_calls) == (text, [])
    assert calls_of(read(f"<|python_tag|>{call}", format_)) == [("find", {"text": "x"})]


def test_the_names_of_the_tables_are_known_to_vllm_users() -> None:
    """Those that the documentation promises."""
    assert {
        *("hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "deepseek_v3"),
        *("deepseek_v31", "deepseek_v32", "glm45", "glm47", "gemma4", "openai", "kimi_k2"),
        *("minimax_m2", "seed_oss", "granite", "xlam", "jamba", "phi4_mini_json"),
    } <= {each.name for each in TOOL_FORMATS}
    assert set(TOOLS) == {"find", "now", "a-b_2"}
