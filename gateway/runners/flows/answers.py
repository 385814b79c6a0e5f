"""What a flow reads in its calls' outputs: texts, log probabilities, whole answers."""

import asyncio
from contextlib import suppress
from typing import Any

import msgspec

from contract.events import LogEntry, Tokens, ToolCallDelta
from gateway.follow.tool_calls import whole_calls
from gateway.follow.whole_answers import answer_to, built
from gateway.runners.flows.calls import Outcome
from gateway.state import Gateway


def texts_of(outcome: Outcome) -> list[str]:
    """The text of each choice."""
    assert outcome.job is not None
    texts: list[list[str]] = [[] for _ in range(outcome.job.num_choices)]
    for event in outcome.events:
        for delta in event.deltas if isinstance(event, Tokens) else ():
            texts[delta.choice].append(delta.text)
    return ["".join(parts) for parts in texts]


def answers_of(outcome: Outcome) -> list[str]:
    """The text of each choice, with its tool calls; equal arguments have equal form."""
    assert outcome.job is not None
    deltas: list[list[ToolCallDelta]] = [[] for _ in range(outcome.job.num_choices)]
    for event in outcome.events:
        for delta in event.deltas if isinstance(event, Tokens) else ():
            deltas[delta.choice] += delta.tool_calls
    calls = (whole_calls(outcome.job, choice, each) for choice, each in enumerate(deltas))
    return [
        "\n".join([text, *(_plain_call(**each["function"]) for each in called)])
        for text, called in zip(texts_of(outcome), calls, strict=True)
    ]


def _plain_call(name: str, arguments: str) -> str:
    with suppress(msgspec.DecodeError, RecursionError):
        arguments = msgspec.json.encode(msgspec.json.decode(arguments), order="sorted").decode()
    return f"{name}({arguments})"


def logprobs_of(outcome: Outcome) -> list[list[float]]:
    """The log probabilities of each choice's tokens, without those of the reasoning before them."""
    assert outcome.job is not None
    found: list[list[float]] = [[] for _ in range(outcome.job.num_choices)]
    for event in outcome.events:
        for delta in event.deltas if isinstance(event, Tokens) else ():
            answer = (delta.logprobs or ())[delta.num_reasoning :]
            found[delta.choice] += [item.logprob for item in answer]
    return found


def vectors_of(outcome: Outcome) -> list[bytes]:
    """The vector of each input."""
    found: dict[int, bytes] = {}
    for event in outcome.events:
        for delta in event.deltas if isinstance(event, Tokens) else ():
            if delta.vector:
                found[delta.choice] = delta.vector
    return [found[choice] for choice in sorted(found)]


async def answer_of(gateway: Gateway, outcome: Outcome) -> dict[str, Any]:
    """Returns the answer as a caller would get it, as plain values. Raises BatchwayError."""
    job, run = outcome.job, outcome.run
    assert job is not None
    answer = await answer_to(gateway, job)
    for number, event in enumerate(outcome.events, 1):
        answer.add(LogEntry(number, "", event))
    whole = await built(answer, run.prompt_tokens, run.output_tokens)
    return await asyncio.to_thread(_plain, whole)  # there may be millions of numbers


def _plain(whole: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(whole))
    return plain
