"""Ensembles choose for each prompt, by texts and tool calls, and log refusals before the answer."""

from collections.abc import Sequence

import httpx
import pytest

from contract.events import ChoiceDelta, Members, Prompt, Tokens, ToolCallDelta
from contract.functions import Functions
from contract.jobs import FinishReason, Job, JobStatus
from tests.fakes import encode_text
from tests.gateway.fake_worker import Script, says
from tests.gateway.flows.conftest import Fleet, answer_of, chat
from tests.gateway.flows.model_files import CHAT

pytestmark = pytest.mark.anyio


def answers(*texts: str) -> Script:
    """A text for each choice."""

    def script(job: Job) -> Sequence[Prompt | Tokens]:
        return [
            Tokens((ChoiceDelta(choice, 0, encode_text(text), text, FinishReason.STOP),))
            for choice, text in enumerate(texts)
        ]

    return script


def calls_tool(name: str, arguments: str) -> Script:
    def script(job: Job) -> Sequence[Prompt | Tokens]:
        call = ToolCallDelta(0, name, arguments)
        token_ids = encode_text(name)
        return [
            Tokens((ChoiceDelta(0, 0, token_ids, "", FinishReason.TOOL_CALLS, tool_calls=(call,)),))
        ]

    return script


async def test_a_vote_is_held_for_each_prompt(flows: httpx.AsyncClient, fleet: Fleet) -> None:
    """As if each had been sent alone: two members agree on each, but no two on both."""
    fleet.say("small", answers("a", "b"))
    fleet.say("large", answers("a", "c"))
    fleet.say("third", answers("d", "c"))
    body = {"model": "vote", "prompt": ["first", "second"]}
    answer = await flows.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert [choice["text"] for choice in answer.json()["choices"]] == ["a", "c"]


async def test_a_vote_counts_tool_calls(flows: httpx.AsyncClient, fleet: Fleet) -> None:
    """Their texts are all empty. Arguments are compared as JSON."""
    fleet.say("small", calls_tool("wait", "{}"))
    fleet.say("large", calls_tool("add", '{"a": 1,"b":2}'))
    fleet.say("third", calls_tool("add", '{"b":2,"a":1}'))
    tools = [{"type": "function", "function": {"name": name}} for name in ("wait", "add")]
    answer = await flows.post(CHAT, json=chat("vote", tools=tools))
    assert answer.status_code == 200, answer.text
    [call] = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "add"


async def test_a_refused_member_is_logged_before_the_answer(
    flows: httpx.AsyncClient, fleet: Fleet, functions: Functions
) -> None:
    """So that a run that begins again does not ask it, and chooses the same answer."""
    fleet.say("small", says("yes"))
    await fleet.client.delete(fleet.keys.of("workers", "third"))
    answer = await flows.post(CHAT, json=chat("vote"))
    assert answer_of(answer) == "yes"
    job_id = answer.headers["x-job-id"]
    _, entries = await functions.read(job_id, "default", max_events=100) or (None, [])
    events = [entry.event for entry in entries]
    first_output = next(i for i, event in enumerate(events) if isinstance(event, Tokens))
    failed = [
        run.model
        for event in events[:first_output]
        if isinstance(event, Members)
        for run in event.runs
        if run.status is JobStatus.FAILED
    ]
    assert failed == ["third"]
