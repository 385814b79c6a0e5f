"""A tokenizer is read with its chat templates, their variables and the formats that they show."""

import json
from pathlib import Path
from typing import Any

import pytest

from contract.model_cards import TokenizerFiles
from tests.workers.model.test_output_formats import HERMES, THINK, frame
from workers.engine.interface import ModelRefused
from workers.model.tokenizer import read_tokenizer

PLAIN = frame()
CALLS = frame(HERMES, THINK)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer without a chat template."""
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"a": 0, "<s>": 1}, "merges": []},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    write_config(tmp_path)
    return tmp_path


def write_config(folder: Path, **fields: Any) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", **fields}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_list(folder: Path) -> None:
    templates = {"default": PLAIN, "tool_use": CALLS, "rag": "x"}
    named = [{"name": name, "template": template} for name, template in templates.items()]
    write_config(folder, chat_template=named)


def write_files(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(PLAIN)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(CALLS)


@pytest.mark.parametrize("write", [write_list, write_files])
def test_the_template_for_tools_is_read(folder: Path, write: Any) -> None:
    """From a list in the configuration, or a folder; it shows the calls."""
    write(folder)
    files = read_tokenizer(str(folder))
    assert (files.chat_template, files.tool_template) == (PLAIN, CALLS)
    assert files.tool_format is not None
    assert files.tool_format.name == "hermes"


def test_one_template_serves_both(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(CALLS)
    files = read_tokenizer(str(folder))
    assert (files.chat_template, files.tool_template) == (CALLS, None)
    assert files.reasoning is not None
    assert files.reasoning.name == "qwen3"


def test_a_template_for_tools_alone_serves_all_chats(folder: Path) -> None:
    write_config(folder, chat_template=[{"name": "tool_use", "template": CALLS}])
    files = read_tokenizer(str(folder))
    assert (files.chat_template, files.tool_template) == (CALLS, None)


def test_the_variables_of_templates_are_read(folder: Path) -> None:
    """Not those of every chat, nor special tokens; also where transformers' own tag stands."""
    template = (
        "{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
        "{{- bos_token }}{% for m in messages %}{% if loop.first and not tools %}{% continue %}"
        "{% endif %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{%- set ns = namespace(a=range(3)) %}{{ strftime_now('%Y') if date else budget }}"
    )
    (folder / "chat_template.jinja").write_text(template)
    assert read_tokenizer(str(folder)).template_variables == ("budget", "date", "enable_thinking")


def test_the_operator_s_choices_hold(folder: Path) -> None:
    """Variables are given to the template, also where formats are looked for."""
    template = "{%- if not shows_calls %}" + PLAIN + "{% else %}" + CALLS + "{% endif %}"
    (folder / "chat_template.jinja").write_text(template)

    def read(**options: Any) -> TokenizerFiles:
        return read_tokenizer(str(folder), **options)

    assert read().tool_format is None
    shown = read(template_kwargs={"shows_calls": True})
    assert shown.template_kwargs == {"shows_calls": True}
    assert shown.tool_format is not None
    chosen = read(tool_call_parser="pythonic", reasoning_parser="mistral")
    assert chosen.tool_format is not None
    assert chosen.reasoning is not None
    assert (chosen.tool_format.name, chosen.reasoning.name) == ("pythonic", "mistral")
    with pytest.raises(ModelRefused, match="known are auto, none"):
        read(tool_call_parser="pythonik")


def test_reasoning_is_known_where_the_operator_switches_it_off(folder: Path) -> None:
    """A caller may switch it on."""
    think = "{%- if thinking is not defined or thinking %}" + THINK + "{% endif %}"
    (folder / "chat_template.jinja").write_text(frame(HERMES, think))
    files = read_tokenizer(str(folder), template_kwargs={"thinking": False})
    assert files.reasoning is not None
