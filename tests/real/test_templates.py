"""Real chat templates render here as in transformers, and their formats are known or refused."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.openai.chat_template import ChatTemplate
from gateway.openai.child import Refused
from tests.real.conversations import CONVERSATIONS, SPECIAL_TOKENS, Conversation
from tests.real.parts import NUM_TEMPLATES, needs_parts, template, template_names

pytestmark = [pytest.mark.campaign, needs_parts]

NAMES = template_names()


def test_all_templates_are_there() -> None:
    """Otherwise the tests below would pass without a template."""
    assert len(NAMES) == NUM_TEMPLATES


@pytest.mark.parametrize("name", NAMES)
def test_a_template_renders_as_in_transformers(name: str) -> None:
    """The same text, or an error in both."""
    ours = ChatTemplate(template(name), SPECIAL_TOKENS)
    outcomes = {}
    for title, conversation in CONVERSATIONS.items():
        found, expected = _ours(ours, conversation), _theirs(template(name), conversation)
        assert found == expected, title
        outcomes[title] = found
    assert outcomes["plain"] is not None


def _ours(compiled: ChatTemplate, conversation: Conversation) -> str | None:
    """The text; None for a refusal."""
    try:
        return compiled.render(
            conversation.messages,
            conversation.tools,
            conversation.variables,
            is_answered=conversation.is_answered,
        )
    except Refused:
        return None


def _theirs(source: str, conversation: Conversation) -> str | None:
    variables = SPECIAL_TOKENS | {"documents": None} | conversation.variables
    try:
        rendered: Any = render_jinja_template(
            [conversation.messages],
            list(conversation.tools or ()) or None,
            chat_template=source,
            add_generation_prompt=conversation.is_answered,
            **variables,
        )
    except Exception:  # of many kinds, for example TypeError for an argument of a filter
        return None
    [[text], _] = rendered
    return str(text)
