"""What each kind of flow calls, and which output is its answer."""

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
from msgspec.structs import replace

from contract.errors import ErrorCode
from contract.events import ChoiceDelta, LogEvent, MemberRun, Tokens
from contract.flows import INPUT, Cascade, Confidence, Ensemble, Pipeline, Route
from contract.jobs import Endpoint, FinishReason, Job, JobStatus, default_seed
from gateway.flows import combine
from gateway.flows.answers import answer_of, logprobs_of, texts_of, vectors_of
from gateway.flows.calls import Call, MemberFailed, Outcome, parse_body
from gateway.flows.conditions import Facts, choose_target
from gateway.flows.confidence import confidence
from gateway.flows.entry import draw_of, text_of
from gateway.flows.execution import Execution, Output
from gateway.openai.job_bodies import CallBody
from gateway.openai.schemas import MAX_CHOICES_IN_ALL

_SCORER = MAX_CHOICES_IN_ALL  # numbers of calls to scorers: so many for each member


def events_of(execution: Execution) -> AsyncGenerator[LogEvent]:
    """The events of a flow's job. Raises MemberFailed, and BatchwayError where a retry may help."""
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


def first_calls(parent: Job) -> list[Call]:
    """The calls with which a flow begins. Raises MemberFailed."""
    assert parent.flow is not None
    match parent.flow.flow.definition:
        case Route() as definition:
            return [_classifying(parent, definition)]
        case Cascade() as definition:
            return [_cascading(parent, definition, 0)]
        case Ensemble() as definition:
            return _of_members(parent, definition)
        case Pipeline() as definition:
            return [_step(parent, definition, 0, {INPUT: body_of(parent)})]


def _endpoint(parent: Job) -> Endpoint:
    """The endpoint of `body_of`: a response is a chat to the members."""
    return Endpoint.CHAT if parent.endpoint is Endpoint.RESPONSES else parent.endpoint


def body_of(parent: Job) -> dict[str, Any]:
    """The body of a flow's call, as its caller gave it."""
    assert parent.flow is not None
    body: dict[str, Any] = msgspec.json.decode(parent.flow.body)
    return body


def parsed_body(parent: Job) -> CallBody:
    """The same as the endpoint's model of a body."""
    return parse_body(_endpoint(parent), body_of(parent))


def _member_body(parent: Job) -> dict[str, Any]:
    """The body as each member gets it: without what concerns the flow alone."""
    alone = {"stream", "stream_options", "on_disconnect", "service_tier", "metadata"}
    if parent.endpoint is not Endpoint.RERANK:
        alone.add("documents")
    return {name: value for name, value in body_of(parent).items() if name not in alone}


def _call(parent: Job, number: int, model: str, *, can_fail: bool = False, **more: object) -> Call:
    body = {**_member_body(parent), **more}
    return Call(number, model, _endpoint(parent), body, can_fail=can_fail)


# --- route ------------------------------------------------------------------------------------


def _classifying(parent: Job, route: Route) -> Call:
    body = {"input": _facts(parent).text or " "}
    return Call(0, route.classifier, Endpoint.CLASSIFY, body)


def _facts(parent: Job, label: str | None = None) -> Facts:
    assert parent.flow is not None
    body = parsed_body(parent)
    return Facts(
        num_prompt_tokens=parent.num_prompt_tokens,
        text=text_of(body),
        tenant=parent.tenant,
        metadata={**(body.metadata or {}), **parent.flow.metadata},
        label=label,
    )


async def _route(execution: Execution, route: Route) -> AsyncGenerator[LogEvent]:
    classifying = _classifying(execution.parent, route)
    yield execution.log_begun(classifying)
    outcome = await execution.run_call(classifying)
    if not outcome.has_succeeded:
        raise MemberFailed(outcome)
    answer = await answer_of(execution.calls.broker, outcome)
    parent = execution.parent
    facts = _facts(parent, str(answer["data"][0]["label"]))
    target = choose_target(route, facts, draw_of(parent.id, parent.model))
    chosen = _call(parent, 1, target)
    yield execution.log_begun(chosen)
    async for event in execution.stream_call(chosen):
        yield event


# --- cascade ----------------------------------------------------------------------------------


def _cascading(parent: Job, cascade: Cascade, index: int) -> Call:
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
            sure = min((score for score in scores if score is not None), default=0.0)
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


def _confidence(kind: Confidence, outcome: Outcome) -> float:
    """That of the choice of which the member is least sure."""
    choices = zip(logprobs_of(outcome), texts_of(outcome), strict=True)
    return min(confidence(kind, logprobs, text) for logprobs, text in choices)


def _scoring(parent: Job, index: int, scorer: str, outcome: Outcome) -> list[Call]:
    """A call for each choice of an answer."""
    prompt = text_of(parsed_body(parent))
    first = _SCORER * (index + 1)
    return [
        Call(
            first + number,
            scorer,
            Endpoint.SCORE,
            score_body(prompt, text),
        )
        for number, text in enumerate(texts_of(outcome))
    ]


def score_body(prompt: str, answer: str) -> dict[str, object]:
    """Asks a scorer how well an answer fits. A scorer refuses an empty text."""
    return {"text_1": prompt or " ", "text_2": answer or " "}


async def _score(execution: Execution, outcome: Outcome) -> float | None:
    if not outcome.has_succeeded:
        return None
    return float((await answer_of(execution.calls.broker, outcome))["data"][0]["score"])


# --- ensemble ---------------------------------------------------------------------------------


def _of_members(parent: Job, ensemble: Ensemble) -> list[Call]:
    """Each has a seed of its own: a model may be a member several times."""
    seed = body_of(parent).get("seed")
    calls = [_call(parent, i, model, can_fail=True) for i, model in enumerate(ensemble.members)]
    if seed is None:
        return calls
    return [calls[0]] + [
        replace(call, body={**call.body, "seed": default_seed(f"{seed}/{call.number}")})
        for call in calls[1:]
    ]


async def _ensemble(execution: Execution, ensemble: Ensemble) -> AsyncGenerator[LogEvent]:
    calls = _of_members(execution.parent, ensemble)
    yield execution.log_begun(*calls)
    outcomes = await execution.run_calls(calls)
    answered = [outcome for outcome in outcomes if outcome.has_succeeded]
    if not answered:
        raise MemberFailed(outcomes[0])
    events: Sequence[Output]
    match ensemble.combine:
        case "mean":
            events = [_mean(answered)]
        case "vote":
            index = combine.vote(["\0".join(texts_of(outcome)) for outcome in answered])
            events = answered[index].events
        case "best-by-score":
            scoring = [
                call
                for i, outcome in enumerate(answered)
                for call in _scoring(execution.parent, i, ensemble.scorer, outcome)
            ]
            yield execution.log_begun(*scoring)
            scored = await execution.run_calls(scoring)
            if not any(outcome.has_succeeded for outcome in scored):
                raise MemberFailed(scored[0])
            scores = [await _score(execution, outcome) for outcome in scored]
            num = execution.parent.num_choices
            lowest = [
                min((s if s is not None else -math.inf) for s in scores[i * num : (i + 1) * num])
                for i in range(len(answered))
            ]
            events = answered[combine.best(lowest)].events
    for event in execution.visible(events):
        yield event


def _mean(outcomes: Sequence[Outcome]) -> Tokens:
    """The mean of the vectors of each input. Raises MemberFailed."""
    vectors = [vectors_of(outcome) for outcome in outcomes]
    try:
        means = [combine.mean(each) for each in zip(*vectors, strict=True)]
    except ValueError as exc:
        run = replace(outcomes[0].run, code=ErrorCode.ENGINE_ERROR)
        raise MemberFailed(Outcome(run, message=str(exc))) from None
    deltas = (
        ChoiceDelta(i, 0, (), "", FinishReason.STOP, vector=vector)
        for i, vector in enumerate(means)
    )
    return Tokens(tuple(deltas))


# --- pipeline ---------------------------------------------------------------------------------


def _step(parent: Job, pipeline: Pipeline, index: int, values: Mapping[str, Any]) -> Call:
    """Raises MemberFailed."""
    # Only here: most gateways render no templates of their own, and a cold start need not wait.
    from gateway.flows.templates import TemplateFault, render

    step = pipeline.steps[index]
    endpoint = Endpoint(step.endpoint)
    try:
        body = render(step, values)
    except TemplateFault as fault:
        run = MemberRun(step.model, "", JobStatus.FAILED, code=ErrorCode.BAD_PARAMETER)
        raise MemberFailed(Outcome(run, message=str(fault))) from None
    return Call(index, step.model, endpoint, body, step.name)


async def _pipeline(execution: Execution, pipeline: Pipeline) -> AsyncGenerator[LogEvent]:
    values: dict[str, Any] = {INPUT: body_of(execution.parent)}
    *earlier, last = range(len(pipeline.steps))
    with execution.stages.staged_job() if execution.stages else nullcontext() as staged_job:
        for index in earlier:
            call = _step(execution.parent, pipeline, index, values)
            yield execution.log_begun(call)
            if staged_job is not None:
                await staged_job.wait_turn(index)
            outcome = await execution.run_call(call)
            if staged_job is not None:
                staged_job.ended()
            if not outcome.has_succeeded:
                raise MemberFailed(outcome)
            values[call.name] = await answer_of(execution.calls.broker, outcome)
        call = _step(execution.parent, pipeline, last, values)
        yield execution.log_begun(call)
        if staged_job is not None:
            await staged_job.wait_turn(last)
        async for event in execution.stream_call(call):
            yield event
