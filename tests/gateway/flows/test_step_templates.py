"""Bodies of steps: values, texts, and what cannot be made. They are made in a process of their own,
which a caller's values cannot stop."""

import asyncio
import contextlib
import copy
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.flows import Step
from contract.jobs import Endpoint
from gateway.child import Refused
from gateway.child_process import ChildLimits
from gateway.models.step_bodies import check_templates, render
from gateway.models.step_templates import StepTemplates, TemplateFault
from tests.gateway.flows.conftest import FLOWS, chat
from tests.gateway.flows.model_files import write

pytestmark = pytest.mark.anyio

LOOPS = (
    "{% for a in input.d %}{% for b in input.d %}{% for c in input.d %}{% if a == 1 %}x{% endif %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
LIMITS = ChildLimits(cpu_s=1, wall_s=60.0, long_s=60.0)  # the machine may be busy
VALUES: dict[str, Any] = {"input": {"d": ["what a long text"] * 2_048, "big": 2**70, "x": "é😀"}}
GIVEN: dict[str, Any] = {
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
    check_templates(step(a=template, deep=deep), GIVEN)
    rendered = render(step(a=template, deep=deep), GIVEN)
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
        render(step(messages=[{"content": template}]), GIVEN)
    assert str(caught.value) == f"step ask: body.messages[0].content: {fault}"


def test_a_step_uses_only_what_is_before_it() -> None:
    """Names of the template's own, and jinja2's functions, are no fault."""
    check_templates(step(a="{% for i in range(2) %}{{ i }}{{ input.x }}{% endfor %}"), ["input"])
    with pytest.raises(Refused, match=r"^body\.a: 'later' is not known there; known are in"):
        check_templates(step(a="{{ later.text }}"), ["input"])


@pytest.fixture
async def templates() -> AsyncIterator[StepTemplates]:
    found = StepTemplates(LIMITS)
    yield found
    await found.aclose()


async def test_values_come_back_as_they_are(templates: StepTemplates) -> None:
    """Texts, lists, and integers of any length."""
    body = {"a": "{{ input.d }}", "b": ["{{ input.big }}", 1.5, None], "c": "say {{ input.x }}"}
    rendered = await templates.render(step(**body), VALUES)
    assert rendered == {"a": VALUES["input"]["d"], "b": [2**70, 1.5, None], "c": "say é😀"}


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LOOPS, "its templates failed: it takes too long"),
        ("{{ 'x' * 10 ** 10 }}", "its templates failed: it needs too much memory"),
        ("{{ input.d | join('x' * 5_000) }}", "body: it has over 4194304 characters"),
        ("{{ input.nothing }}", "body.a: 'dict object' has no attribute 'nothing'"),
        ('{{ "\\ud800" }}', "the output is not valid text"),
    ],
)
async def test_what_cannot_be_made_is_a_fault(
    templates: StepTemplates, template: str, reason: str
) -> None:
    """It says why, and the next body is made."""
    with pytest.raises(TemplateFault) as caught:
        await templates.render(step(a=template), VALUES)
    assert str(caught.value).removeprefix("step ask: ") == reason
    assert await templates.render(step(a="{{ input.x }}"), VALUES) == {"a": "é😀"}


@pytest.mark.campaign
async def test_the_event_loop_goes_on_while_a_body_is_made(templates: StepTemplates) -> None:
    """Other calls are answered meanwhile."""
    rendering = asyncio.create_task(templates.render(step(a=LOOPS), VALUES))
    num_ticks = 0
    while not rendering.done():
        await asyncio.sleep(0.001)
        num_ticks += 1
    assert num_ticks > 100
    with pytest.raises(TemplateFault, match="too long"):
        await rendering


async def test_no_process_is_left_at_the_end(templates: StepTemplates) -> None:
    """It ends with the gateway."""
    await templates.render(step(a="{{ input.x }}"), VALUES)
    pid = templates.pid
    assert pid is not None
    await templates.aclose()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        raise AssertionError("it still runs")


@pytest.mark.campaign
async def test_a_flow_whose_template_takes_too_long_is_refused(flows: httpx.AsyncClient) -> None:
    """By name, as what its caller can change; other flows go on."""
    slow = chat("slow") | {"documents": ["what a long text"] * 2_048}
    answer = await flows.post("/v1/chat/completions", json=slow, timeout=100)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert message == "small: step draft: its templates failed: it takes too long"
    answer = await flows.post("/v1/chat/completions", json=chat("pipe"), timeout=100)
    assert answer.status_code == 200, answer.text


@pytest.fixture
def models_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The flows, and one with loops over a caller's documents. The gateway waits as long as a busy
    machine needs, and its processes do not give way."""
    monkeypatch.setattr("gateway.models.step_templates.ChildLimits", lambda: LIMITS)
    slow = copy.deepcopy(FLOWS["pipe"])
    slow["pipeline"]["steps"][0]["body"]["prompt"] = LOOPS.replace("input.d", "input.documents")
    return write(tmp_path, pipe=FLOWS["pipe"], slow=slow)
