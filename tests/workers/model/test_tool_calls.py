"""The format of tool calls is read from a model's chat template."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_template_utils import render_jinja_template

from contract.model_cards import ToolFormat
from workers.model.tool_calls import read_tool_format

TAGS = """
{%- for message in messages %}{{- '<|start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and thinks %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{% endif %}"""
THINKING = "{% set thinks = true %}" + TAGS.replace(
    "assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}"
)
BARE = """
{%- for message in messages %}{{- '<|start|>' + message.role + '\\n' }}
{%- if message.tool_calls %}
{%- if message.tool_calls | length > 1 %}{{- raise_exception('one call') }}{% endif %}
{%- set function = message.tool_calls[0].function %}
{{- '{"name": "' + function.name + '", "parameters": ' + function.arguments | tojson + '}' }}
{%- else %}{{- message.content }}{% endif %}{{- '<|end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{% endif %}"""
LIST = """
{%- for message in messages %}{% if message.role == 'user' %}{{- '[Q]' + message.content + '[/Q]' }}
{%- elif message.tool_calls %}{{- '[CALLS][' }}{% for call in message.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}' + (', ' if not loop.last else '') }}{% endfor %}{{- ']<end>' }}
{%- else %}{{- message.content + '<end>' }}{% endif %}{% endfor %}"""
PLAIN = "{% for message in messages %}{{ message.content }}<|end|>{% endfor %}"


@dataclass
class FakeTokenizer:
    """The part of a tokenizer used here."""

    chat_template: str | None
    response_template: dict[str, Any] | None = None

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: Any,
        tokenize: bool,
        add_generation_prompt: bool = False,
    ) -> str:
        rendered = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self.chat_template,
            add_generation_prompt=add_generation_prompt,
        )
        return str(rendered[0][0])


TAG_FORMAT = ToolFormat(
    begin='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    between='}\n</tool_call>\n<tool_call>\n{"name": "',
    end="}\n</tool_call>",
)


@pytest.mark.parametrize(
    ("template", "begin", "prompt_end"),
    [
        (TAGS, "", "<|start|>assistant\n"),
        (THINKING, "\n</think>\n\n", "<|start|>assistant\n<think>\n"),
    ],
)
def test_calls_between_tags_are_read_from_the_chat_template(
    template: str, begin: str, prompt_end: str
) -> None:
    """Text in this format is parsed to the calls that the template rendered."""
    responses, format_ = read_tool_format(FakeTokenizer(template))
    assert format_ is not None
    assert responses is not None
    assert format_.begin == begin + TAG_FORMAT.begin
    assert (format_.middle, format_.between, format_.end) == (
        TAG_FORMAT.middle,
        TAG_FORMAT.between,
        TAG_FORMAT.end,
    )
    assert format_.between is not None
    text = f'{format_.begin}add{format_.middle}{{"a": 1}}'
    text += f"{format_.between}spell{format_.middle}{{}}{format_.end}"
    message = parse_response(text, json.loads(responses), prefix=prompt_end)
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "add", "arguments": {"a": 1}},
        {"name": "spell", "arguments": {}},
    ]


def test_one_call_without_tags_is_read_from_the_chat_template() -> None:
    """The arguments may have another key. Text that begins otherwise is content."""
    responses, format_ = read_tool_format(FakeTokenizer(BARE))
    assert format_ == ToolFormat(
        begin='{"name": "', middle='", "parameters": ', between=None, end="}"
    )
    assert responses is not None
    spec = json.loads(responses)
    call = parse_response('{"name": "add", "parameters": {"a": 1}}', spec, prefix="")
    assert call["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert parse_response('Say {"name": "a"}', spec, prefix="") == {"content": 'Say {"name": "a"}'}


LONG = TAGS.replace("<tool_call>", "<tool_call>" + "x" * 300)


@pytest.mark.parametrize("template", [LIST, LONG, PLAIN, "{{ raise_exception('no') }}", None])
def test_an_unknown_call_format_is_not_guessed(template: str | None) -> None:
    """A list of calls, a long opening, a template without tools, one that refuses them, none."""
    assert read_tool_format(FakeTokenizer(template)) == (None, None)


def test_the_models_own_response_template_is_kept() -> None:
    """Together with the format of calls, if the chat template shows it."""
    own = {"start_anchor": "[/Q]", "fields": {"content": {"content": "text"}}}
    responses, format_ = read_tool_format(FakeTokenizer(LIST, own))
    assert responses is not None
    assert json.loads(responses) == own
    assert format_ is not None
    assert (format_.begin, format_.between) == ('[CALLS][{"name": "', '}, {"name": "')
    assert read_tool_format(FakeTokenizer(PLAIN, own))[1] is None
