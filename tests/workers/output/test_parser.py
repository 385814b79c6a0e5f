"""Outputs are split into content, reasoning and calls, and nothing of them is lost."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.output_formats import ReasoningFormat, ToolFormat
from tests.workers.output.reading import (
    calls_of,
    read,
    reasoning_format,
    same_for_all_splits,
    split,
    tool_format,
)
from workers.output.formats import TOOL_FORMATS
from workers.output.parser import OutputParser

HERMES, LLAMA, CODER = (tool_format(name) for name in ("hermes", "llama3_json", "qwen3_coder"))
THINK = reasoning_format("qwen3")
Given = list[tuple[str, str]]  # names, and arguments as they are given

# Format, output; content and calls.
CASES: dict[str, tuple[ToolFormat, str, str, Given]] = {
    "a closing mark in an argument": (
        HERMES,
        '<tool_call>\n{"name": "find", "arguments": {"q": "a </tool_call> b"}}\n</tool_call>',
        "",
        [("find", '{"q": "a </tool_call> b"}')],
    ),
    "no arguments": (HERMES, '<tool_call>\n{"name": "find"}\n</tool_call>', "", [("find", "{}")]),
    "null": (
        HERMES,
        '<tool_call>{"name": "find", "arguments": null}</tool_call>',
        "",
        [("find", "{}")],
    ),
    "compact, with other keys in another order": (
        HERMES,
        '<tool_call>{"id":"x","arguments":{"a":[1,{"b":2}]},"name":"find"}</tool_call>',
        "",
        [("find", '{"a": [1, {"b": 2}]}')],
    ),
    "a string that spells an object": (
        HERMES,
        '<tool_call>{"name": "find", "arguments": "{\\"a\\": \\"\\\\n\\"}"}</tool_call>',
        "",
        [("find", '{"a": "\\n"}')],
    ),
    "raw control characters": (
        HERMES,
        '<tool_call>{"name": "find", "arguments": {"q": "l1\nl2\t\x01"}}</tool_call>',
        "",
        [("find", '{"q": "l1\\nl2\\t\\u0001"}')],
    ),
    "a backslash that escapes nothing": (
        HERMES,
        '<tool_call>{"name": "find", "arguments": {"q": "\\d\\u12"}}</tool_call>',
        "",
        [("find", '{"q": "\\\\d\\\\u12"}')],
    ),
    "other names of the keys": (
        HERMES,
        '<tool_call>{"name": "find", "parameters": {"a": 1}}</tool_call>',
        "",
        [("find", '{"a": 1}')],
    ),
    "no brace at the end": (
        HERMES,
        '<tool_call>{"name": "find", "arguments": {"a": 1}</tool_call>ok',
        "ok",
        [("find", '{"a": 1}')],
    ),
    "arguments that break": (
        HERMES,
        '<tool_call>{"name": "find", "arguments": {"a": 1 oops}}</tool_call>ok',
        "oops}}</tool_call>ok",
        [("find", '{"a": 1 ')],
    ),
    "a semicolon between calls": (
        LLAMA,
        '{"name": "find", "parameters": {"q": "1"}}; {"name": "now", "parameters": {}}',
        "",
        [("find", '{"q": "1"}'), ("now", "{}")],
    ),
    "a new line between calls": (
        LLAMA,
        '{"name": "find", "parameters": {"q": "1"}}\n{"name": "now", "parameters": {}}\n',
        "",
        [("find", '{"q": "1"}'), ("now", "{}")],
    ),
    "nothing between calls": (
        LLAMA,
        '{"name": "now", "parameters": {}}{"name":"now","parameters":{}}',
        "",
        [("now", "{}"), ("now", "{}")],
    ),
    "text behind a call": (
        LLAMA,
        '{"name": "find", "parameters": {"q": "1"}}\nI have called find.',
        "I have called find.",
        [("find", '{"q": "1"}')],
    ),
    "a semicolon behind a call": (
        LLAMA,
        '{"name": "find", "parameters": {}}; and so on',
        "; and so on",
        [("find", "{}")],
    ),
    "a data object that has a name": (
        LLAMA,
        '{"name": "find", "age": 3}',
        '{"name": "find", "age": 3}',
        [],
    ),
    "values of tags": (
        CODER,
        "<tool_call>\n<function=find>\n<parameter=text>\n</parameter> x\n\n</parameter>\n"
        "<parameter=n>\n2\n</parameter>\n<parameter=ok>\nTrue\n</parameter>\n"
        "<parameter=list>\n[1, 'a']\n</parameter>\n<parameter=other>\nAnn: \"2\"\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [
            (
                "find",
                '{"text": "</parameter> x\\n", "n": 2, "ok": true, "list": [1, "a"], '
                '"other": "Ann: \\"2\\""}',
            )
        ],
    ),
    "a string that looks like a number": (
        CODER,
        "<tool_call>\n<function=find>\n<parameter=text>\n12\n</parameter>\n</function>\n"
        "</tool_call>",
        "",
        [("find", '{"text": "12"}')],
    ),
    "numbers that JSON does not have": (
        CODER,
        "<tool_call>\n<function=find>\n<parameter=n>\nNaN\n</parameter>\n"
        "<parameter=m>\n1e999\n</parameter>\n</function>\n</tool_call>",
        "",
        [("find", '{"n": "NaN", "m": "1e999"}')],
    ),
    "no list around one call": (
        tool_format("mistral"),
        '[TOOL_CALLS] {"name": "find", "arguments": {"a": 1}}',
        "",
        [("find", '{"a": 1}')],
    ),
    "CDATA": (
        tool_format("minicpm5"),
        '<function name="find"><param name="text"><![CDATA[<a>\n</param>]]></param></function>',
        "",
        [("find", '{"text": "<a>\\n</param>"}')],
    ),
    "a Python call with a raw new line, a comma at the end and names of JSON": (
        tool_format("pythonic"),
        "[find(text='it\\'s\n', a=[null, True, -1.5], b={'k': (1,)},), now()]",
        "",
        [("find", '{"text": "it\'s\\n", "a": [null, true, -1.5], "b": {"k": [1]}}'), ("now", "{}")],
    ),
    "Python strings with quotes that are not escaped, and three quotes": (
        tool_format("lfm2"),
        "<|tool_call_start|>[find(a='it's a 'x' \"q\"', b={\"k\": 'v'}, c='', d=\"\"\"e'f\n\"\"\")]"
        "<|tool_call_end|>",
        "",
        [
            (
                "find",
                '{"a": "it\'s a \'x\' \\"q\\"", "b": {"k": "v"}, "c": "", "d": "e\'f\\n"}',
            )
        ],
    ),
    "Gemma's values as Python spells them": (
        tool_format("gemma4"),
        '<|tool_call>call:find{a:[1,None, True],b c:{},d:<|"|>x"\n<|"|>}<tool_call|>',
        "",
        [("find", '{"a": [1, null, true], "b c": {}, "d": "x\\"\\n"}')],
    ),
    "Python that is no literal": (
        tool_format("pythonic"),
        "[find(text=open('x'))]",
        "[find(text=open('x'))]",
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_read(name: str) -> None:
    """The same wherever the text is cut."""
    format_, text, content, calls = CASES[name]
    message = same_for_all_splits(text, format_)
    assert message.content == content
    assert [(call.name, call.arguments) for call in message.tool_calls] == calls


@pytest.mark.parametrize(
    "arguments", ['["a"]', "3", '"text"', '"[1]"', "true", '{"a": NaN}', "{'a': 1}"]
)
def test_arguments_that_are_no_object_are_no_call(arguments: str) -> None:
    """Such a call is content, whole, and the next one is read."""
    text = f'<tool_call>{{"name": "find", "arguments": {arguments}}}</tool_call>'
    message = same_for_all_splits(text, HERMES)
    given = message.content + "".join(call.arguments for call in message.tool_calls)
    assert (message.content == text) == (not message.tool_calls)
    assert message.tool_calls == [] or arguments.startswith("{"), given
    after = read(f'{text}\n<tool_call>{{"name": "now"}}</tool_call>', HERMES)
    assert after.tool_calls[-1].name == "now"


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "\n", " ", '"', "{", "}", "[", "]", ",", ":", "<think>"),
    *("</think>", '{"name": "find", "arguments": {', '{"name": "find", "arguments": {"q": "'),
    *("<function=find>\n<parameter=text>\n", "\n</parameter>\n</function>", "[TOOL_CALLS]["),
    *("[find(text='", "')]", "<|tool_call>call:find{text:<|\"|>", '<|"|>}<tool_call|>', "; "),
]  # fmt: skip
READ = [
    *(each for each in TOOL_FORMATS if each.name in ("hermes", "llama3_json", "qwen3_coder")),
    *(each for each in TOOL_FORMATS if each.name in ("mistral", "pythonic", "gemma4", "glm45")),
]


@pytest.mark.parametrize("format_", READ, ids=lambda each: f"{each.name}-{each.syntax}")
@settings(max_examples=120, deadline=None)
@given(
    parts=st.lists(st.sampled_from([*FRAGMENTS, None]), max_size=14),
    cuts=st.lists(st.integers(0, 2**16), max_size=6),
    thinks=st.booleans(),
)
def test_no_word_is_lost(
    format_: ToolFormat, parts: list[str | None], cuts: list[int], thinks: bool
) -> None:
    """Whatever a model writes: each word is in the message, and the cuts change nothing."""
    words = [f"word{number}." for number in range(len(parts))]
    text = "".join(word if part is None else part for part, word in zip(parts, words, strict=True))
    reasoning = THINK if thinks else None
    message = read(text, format_, reasoning)
    assert read(split(text, cuts), format_, reasoning) == message
    called = (text for call in message.tool_calls for text in (call.name, call.arguments))
    shown = " ".join([message.content, message.reasoning, *called])
    for part, word in zip(parts, words, strict=True):
        assert part is not None or word in shown
    if not message.tool_calls and not message.reasoning and not thinks:
        assert message.content == text


def test_arguments_are_passed_on_as_they_come() -> None:
    """Character by character, each as soon as it is written."""
    text = '<tool_call>{"name": "find", "arguments": {"q": "}\\"{", "b": [2]}}</tool_call>'
    parser, given = OutputParser(HERMES, None, "", {"find": ()}), ""
    start, end = text.index('{"q"'), text.index("}</tool_call>")
    for number, char in enumerate(text, 1):
        given += "".join(call.arguments for call in parser.push(char).tool_calls)
        behind = len(text[start : min(number, end)]) - len(given)
        assert text[start:].startswith(given)
        assert behind <= 1, "an escape and a number wait for one character"


def test_a_long_string_between_tags_is_passed_on_as_it_comes() -> None:
    parser = OutputParser(CODER, None, "", {"find": ("text",)})
    parser.push("<tool_call>\n<function=find>\n<parameter=text>\n")
    given = parser.push("one line\n").tool_calls + parser.push("and another").tool_calls
    assert "".join(call.arguments for call in given).endswith("one line\\nand another")


REASONED = [
    ("<think>\nso\n</think>\n\nYes", "", "so", "Yes"),
    ("  <think>so</think>Yes", "", "so", "Yes"),
    ("so\n</think>\n\nYes", "assistant\n<think>\n", "so", "Yes"),
    ("<think>\nso\n</think>\n\nYes", "assistant\n<think>\n", "so", "Yes"),
    ("Yes </think> no", "assistant\n", "", "Yes </think> no"),
    ("Yes <think> no </think>", "assistant\n", "", "Yes <think> no </think>"),
    ("Yes", "<think>\n\n</think>\n\n", "", "Yes"),
    ("\nYes", "<think></think>", "", "Yes"),
    ("<think> is a tag", "<think>\n\n</think>\n\n", "", "<think> is a tag"),
    ("<think>\nso on\n", "", "so on", ""),
    ("so on", "<think>", "so on", ""),
    ("<think>\n\n</think>\n\n", "", "", ""),
    ("</think>\n\nYes", "assistant\n", "", "Yes"),
    ("<think>a </thin b</think> \n c ", "", "a </thin b", "c "),
]


@pytest.mark.parametrize(("text", "prompt_end", "reasoning", "content"), REASONED)
def test_reasoning_is_apart(text: str, prompt_end: str, reasoning: str, content: str) -> None:
    """At the start of an output, or begun by the prompt; without the white space around it."""
    for tools in ({}, {"find": ()}):
        message = same_for_all_splits(text, HERMES, THINK, prompt_end, tools)
        assert (message.reasoning, message.content) == (reasoning, content)


def test_calls_are_read_behind_reasoning_and_not_in_it() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    message = same_for_all_splits(f"<think>\nOr {call}?\n</think>\n\n{call}", HERMES, THINK)
    assert message.reasoning == f"Or {call}?"
    assert (message.content, calls_of(message)) == ("", [("now", {})])
    bare = '{"name": "now", "parameters": {}}'
    message = same_for_all_splits(f"<think>so</think>\n{bare}", LLAMA, THINK)
    assert (message.reasoning, calls_of(message)) == ("so", [("now", {})])


WHOLE: dict[str, tuple[str, str]] = {  # answers with reasoning as models write them
    "mistral": ("[THINK]so[/THINK]", "Yes"),
    "seed_oss": ("<seed:think>so</seed:think>\n", "Yes"),
    "gemma4": ("<|channel>thought\nso\n<channel|>", "Yes"),
    "cohere_command": (
        "<|START_THINKING|>so<|END_THINKING|><|START_RESPONSE|>", "Yes<|END_RESPONSE|>"
    ),
    "granite": ("Here is my thought process: so\nHere is my response: ", "Yes"),
    "minimax_m3": ("<mm:think>so</mm:think>", "Yes"),
    "hy3": ("<think:opensource>so</think:opensource>", "Yes"),
    "apriel": (
        "Here are my reasoning steps:\nso\n[BEGIN FINAL RESPONSE]\n", "Yes\n[END FINAL RESPONSE]"
    ),
    "kimi_k3": (
        "<|open|>think<|sep|>so<|close|>think<|sep|><|open|>response<|sep|>",
        "Yes<|close|>response<|sep|><|close|>message<|sep|>",
    ),
    "solar_open": ("<|think|>so<|end|><|begin|>assistant<|content|>", "Yes"),
    "ernie45": ("<think>\nso\n</think>\n\n<response>\n", "Yes\n</response>\n"),
    "hunyuan_a13b": ("<think>\nso\n</think>\n<answer>\n", "Yes\n</answer>"),
    "openai_gptoss": (
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>",
        "Yes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_each_model_s_reasoning_is_read(name: str) -> None:
    """With the literals around the answer, whether the model or the prompt begins it."""
    format_ = reasoning_format(name)
    start = "<|start|>assistant" if format_.is_harmony else "assistant\n"
    before, answer = WHOLE[name]
    message = same_for_all_splits(before + answer, None, format_, start)
    assert (message.reasoning, message.content) == ("so", "Yes")
    begun = before.replace(format_.open.strip(), "", 1)
    message = same_for_all_splits(begun + answer, None, format_, start + format_.open)
    assert (message.reasoning, message.content) == ("so", "Yes")


def test_a_literal_behind_answers_is_content_before_more_text() -> None:
    format_ = reasoning_format("apriel")
    message = same_for_all_splits("One\n[END FINAL RESPONSE] two", None, format_)
    assert message.content == "One\n[END FINAL RESPONSE] two"


START = "<|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>The user greets.<|end|>"
CALL = "<|channel|>commentary to=functions.find <|constrain|>json<|message|>"
HARMONY: dict[str, tuple[str, str, str, Given]] = {  # output; reasoning, content, calls
    "an answer": (
        f"{ANALYSIS}{START}<|channel|>final<|message|>Hello there!",
        "The user greets.", "Hello there!", [],
    ),
    "a call": (f'{ANALYSIS}{CALL}{{"a": 1}}', "The user greets.", "", [("find", '{"a": 1}')]),
    "a call whose recipient is in the role": (
        ' to=functions.find<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        "", "", [("find", '{"a": 1}')],
    ),
    "a preamble, then a call": (
        f'<|channel|>commentary<|message|>I look.<|end|>{START}{CALL}{{"a": "<b>"}}<|call|>',
        "", "I look.", [("find", '{"a": "<b>"}')],
    ),
    "a call in the analysis": (
        '<|channel|>analysis to=functions.find <|constrain|>json<|message|>{"a": 1}<|call|>',
        "", "", [("find", '{"a": 1}')],
    ),
    "a call without arguments": (CALL, "", "", [("find", "{}")]),
    "two calls": (
        f"{CALL}{{}}<|call|>{START}<|channel|>commentary to=functions.now<|message|>{{}}<|call|>",
        "", "", [("find", "{}"), ("now", "{}")],
    ),
    "two thoughts": (
        f"{ANALYSIS}{START}<|channel|>analysis<|message|>Still.<|end|>",
        "The user greets.\nStill.", "", [],
    ),
    "arguments that are no object": (f"{CALL}no JSON<|call|>", "", "no JSON", []),
    "a cut header": (f"{ANALYSIS}{START}<|channel|>fin", "The user greets.", "", []),
    "a cut message": ("<|channel|>analysis<|message|>The us", "The us", "", []),
    "a cut call": (f'{CALL}{{"a": "x', "", "", [("find", '{"a": "x')]),
    "no channels": ("Hello there!", "", "Hello there!", []),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMONY)
def test_harmony_is_read(name: str) -> None:
    """Channels and recipients; nothing of a header is ever content."""
    text, reasoning, content, calls = HARMONY[name]
    format_ = reasoning_format("openai_gptoss")
    message = same_for_all_splits(text, tool_format("openai"), format_, f"user<|end|>{START}")
    assert (message.reasoning, message.content) == (reasoning, content)
    assert [(call.name, call.arguments) for call in message.tool_calls] == calls


def test_harmony_without_tools_has_calls_as_content() -> None:
    format_ = reasoning_format("openai_gptoss")
    message = same_for_all_splits(f'{CALL}{{"a": 1}}', None, format_, START, {})
    assert (message.content, message.tool_calls) == ('{"a": 1}', [])


@pytest.mark.parametrize("state", ["in", "out"])
def test_the_parser_says_whether_it_reads_reasoning(state: str) -> None:
    parser = OutputParser(None, THINK, "", {})
    parser.push("<think>" if state == "in" else "Hi")
    assert parser.in_reasoning == (state == "in")
    parser.push("a</think>b")
    assert not parser.in_reasoning


FLOODS: list[tuple[ToolFormat | None, ReasoningFormat | None, str, str]] = [
    *((HERMES, None, "", unit) for unit in ("\n", "<tool_call>", '<tool_call>{"a": [', "{")),
    (HERMES, None, '<tool_call>{"name": "find", "arguments": {}}', "\n"),
    (HERMES, None, '<tool_call>{"name": "find", "arguments": {"a": ', "["),
    (HERMES, None, '<tool_call>{"name": "find", "arguments": {', " \n"),
    (tool_format("pythonic"), None, "[find(a='", "x"),
    (tool_format("gemma4"), None, "<|tool_call>call:find{", "ab "),
    (None, reasoning_format("openai_gptoss"), "<|channel|>", "x"),
    (None, THINK, "<think>", "\n"),
]


@pytest.mark.parametrize("flood", FLOODS, ids=[f"{start}{unit}" for _, _, start, unit in FLOODS])
def test_a_model_that_repeats_itself_is_read_in_linear_time(
    flood: tuple[ToolFormat | None, ReasoningFormat | None, str, str],
) -> None:
    """Quadratic time would take minutes here."""
    calls, reasoning, start, unit = flood
    read([start, *[unit] * 10_000], calls, reasoning, START)


def test_deep_arguments_are_cut() -> None:
    """What is given must be readable by others."""
    text = '<tool_call>{"name": "find", "arguments": {"a": ' + "[" * 5000
    [call] = read(text, HERMES).tool_calls
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.arguments)
