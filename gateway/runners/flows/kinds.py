"""What each kind of flow calls, and which output is its answer: by its texts, how sure a cascade's
member is of it, and how an ensemble makes one answer of its members' answers.
"""

import asyncio
import math
import sys
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from contract.answers import whole_calls
from contract.errors import ErrorCode
from contract.events import ChoiceDelta, LogEntry, LogEvent, Prompt, Tokens, ToolCallDelta
from contract.flows import INPUT, Cascade, Confidence, Ensemble, Pipeline, Route
from contract.jobs import Endpoint, FinishReason, Job, default_seed
from gateway.follow.streams import answer_to, built
from gateway.models.step_templates import StepTemplates, TemplateFault
from gateway.prepare.conditions import Facts, choose_target
from gateway.prepare.flow_calls import split_point, text_of
from gateway.prepare.job_bodies import CallBody
from gateway.prepare.schemas import MAX_CHOICES_IN_ALL, CompletionBody
from gateway.runners.flows.calls import (
    CallOutcome,
    Execution,
    MemberFailed,
    ModelCall,
    Output,
    parse_body,
)
from gateway.state import Gateway

_SCORER = MAX_CHOICES_IN_ALL  # numbers of calls to scorers that each member may use


def texts_of(outcome: CallOutcome) -> list[str]:
    """The text of each choice."""
    texts = [""] * outcome.num_choices
    for delta in outcome.deltas():
        texts[delta.choice] += delta.text
    return texts


def answers_of(outcome: CallOutcome) -> list[str]:
    """The text of each choice, with its tool calls; equal arguments have equal form."""
    assert outcome.job is not None
    deltas: list[list[ToolCallDelta]] = [[] for _ in range(outcome.num_choices)]
    for delta in outcome.deltas():
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


def logprobs_of(outcome: CallOutcome) -> list[list[float]]:
    """The log probabilities of each choice's tokens, without those of the reasoning before them."""
    found: list[list[float]] = [[] for _ in range(outcome.num_choices)]
    for delta in outcome.deltas():
        answer = (delta.logprobs or ())[delta.num_reasoning :]
        found[delta.choice] += [item.logprob for item in answer]
    return found


def vectors_of(outcome: CallOutcome) -> list[bytes]:
    """The vector of each input."""
    found = {delta.choice: delta.vector for delta in outcome.deltas() if delta.vector}
    return [found[choice] for choice in sorted(found)]


async def answer_of(gateway: Gateway, outcome: CallOutcome) -> dict[str, Any]:
    """Returns the answer as a caller would get it, as plain values. Raises BatchwayError."""
    job, run = outcome.job, outcome.run
    assert job is not None
    answer = await answer_to(gateway, job)
    for number, event in enumerate(outcome.events, 1):
        answer.add(LogEntry(number, "", event))
    whole = await built(answer, run.prompt_tokens, run.output_tokens, run.cached_tokens)

    def plain() -> dict[str, Any]:
        return msgspec.json.decode(msgspec.json.encode(whole), type=dict[str, Any])

    return await asyncio.to_thread(plain)  # there may be millions of numbers


def confidence(kind: Confidence, logprobs: Sequence[float], text: str) -> float:
    """Returns how sure the member is, from 0 to 1. `logprobs` (nats): of the answer's tokens;
    `text`: the answer. An answer without tokens, or without the field as a number from 0 to 1,
    gives 0. Not for kind `scorer`."""
    assert kind.by != "scorer"
    if kind.by == "field":
        return _field(kind.field, text)
    if not logprobs:
        return 0.0
    if kind.by == "mean_logprob":
        value = sum(logprobs) / len(logprobs)  # not fsum: it raises where a sum overflows
    else:  # the lower of the two neighbours, so that a single bad token counts
        value = sorted(logprobs)[math.floor(kind.quantile * (len(logprobs) - 1))]
    return 0.0 if math.isnan(value) else math.exp(min(value, 0.0))


def _field(name: str, text: str) -> float:
    value: object = None
    with suppress(msgspec.DecodeError, RecursionError):
        answer = msgspec.json.decode(text)
        value = answer.get(name) if isinstance(answer, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        return 0.0
    return float(value)


def vote(answers: Sequence[str]) -> int:
    """The index of the most frequent answer; of equals, the earliest. Answers that differ only in
    white space are the same. Raises ValueError if there is none."""
    words = [" ".join(answer.split()) for answer in answers]
    counts = Counter(words)
    return max(range(len(words)), key=lambda index: counts[words[index]])


def best(scores: Sequence[float]) -> int:
    """The index of the highest score; of equals, the earliest. NaN is lower than any number. Raises
    ValueError if there is none."""
    return max(
        range(len(scores)),
        key=lambda index: scores[index] if scores[index] == scores[index] else float("-inf"),
    )


def of_winners(
    outputs: Sequence[Sequence[Prompt | Tokens]], winners: Sequence[int], num_choices: int
) -> list[Prompt | Tokens]:
    """Joins an output in which each choice is its winner's. `winners`: indices in `outputs`, by
    choice. A prompt, which has `num_choices`, has the log probabilities of its first winner."""
    prompts, tokens = list[Prompt | Tokens](), list[Prompt | Tokens]()
    for index, output in enumerate(outputs):
        for event in output:
            if isinstance(event, Prompt):
                prompts += [event] if winners[event.prompt * num_choices] == index else []
                continue
            deltas = tuple(each for each in event.deltas if winners[each.choice] == index)
            tokens += [Tokens(deltas)] if deltas else []
    return prompts + tokens


def mean_output(outputs: Sequence[Sequence[bytes]]) -> Tokens:
    """The means of vectors, by input. Raises ValueError if they differ in number or length."""
    means = [mean(each) for each in zip(*outputs, strict=True)]
    deltas = (
        ChoiceDelta(i, 0, (), "", FinishReason.STOP, vector=vector)
        for i, vector in enumerate(means)
    )
    return Tokens(tuple(deltas))


def mean(vectors: Sequence[bytes]) -> bytes:
    """The mean of vectors of one length, element by element, not normalised. Vectors are of float32
    in little-endian order, as the result. Raises ValueError if there is none, or lengths differ.
    """
    if not vectors or len({len(vector) for vector in vectors}) > 1:
        raise ValueError("the members' vectors differ in length")
    columns = zip(*(_numbers(vector) for vector in vectors), strict=True)
    return _swapped(array("f", (sum(column) / len(vectors) for column in columns))).tobytes()


def _numbers(vector: bytes) -> "array[float]":
    numbers = array("f")
    numbers.frombytes(vector)  # ValueError, unless it is a multiple of four bytes
    return _swapped(numbers)


def _swapped(numbers: "array[float]") -> "array[float]":
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def events_of(execution: Execution) -> AsyncGenerator[LogEvent]:
    """The events of a flow's job. Raises MemberFailed, and BatchwayError if a retry may help."""
    assert execution.parent.flow is not None
    match execution.parent.flow.flow.definition:
        case Route() as definition:
            return _route(execution, definition)
        case Cascade() as definition:
            return _cascade(execution, definition)
        case Ensemble() as definition:
            return _ensemble(execution, definition)
        case Pipeline() as definition:
            return _pipeline(execution, definition)


async def first_calls(parent: Job, templates: StepTemplates) -> list[ModelCall]:
    """Returns the calls with which a flow may begin: a cascade with the first that can take the
    call, an ensemble with all of them. Raises MemberFailed, Busy."""
    assert parent.flow is not None
    match parent.flow.flow.definition:
        case Route() as definition:
            return [_classifying(parent, definition)]
        case Cascade() as definition:
            return [_cascading(parent, definition, i) for i in range(len(definition.members))]
        case Ensemble() as definition:
            return _of_members(parent, definition)
        case Pipeline() as definition:
            return [await _step(templates, parent, definition, 0, {INPUT: body_of(parent)})]


def _endpoint(parent: Job) -> Endpoint:
    """The endpoint of `body_of`: a response is a chat to the members."""
    return Endpoint.CHAT if parent.endpoint is Endpoint.RESPONSES else parent.endpoint


def body_of(parent: Job) -> dict[str, Any]:
    """The body of a flow's call, as its caller gave it."""
    assert parent.flow is not None
    body: dict[str, Any] = msgspec.json.decode(parent.flow.body)
    return body


def parsed_body(parent: Job) -> CallBody:
    """The same body, parsed as the endpoint's request."""
    return parse_body(_endpoint(parent), body_of(parent))


def _member_body(parent: Job) -> dict[str, Any]:
    """The body that each member gets: without parameters for the flow."""
    alone = {"stream", "stream_options", "on_disconnect", "service_tier", "metadata"}
    if parent.endpoint is not Endpoint.RERANK:
        alone.add("documents")
    return {name: value for name, value in body_of(parent).items() if name not in alone}


def _call(
    parent: Job, number: int, model: str, *, can_fail: bool = False, **more: object
) -> ModelCall:
    body = {**_member_body(parent), **more}
    return ModelCall(number, model, _endpoint(parent), body, can_fail=can_fail)


# --- route ------------------------------------------------------------------------------------


def _classifying(parent: Job, route: Route) -> ModelCall:
    body = {"input": text_of(parsed_body(parent)) or " "}
    return ModelCall(0, route.classifier, Endpoint.CLASSIFY, body)


def chosen_call(parent: Job, route: Route, label: str | None) -> ModelCall:
    """The call of the target. `label`: the classifier's; None if it could not read the text."""
    assert parent.flow is not None
    facts = Facts(
        num_prompt_tokens=parent.num_prompt_tokens,
        text=text_of(parsed_body(parent)),
        tenant=parent.tenant,
        metadata=parent.flow.metadata,
        label=label,
    )
    target = choose_target(route, facts, split_point(parent.id, parent.model))
    return _call(parent, 1, target)


async def _route(execution: Execution, route: Route) -> AsyncGenerator[LogEvent]:
    classifying = _classifying(execution.parent, route)
    yield execution.log_begun(classifying)
    outcome = await execution.run_call(classifying)
    label = None
    if outcome.has_succeeded:
        answer = await answer_of(execution.calls.gateway, outcome)
        label = str(answer["data"][0]["label"])
    elif outcome.run.code != ErrorCode.PROMPT_TOO_LONG:
        raise MemberFailed.of(outcome)
    chosen = chosen_call(execution.parent, route, label)
    yield execution.log_begun(chosen)
    async for event in execution.stream_call(chosen):
        yield event


# --- cascade ----------------------------------------------------------------------------------


def _cascading(parent: Job, cascade: Cascade, index: int) -> ModelCall:
    model, is_last = cascade.members[index].model, index == len(cascade.members) - 1
    if (
        is_last
        or not cascade.confidence.by.endswith("logprob")
        or parent.params.logprobs is not None
    ):
        return _call(parent, index, model, can_fail=not is_last)
    asked = True if _endpoint(parent) is Endpoint.CHAT else 0
    return _call(parent, index, model, can_fail=True, logprobs=asked)


async def _cascade(execution: Execution, cascade: Cascade) -> AsyncGenerator[LogEvent]:
    *earlier, last = range(len(cascade.members))
    for index in earlier:
        call = _cascading(execution.parent, cascade, index)
        yield execution.log_begun(call)
        outcome = await execution.run_call(call)
        if not outcome.has_succeeded:
            continue
        if cascade.confidence.by == "scorer":
            scoring = _scoring(execution.parent, index, cascade.confidence.scorer, outcome)
            yield execution.log_begun(*scoring)
            scores = [await _score(execution, each) for each in await execution.run_calls(scoring)]
            sure = max(0.0, min(scores))
        else:
            sure = _confidence(cascade.confidence, outcome)
        if sure >= (cascade.members[index].threshold or 0.0):
            for event in execution.visible(outcome.events):
                yield event
            return
    call = _cascading(execution.parent, cascade, last)
    yield execution.log_begun(call)
    async for event in execution.stream_call(call):
        yield event


def _confidence(kind: Confidence, outcome: CallOutcome) -> float:
    """The confidence of the choice of which the member is least sure."""
    choices = zip(logprobs_of(outcome), texts_of(outcome), strict=True)
    return min(confidence(kind, logprobs, text) for logprobs, text in choices)


def _scoring(parent: Job, index: int, scorer: str, outcome: CallOutcome) -> list[ModelCall]:
    """A call of the scorer for each choice of an answer, with the choice's prompt."""
    body, answers = parsed_body(parent), answers_of(outcome)
    num_each = len(answers) // (len(body.prompt) if isinstance(body, CompletionBody) else 1)
    bodies = [score_body(text_of(body, i // num_each), text) for i, text in enumerate(answers)]
    first = _SCORER * (index + 1)
    return [ModelCall(first + i, scorer, Endpoint.SCORE, each) for i, each in enumerate(bodies)]


def score_body(prompt: str, answer: str) -> dict[str, object]:
    """Asks a scorer how well an answer fits. A scorer refuses an empty text."""
    return {"text_1": prompt or " ", "text_2": answer or " "}


async def _score(execution: Execution, outcome: CallOutcome) -> float:
    """The score of an answer; -inf if the scorer failed."""
    if not outcome.has_succeeded:
        return -math.inf
    return float((await answer_of(execution.calls.gateway, outcome))["data"][0]["score"])


# --- ensemble ---------------------------------------------------------------------------------


def _of_members(parent: Job, ensemble: Ensemble) -> list[ModelCall]:
    """The calls of an ensemble. Each has its own seed: a model may be a member several times."""
    seed = body_of(parent).get("seed")
    calls = [_call(parent, i, model, can_fail=True) for i, model in enumerate(ensemble.members)]
    if seed is None:
        return calls
    return [calls[0]] + [
        replace(call, body={**call.body, "seed": default_seed(f"{seed}/{call.number}")})
        for call in calls[1:]
    ]


async def _ensemble(execution: Execution, ensemble: Ensemble) -> AsyncGenerator[LogEvent]:
    parent = execution.parent
    calls = _of_members(parent, ensemble)
    yield execution.log_begun(*calls)
    outcomes = await execution.run_calls(calls)
    answered = [outcome for outcome in outcomes if outcome.has_succeeded]
    if not answered:
        raise MemberFailed.of(outcomes[0])
    scored = list[CallOutcome]()
    if ensemble.scorer:
        scoring = [
            call
            for i, outcome in enumerate(answered)
            for call in _scoring(parent, i, ensemble.scorer, outcome)
        ]
        yield execution.log_begun(*scoring)
        scored = await execution.run_calls(scoring)
        if not any(outcome.has_succeeded for outcome in scored):
            raise MemberFailed.of(scored[0])
    if not all(outcome.has_succeeded for outcome in (*outcomes, *scored)):
        yield execution.take_unlogged()  # a call that was refused is not made again
    events: Sequence[Output]
    if ensemble.combine == "mean":
        try:
            events = [mean_output([vectors_of(outcome) for outcome in answered])]
        except ValueError as exc:
            message = f"{answered[0].run.model}: {exc}"
            raise MemberFailed(ErrorCode.ENGINE_ERROR, message) from None
    else:
        if ensemble.combine == "vote":
            winners = [vote(each) for each in zip(*map(answers_of, answered), strict=True)]
        else:
            scores, num = [await _score(execution, each) for each in scored], parent.num_choices
            winners = [best(scores[choice::num]) for choice in range(num)]
        outputs = [outcome.events for outcome in answered]
        events = of_winners(outputs, winners, parent.params.n)
    for event in execution.visible(events):
        yield event


# --- pipeline ---------------------------------------------------------------------------------


async def _step(
    templates: StepTemplates,
    parent: Job,
    pipeline: Pipeline,
    index: int,
    values: Mapping[str, Any],
) -> ModelCall:
    """Returns the call of a step. Raises MemberFailed, Busy."""
    step = pipeline.steps[index]
    endpoint = Endpoint(step.endpoint)
    try:
        body = await templates.render(step, values)
    except TemplateFault as fault:
        message = f"{step.model}: {fault}"
        raise MemberFailed(ErrorCode.BAD_PARAMETER, message) from None
    return ModelCall(index, step.model, endpoint, body, step.name)


async def _pipeline(execution: Execution, pipeline: Pipeline) -> AsyncGenerator[LogEvent]:
    *earlier, last = range(len(pipeline.steps))
    parent, stages = execution.parent, execution.stages
    templates = execution.calls.gateway.step_templates
    values: dict[str, Any] = {INPUT: body_of(parent)}
    staging = stages.staged_job(parent.tenant, parent.weight) if stages else nullcontext()
    with staging as staged_job:
        for index in earlier:
            call = await _step(templates, parent, pipeline, index, values)
            yield execution.log_begun(call)
            if staged_job is not None:
                await staged_job.wait_turn(index, execution.calls.lane)
            outcome = await execution.run_call(call)
            if staged_job is not None:
                staged_job.ended()
            if not outcome.has_succeeded:
                raise MemberFailed.of(outcome)
            values[call.name] = await answer_of(execution.calls.gateway, outcome)
        call = await _step(templates, parent, pipeline, last, values)
        yield execution.log_begun(call)
        if staged_job is not None:
            await staged_job.wait_turn(last, execution.calls.lane)
        async for event in execution.stream_call(call):
            yield event
