"""Chat templates come with models: what they may reach, and how much they may say."""

import pytest
from msgspec.structs import replace

from gateway.errors import TemplateRefused
from gateway.tokens import ModelTokenizer
from tests.fakes import hash_tokenizer

MESSAGES = [{"role": "user", "content": "hello"}]
HOSTILE = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of a function": "{{ raise_exception.__globals__.os }}",
    "globals of a filter": "{{ messages.append.__self__ }}{{ cycler.__init__.__globals__.os }}",
    "attributes by name": "{{ ''|attr('__class__')|attr('__base__') }}{{ 1 / 0 }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "a change of a message": "{{ messages[0].update({'role': 'system'}) }}",
    "an import": "{% import 'os' as os %}",
    "a large range": "{% for i in range(10 ** 9) %}x{% endfor %}",
    "much output": "{% for i in range(90000) %}{{ messages[0].content }}{% for j in range(99) %}"
    "{{ messages[0].content }}{% endfor %}{% endfor %}",
    "a long text at once": "{{ 'x' * 10 ** 10 }}",
    "a long list at once": "{{ [0] * 10 ** 10 }}",
    "a long number": "{{ 10 ** 10 ** 10 }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


def render(template: str) -> list[int]:
    files = replace(hash_tokenizer(), chat_template=template)
    return ModelTokenizer(files).encode_chat(MESSAGES)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused(name: str) -> None:
    """As a fault of this call: nothing of the process is reached, its memory is not filled."""
    with pytest.raises(TemplateRefused):
        render(HOSTILE[name])


def test_templates_may_do_what_real_ones_do() -> None:
    """Repeat a short text, calculate, format."""
    template = (
        "{{ '=' * 3 }}{{ 2 * 3 }}{{ 2 ** 3 }}{{ '%s:%d' % ('a', 7) }}{{ messages[0].content }}"
    )
    assert bytes(render(template)) == b"===68a:7hello"


def test_a_refusal_of_the_template_is_told_in_part() -> None:
    """What it says to a caller is bounded too."""
    with pytest.raises(TemplateRefused) as refused:
        render("{{ raise_exception('x' * 5000) }}")
    assert len(str(refused.value)) < 300
