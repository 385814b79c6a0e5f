"""Real chat templates render here as in transformers, and their formats are known or refused."""

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.child import Refused
from gateway.models.chat_template import ChatTemplate
from tests.real.conversations import CONVERSATIONS, SPECIAL_TOKENS, Conversation
from tests.real.parts import NUM_TEMPLATES, needs_parts, template, template_names
from workers.model.output_formats import ShownChats, find_calls, find_reasoning, why_unknown

pytestmark = [pytest.mark.campaign, needs_parts]

NAMES = template_names()
FORMATS = json.loads((Path(__file__).parent / "formats.json").read_text())


def test_all_templates_are_there() -> None:
    """Otherwise the tests below would pass without a template."""
    assert len(NAMES) == NUM_TEMPLATES


@pytest.mark.parametrize("name", NAMES)
def test_a_template_renders_as_in_transformers(name: str) -> None:
    """The same text, or refused with the same reason."""
    ours = ChatTemplate(template(name), SPECIAL_TOKENS)
    for title, conversation in CONVERSATIONS.items():
        assert _ours(ours, conversation) == _theirs(template(name), conversation), title


@pytest.mark.parametrize("name", NAMES)
def test_the_formats_of_a_template_are_known_or_the_reason_is(name: str) -> None:
    """As formats.json has it: the format of calls, that of reasoning, and why calls are refused."""
    chats = ShownChats(template(name), SPECIAL_TOKENS)
    reasoning = find_reasoning(chats)
    calls = find_calls(chats, reasoning)
    why = why_unknown(chats) if calls is None else ""

    found = [calls and calls.format.name, reasoning and reasoning.name, why]
    assert found == FORMATS[name]


def test_most_templates_that_show_calls_are_known() -> None:
    assert list(FORMATS) == NAMES
    shown = [calls for calls, _, why in FORMATS.values() if "shows no calls" not in why]
    assert len(shown) - shown.count(None) >= 48


def _ours(compiled: ChatTemplate, conversation: Conversation) -> str:
    """The text, or why it is refused."""
    try:
        return compiled.render(
            conversation.messages,
            conversation.tools,
            conversation.variables,
            is_answered=conversation.is_answered,
        )
    except Refused as refusal:
        return str(refusal)


def _theirs(source: str, conversation: Conversation) -> str:
    variables = SPECIAL_TOKENS | {"documents": None} | conversation.variables
    try:
        rendered: Any = render_jinja_template(
            [conversation.messages],
            list(conversation.tools or ()) or None,
            chat_template=source,
            add_generation_prompt=conversation.is_answered,
            **variables,
        )
    except jinja2.TemplateError as exc:
        return f"the model's chat template refused: {exc.message}"
    except Exception as exc:  # of many kinds, for example TypeError for an argument of a filter
        reason = f"{type(exc).__name__}: {exc}"
        return f"the model's chat template failed on these messages: {reason}"
    [[text], _] = rendered
    return str(text)
