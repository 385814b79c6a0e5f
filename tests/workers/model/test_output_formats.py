"""The formats of reasoning and calls are found by what a chat template shows."""

from typing import Any

import pytest

from contract.output_formats import ToolFormat
from workers.engine.interface import ModelRefused
from workers.model.output_formats import ShownChats, find_calls, find_reasoning, why_unknown

# A template: each turn between marks. `call`: what shows one call, of the variables f and a.
FRAME = """
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '<|start|>assistant\\n' }}THINK
{%- if m.tool_calls %}{{- m.content or '' }}CALLS
{%- else %}{{- m.content if m.content is string else '' }}{% endif %}{{- '<|end|>\\n' }}
{%- else %}{{- '<|start|>' + m.role + '\\n' + m.content + '<|end|>\\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{- '<|start|>assistant\\n' }}PROMPT{% endif %}"""
EACH = """
{%- for c in m.tool_calls %}{% set f = c.function.name %}{% set a = c.function.arguments %}
{{- BETWEEN if not loop.first else '' }}{{- CALL }}{% endfor %}"""
TAGS = """
{%- for c in m.tool_calls %}{{- '\\n' if not loop.first else '' }}
{{- '<tool_call>\\n<function=' + c.function.name + '>\\n' }}
{%- for k, v in c.function.arguments.items() %}{{- '<parameter=' + k + '>\\n' }}
{{- v if v is string else v | tojson }}{{- '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}{% endfor %}"""
PYTHON = """
{{- '[' }}{% for c in m.tool_calls %}{{- (', ' if not loop.first else '') + c.function.name + '(' }}
{%- for k, v in c.function.arguments.items() %}{{- (', ' if not loop.first else '') + k + '=' }}
{{- "'" + v + "'" if v is string else v | tojson }}{% endfor %}{{- ')' }}{% endfor %}{{- ']' }}"""
ONE = "{%- if m.tool_calls | length > 1 %}{{- raise_exception('one call') }}{% endif %}"
THINK = """
{%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}"""
OBJECT = """'{"name": "' + f + '", "arguments": ' + a | tojson + '}'"""
HARMONY = """
{%- for m in messages %}
{%- if m.role == 'assistant' %}{% if m.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{%- if m.tool_calls %}{% set f = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}
{{- f.arguments | tojson + '<|call|>' }}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- endif %}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""


def frame(calls: str = "", think: str = "", prompt: str = "") -> str:
    return FRAME.replace("THINK", think).replace("CALLS", calls).replace("PROMPT", prompt)


def each(call: str, between: str = "''") -> str:
    return EACH.replace("CALL", call).replace("BETWEEN", between)


def grouped(before: str, call: str, between: str, after: str) -> str:
    return f"{{{{- {before} }}}}{each(call, between)}{{{{- {after} }}}}"


HERMES = each(f"'<tool_call>\\n' + {OBJECT} + '\\n</tool_call>'", "'\\n'")
DEEPSEEK = grouped(
    "'<｜tool▁calls▁begin｜>'",
    "'<｜tool▁call▁begin｜>' + f + '<｜tool▁sep｜>' + a | tojson + '<｜tool▁call▁end｜>'",
    "''",
    "'<｜tool▁calls▁end｜>'",
)
NEMO = grouped("'[TOOL_CALLS]['", OBJECT, "', '", "']'")
SHORT_IDS = (
    "{%- for c in m.tool_calls %}{% if c.id | length != 9 %}{{- raise_exception('id') }}{% endif %}"
    "{% endfor %}"
)
KNOWN: dict[str, tuple[str, str, str | None]] = {  # template; names of calls and reasoning
    "objects between tags": (frame(HERMES), "hermes", None),
    "with reasoning": (frame(HERMES, THINK), "hermes", "qwen3"),
    "with reasoning that the prompt begins": (
        frame(HERMES, THINK, "{{- '<think>\\n' }}"), "hermes", "qwen3"
    ),
    "with reasoning on one line": (
        frame(HERMES, THINK.replace("\\n", "")), "hermes", "deepseek_v3"
    ),
    "with reasoning that past turns lose": (
        frame(HERMES, "{%- set x = (m.content or '').split('</think>')[-1] %}"), "hermes", "qwen3"
    ),
    "one object": (
        frame(ONE + each(OBJECT.replace("arguments", "parameters"))), "llama3_json", None
    ),
    "a list of objects": (frame(NEMO), "mistral", None),
    "a name, then JSON": (
        frame(each("'[TOOL_CALLS]' + f + '[ARGS]' + a | tojson")), "mistral", None
    ),
    "calls in a group": (frame(DEEPSEEK), "deepseek_v31", None),
    "tags": (frame(TAGS), "qwen3_coder", None),
    "Python": (frame(PYTHON), "pythonic", None),
    "harmony": (HARMONY, "openai", "openai_gptoss"),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_formats_of_the_tables_are_found(name: str) -> None:
    template, calls, reasoning = KNOWN[name]
    chats = ShownChats(template, {})
    thought = find_reasoning(chats)
    found = find_calls(chats, thought)
    assert found is not None, why_unknown(chats)
    assert found.format.name == calls
    assert (found.string_arguments, found.null_content) == (False, False)
    assert (None if thought is None else thought.name) == reasoning
    assert (found.format.between is None) == (calls in ("llama3_json", "openai"))


LEARNED: dict[str, tuple[str, ToolFormat]] = {
    "objects": (
        each("'<call>' + " + OBJECT + " + '</call>'"),
        ToolFormat(open="<call>", close="</call>"),
    ),
    "objects in a group": (
        grouped("'<calls>\\n'", "'<do>' + " + OBJECT + " + '</do>'", "',\\n'", "'\\n</calls>'"),
        ToolFormat(begin="<calls>", open="\n<do>", close="</do>", between=",", end="\n</calls>"),
    ),
    "a list with keys of its own": (
        grouped("'<do>['", OBJECT.replace("name", "tool"), "', '", "']'"),
        ToolFormat(begin="<do>[", between=", ", end="]", name_key="tool"),
    ),
    "a name, then JSON": (
        each("'@@' + f + ' with ' + a | tojson + '$$'", "' '"),
        ToolFormat(syntax="json", open="@@", middle=" with ", close="$$", between=" "),
    ),
    "one call": (
        ONE + each("'<do>' + " + OBJECT + " + '</do>'"),
        ToolFormat(open="<do>", close="</do>", between=None),
    ),
}


@pytest.mark.parametrize("think", ["", THINK])
@pytest.mark.parametrize("name", LEARNED)
def test_formats_of_json_between_other_marks_are_learned(name: str, think: str) -> None:
    calls, expected = LEARNED[name]
    prompt = "{{- '<think>\\n' }}" if think else ""
    chats = ShownChats(frame(calls, think, prompt), {})
    found = find_calls(chats, find_reasoning(chats))
    assert found is not None
    assert found.format == expected


STRINGS = HERMES.replace("a | tojson", "a")
NULL = "{%- if m.content is none %}" + HERMES + "{% endif %}"


@pytest.mark.parametrize(
    ("calls", "strings", "null"),
    [
        (STRINGS, True, False),
        (NULL, False, True),
        (NULL.replace("a | tojson", "a"), True, True),
    ],
)
def test_what_a_template_wants_of_past_calls_is_found(
    calls: str, strings: bool, null: bool
) -> None:
    """Arguments as strings, or content that is null."""
    chats = ShownChats(frame(calls), {})
    found = find_calls(chats, None)
    assert found is not None
    assert (found.format.name, found.string_arguments, found.null_content) == (
        "hermes", strings, null,
    )  # fmt: skip


def test_a_template_that_needs_more_is_given_it() -> None:
    """A system message, descriptions of parameters, and short ids."""
    needs = (
        "{%- if messages[0].role != 'system' %}{{- raise_exception('no system') }}{% endif %}"
        "{%- for t in tools %}{% for p in t.function.parameters.properties.values() %}"
        "{{- p.type + ': ' + p.description }}{% endfor %}{% endfor %}"
    )
    chats = ShownChats(needs + frame(SHORT_IDS + NEMO, THINK), {})
    found = find_calls(chats, find_reasoning(chats))
    assert found is not None
    assert (found.format.name, found.format.id_length) == ("mistral", 9)
    assert find_reasoning(chats) is not None


REFUSED = {
    "the chat template shows no calls": frame(),
    "the chat template fails on a message with calls: TemplateError: not here": frame(
        "{{- raise_exception('not here') }}"
    ),
    "the chat template shows calls in a format that is not known": frame(each("f ~ a.items()")),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_format_that_is_not_shown_is_not_guessed(reason: str) -> None:
    """The worker's log says why."""
    chats = ShownChats(REFUSED[reason], {})
    assert find_calls(chats, None) is None
    assert why_unknown(chats) == reason


@pytest.mark.parametrize("mark", ["x" * 300, ""])
def test_marks_that_are_too_long_or_none_are_not_learned(mark: str) -> None:
    call = f"'{mark}' + '{{\"tool\": \"' + f + '\", \"arguments\": ' + a | tojson + '}}'"
    assert find_calls(ShownChats(frame(each(call)), {}), None) is None


def test_the_operator_may_choose() -> None:
    """A name of the tables holds, whatever the template shows; of several formats of that name, the
    one that it shows."""
    chats = ShownChats(frame(), {})
    found = find_calls(chats, None, "qwen3_coder")
    assert found is not None
    assert found.format.syntax == "tags"
    found = find_calls(ShownChats(frame(NEMO), {}), None, "mistral")
    assert found is not None
    assert found.format.syntax == "object"
    chosen = find_reasoning(chats, "mistral")
    assert chosen is not None
    assert chosen.open == "[THINK]"
    reasons = ShownChats(frame(HERMES, THINK), {})
    assert find_reasoning(reasons, "none") is None
    assert find_calls(reasons, None, "none") is None


@pytest.mark.parametrize("find", [find_reasoning, lambda *args: find_calls(args[0], None, args[1])])
def test_an_unknown_name_is_refused_with_the_known_ones(find: Any) -> None:
    with pytest.raises(ModelRefused, match=r"no .* parser herms; known are auto, none, .*mistral"):
        find(ShownChats(frame(), {}), "herms")


def test_reasoning_in_parts_of_the_content_is_found() -> None:
    """Mistral's templates take it so."""
    parts = (
        "{%- if m.content is not string %}{% for p in m.content or [] %}"
        "{{- '[THINK]' + p.thinking + '[/THINK]' if p.type == 'thinking' else p.text }}"
        "{% endfor %}{% endif %}"
    )
    found = find_reasoning(ShownChats(frame(think=parts), {}))
    assert found is not None
    assert found.name == "mistral"


def test_a_turn_s_end_is_no_sign_of_reasoning() -> None:
    """Phi ends its turns with what ends Solar's and gpt-oss's reasoning."""
    assert find_reasoning(ShownChats(frame(), {})) is None
