"""Bodies of steps are made in a process of their own, which a caller's values cannot stop."""

import asyncio
import contextlib
import copy
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from contract.flows import Step
from contract.jobs import Endpoint
from gateway.child_process import ChildLimits
from gateway.models.step_templates import StepTemplates, TemplateFault
from tests.gateway.flows.conftest import FLOWS, chat

pytestmark = pytest.mark.anyio

LOOPS = (
    "{% for a in input.d %}{% for b in input.d %}{% for c in input.d %}{% if a == 1 %}x{% endif %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
LIMITS = ChildLimits(cpu_s=1, wall_s=60.0, long_s=60.0)  # the machine may be busy
VALUES: dict[str, Any] = {"input": {"d": ["what a long text"] * 2_048, "big": 2**70, "x": "é😀"}}


def step(**body: Any) -> Step:
    return Step(name="ask", model="m", endpoint=Endpoint.CHAT, body=body)


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
    pipe = next(model for model in FLOWS["models"] if model["name"] == "pipe")
    text = json.dumps({"models": [pipe, _slow(pipe)]})
    path = tmp_path / "models.yaml"
    path.write_text(text)
    return path


def _slow(pipe: Any) -> Any:
    slow = copy.deepcopy(pipe) | {"name": "slow"}
    slow["pipeline"]["steps"][0]["body"]["prompt"] = LOOPS.replace("input.d", "input.documents")
    return slow
