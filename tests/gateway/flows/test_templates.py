"""Bodies of steps: values, texts, and what cannot be made."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.flows import Step
from contract.jobs import Endpoint
from gateway.child import Refused
from gateway.models.step_bodies import check_templates, render

VALUES: dict[str, Any] = {
    "input": {"messages": [{"content": "Which?"}], "documents": ["one", "two"], "top": 2},
    "rank": {"results": [{"index": 1, "text": "two"}, {"index": 0, "text": "one <1>"}]},
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def step(**body: Any) -> Step:
    return Step(name="ask", model="m", endpoint=Endpoint.CHAT, body=body)


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("{{ input.documents }}", ["one", "two"]),
        ("{{input.top}}", 2),
        (" {{- input.top + 1 -}} ", 3),
        ("{{ {'a': input.top} }}", {"a": 2}),
        ("{{ rank.results | map(attribute='index') }}", [1, 0]),
        ("{{ input.messages[-1].content }}", "Which?"),
        ("{{ input['top'] is divisibleby 2 }}", True),
        ("{{ none }}", None),
        ("{{ input.most | default(input.top) | default(9) }}", 2),
        ("{{ input.most | default(input.more) | default(9) }}", 9),
        ("{{ -1 }}", -1),
        ("{{- -input.top -}}", -2),
        ("{{-1}}", 1),
        ("{{ +1 }}", 1),
        ("Top {{ input.top }}:\n", "Top 2:\n"),
        ("{{ input.top }}{{ input.top }}", "22"),
        ("{# why #}{{ input.top }}", "2"),
        ("{% for r in rank.results %}[{{ r.text }}]{% endfor %}", "[two][one <1>]"),
        ("{{ rank.results[1].text | tojson }}!", '"one <1>"!'),
        ("{{ rank.results[1].text | e }}", "one &lt;1&gt;"),
        ("no template", "no template"),
        ("", ""),
    ],
)
def test_one_expression_is_its_value_and_all_else_text(template: str, value: object) -> None:
    """At any depth of the body; keys are left as they are."""
    deep = {"{{ key }}": [1, template, {"x": template}]}
    check_templates(step(a=template, deep=deep), VALUES)
    rendered = render(step(a=template, deep=deep), VALUES)
    assert msgspec.json.decode(msgspec.json.encode(rendered)) == rendered
    assert rendered == {
        "a": value,
        "deep": {"{{ key }}": [1, value, {"x": value}]},
    }


@pytest.mark.campaign
@given(JSON)
def test_any_value_passes_through_unchanged(value: object) -> None:
    """Its text is no template, whatever it looks like."""
    rendered = render(step(a="{{ input.x }}", b=1), {"input": {"x": value}})
    assert rendered == {"a": value, "b": 1}


def test_a_callers_text_is_never_a_template() -> None:
    """It is put in as it is."""
    rendered = render(step(a="Say {{ input.x }}"), {"input": {"x": "{{ 7 * 7 }}"}})
    assert rendered == {"a": "Say {{ 7 * 7 }}"}


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ input.nothing }}", "'dict object' has no attribute 'nothing'"),
        ("a {{ input.nothing.more }}", "'dict object' has no attribute 'nothing'"),
        ("{{ rank.results[5] }}", "list object has no element 5"),
        ("{{ input.top | join }}", "the template failed: TypeError"),
        ("{{ ''.__class__ }}", "access to attribute '__class__' of 'str' object is unsafe."),
        ("{{ [input, {'a': [input.nothing]}] }}", "'dict object' has no attribute 'nothing'"),
        ("{{ (input.top ~ 'e999') | float }}", "its value, inf, is no JSON"),
        ("{{ input.items }}", "its value, of type builtin_function_or_method, is no JSON"),
    ],
)
def test_a_fault_tells_step_and_place(template: str, fault: str) -> None:
    """Not the values, which are a caller's."""
    with pytest.raises(Refused) as caught:
        render(step(messages=[{"content": template}]), VALUES)
    assert str(caught.value) == f"step ask: body.messages[0].content: {fault}"


def test_a_step_uses_only_what_is_before_it() -> None:
    """Names of the template's own, and jinja2's functions, are no fault."""
    check_templates(step(a="{% for i in range(2) %}{{ i }}{{ input.x }}{% endfor %}"), ["input"])
    with pytest.raises(Refused, match=r"^body\.a: 'later' is not known there; known are in"):
        check_templates(step(a="{{ later.text }}"), ["input"])
