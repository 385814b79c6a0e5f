"""What a flow reads in its calls' outputs: texts, log probabilities, whole answers."""

import asyncio
from contextlib import suppress
from typing import Any

import msgspec

from contract.events import LogEntry, Tokens, ToolCallDelta
from contract.vector_answers import VectorAnswer
from gateway.flows.calls import Outcome
from gateway.openai.answers import Answer, needs_tokenizer
from gateway.openai.tools import whole_calls
from gateway.redis.broker import Broker


def texts_of(outcome: Outcome) -> list[str]:
    """The text of each choice."""
    assert outcome.job is not None
    texts: list[list[str]] = [[] for _ in range(outcome.job.num_choices)]
    for event in outcome.events:
        for delta in event.deltas if isinstance(event, Tokens) else ():
            texts[delta.choice].append(delta.text)
    return ["".join(parts) for parts in texts]


def answers_of(outcome: Outcome) -> list[str]:
    """The text of each choice, and its tool calls; equal arguments in equal form."""
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
    """The log probabilities of each choice's tokens, without those of its reasoning, which comes
    first."""
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


async def answer_of(broker: Broker, outcome: Outcome) -> dict[str, Any]:
    """The answer as a caller would get it, as plain values. Raises BatchwayError."""
    job, run = outcome.job, outcome.run
    assert job is not None
    entries = [LogEntry(number, "", event) for number, event in enumerate(outcome.events, 1)]
    card = (await broker.known.models()).get(job.model)

    def built(answer: Answer | VectorAnswer) -> dict[str, Any]:
        for entry in entries:
            answer.add(entry)
        whole = answer.build(run.prompt_tokens, run.output_tokens)
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(whole))
        return plain

    if job.pooling is not None:
        labels = () if card is None or card.pooling is None else card.pooling.labels
        return await asyncio.to_thread(built, VectorAnswer(job, labels))
    tokenizer = None
    if needs_tokenizer(job) and card is not None:
        tokenizer = await broker.known.tokenizer(card)
    return built(Answer(job, tokenizer))
