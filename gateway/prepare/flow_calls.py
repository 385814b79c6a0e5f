"""Makes jobs of calls to flows: a route by rules becomes a job of the model that it chooses, any
other flow a job that calls its members."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from contract.endpoints import VECTOR_ENDPOINTS
from contract.flows import (
    INPUT,
    MAX_CALLS,
    Cascade,
    Ensemble,
    FlowCall,
    Pipeline,
    Route,
    Step,
    deciding_members,
)
from contract.function_types import Submission
from contract.jobs import Endpoint, Job, default_seed
from contract.model_cards import ModelCard
from gateway.http.errors import UNSUPPORTED, ApiError, bad_request
from gateway.models.step_templates import TemplateFault
from gateway.models.tokens import ModelTokenizer
from gateway.prepare.conditions import Facts, choose_target, load_detector, needs_label
from gateway.prepare.generation import COMPLETION_TOKENS, count_given, count_prompts
from gateway.prepare.job_bodies import CallBody
from gateway.prepare.schemas import ChatBody, CompletionBody
from gateway.prepare.vector_bodies import InputBody, RerankBody, ScoreBody
from gateway.redis.broker import Broker
from gateway.state import Gateway

_ENDLESS = 2**31 - 1  # tokens

_LIMITS = ("max_completion_tokens", "max_tokens")


def deciding_cards(card: ModelCard, cards: Mapping[str, ModelCard]) -> list[ModelCard]:
    """Returns a flow's card for each model that may decide, with that model's tokenizer, vocabulary
    and context, the longest context first; for a model, its own card. A pipeline's steps make their
    own prompts, so its context has no limit."""
    if card.flow is None:
        return [card]
    definition = card.flow.definition
    names = dict.fromkeys(deciding_members(definition))
    known = (cards[name] for name in names if name in cards)
    deciding = [each for member in known for each in deciding_cards(member, cards)]
    if isinstance(definition, Pipeline):
        deciding = [replace(each, context_length=_ENDLESS) for each in deciding]
    own = {"name": card.name, "lanes": card.lanes, "capabilities": card.capabilities}
    found = [replace(each, **own, flow=card.flow) for each in deciding]
    return sorted(found, key=lambda each: -each.context_length) or [card]


class NumTokens(NamedTuple):
    """Tokens of one call or several."""

    prompt: int
    output: int


class Reservation:
    """Estimates how many tokens the calls of a flow may take, which its job reserves. Later prompts
    are not known; the bill counts the actual calls. `cards`: all models' by name. `body`: the
    call's, as JSON."""

    def __init__(self, gateway: Gateway, cards: Mapping[str, ModelCard], body: bytes) -> None:
        self._cards = cards
        self._settings = gateway.settings
        self._templates = gateway.step_templates
        self._body: dict[str, Any] = msgspec.json.decode(body)

    async def estimate(self, model: str, own: NumTokens) -> NumTokens:
        """Returns the tokens of all calls that a call of a model may make. `own`: those of the call
        itself, if it makes no others. Raises Busy."""
        card = self._cards.get(model)
        if card is None or card.flow is None:
            return own
        score = NumTokens(sum(own), 0)  # a scorer reads the prompt and the answer
        match card.flow.definition:
            case Route() as route:
                most = max([await self.estimate(to.model, own) for to in route.targets], key=sum)
                return _sum([most, *([NumTokens(own.prompt, 0)] if route.classifier else [])])
            case Cascade() as cascade:
                members = [await self.estimate(member.model, own) for member in cascade.members]
                return _sum([*members, *[score] * cascade.num_scored])
            case Ensemble() as ensemble:
                members = [await self.estimate(member, own) for member in ensemble.members]
                return _sum([*members, *[score] * ensemble.num_scored])
            case Pipeline() as pipeline:
                steps = pipeline.steps
                outputs = [NumTokens(own.prompt, await self._step_output(step)) for step in steps]
                return _sum(
                    [
                        await self.estimate(step.model, each)
                        for step, each in zip(steps, outputs, strict=True)
                    ]
                )

    async def _step_output(self, step: Step) -> int:
        """The maximum output of a step's call."""
        if step.endpoint in VECTOR_ENDPOINTS:
            return 0
        for name in _LIMITS:
            value = await self._value(step, name)
            if isinstance(value, int) and value > 0:
                return min(value, self._settings.max_output_tokens)
        is_chat = step.endpoint is Endpoint.CHAT
        return self._settings.default_output_tokens if is_chat else COMPLETION_TOKENS

    async def _value(self, step: Step, name: str) -> object:
        """A field of a step's body; None if it is not known before earlier steps have answered."""
        value = step.body.get(name)
        if not isinstance(value, str):
            return value
        alone = msgspec.structs.replace(step, body={name: value})
        try:
            rendered = await self._templates.render(alone, {INPUT: self._body})
            return rendered[name]
        except TemplateFault:
            return None


def _sum(parts: Iterable[NumTokens]) -> NumTokens:
    prompts, outputs = zip(*parts, strict=True)
    return NumTokens(sum(prompts), sum(outputs))


async def chosen_model(
    broker: Broker, card: ModelCard, body: CallBody, job: Job, submission: Submission
) -> str | None:
    """The model that a route by rules chooses for a call; None where a classifier must be asked
    first, and for other flows. Raises ApiError."""
    assert card.flow is not None
    route = card.flow.definition
    if not isinstance(route, Route):
        return None
    facts = await facts_of(broker, route, body, job.tenant, submission)
    if needs_label(route, facts):
        return None
    return choose_target(route, facts, split_point(job.id, body.model))


def check_tokens(deciding: Sequence[ModelCard], body: CallBody, job: Job | None = None) -> None:
    """Raises ApiError where the models that may decide have different tokenizers and the call has
    token ids, or the answer to its job would have."""
    if len({each.tokenizer_sha256 for each in deciding}) > 1:
        if job is None:
            _check_ids(body)
        else:
            _check_shown_tokens(job)


async def as_flow(
    gateway: Gateway, card: ModelCard, body: CallBody, job: Job, submission: Submission
) -> tuple[Job, Submission]:
    """The job as that of the card's flow, which reserves the tokens of all its calls. Raises
    ApiError."""
    _check_shape(job, card)
    assert card.flow is not None
    definition = card.flow.definition
    call = FlowCall(
        flow=card.flow,
        body=body.model_dump_json(exclude_unset=True, by_alias=True, exclude={"store"}).encode(),
        retention_s=submission.retention_s,
        needs_worker=submission.needs_worker,
        metadata=_metadata(body, submission),
        tokens_per_min=submission.limits.tokens_per_min,
        priority=submission.priority,
    )
    own = NumTokens(job.num_prompt_tokens, submission.max_output_tokens)
    reservation = Reservation(gateway, await gateway.broker.known.models(), call.body)
    all_calls = await reservation.estimate(card.name, own)
    expected = own._replace(output=job.params.expected_tokens * job.num_choices)
    if isinstance(definition, Pipeline):  # its steps have their own parameters
        expected = NumTokens(0, 0)
    elif expected.output:  # the caller expects this output of each call
        expected = await reservation.estimate(card.name, expected)
    params = replace(job.params, grammar="", expected_tokens=-(-expected.output // job.num_choices))
    # Its calls report what was cut off their prompts.
    job = replace(job, flow=call, params=params, num_cut_tokens=None)
    return job, replace(
        submission,
        max_output_tokens=all_calls.output,
        call_prompt_tokens=max(0, all_calls.prompt - own.prompt),
    )


def split_point(job_id: str, route: str) -> float:
    """Returns a number in [0, 1) that is always the same for this job and route, but differs if a
    route leads to another route."""
    return default_seed(f"{job_id}/route/{route}") / 2**63


async def facts_of(
    broker: Broker, route: Route, body: CallBody, tenant: str, submission: Submission
) -> Facts:
    """What the rules of a route may ask about a call. Tokens are counted only if a rule asks."""
    conditions = [rule.when for rule in route.rules]
    if any(w.languages for w in conditions):
        await _load_languages()
    num_tokens = 0
    if any(w.min_prompt_tokens > 0 or w.max_prompt_tokens is not None for w in conditions):
        cards = await broker.known.models()
        card = cards.get(route.rules[0].to[0].model)
        if card is not None:
            card = deciding_cards(card, cards)[0]
            tokenizer = await broker.known.tokenizer(card)
            num_tokens = await _count_tokens(tokenizer, card, body)
    return Facts(
        num_prompt_tokens=num_tokens,
        text=text_of(body),
        tenant=tenant,
        metadata=_metadata(body, submission),
    )


def _metadata(body: CallBody, submission: Submission) -> dict[str, str]:
    return {**(body.metadata or {}), **submission.metadata}


async def _load_languages() -> None:
    """Loads language detection in a thread. A gateway without models.yaml does so at the first call
    of a route that needs it."""
    try:
        await asyncio.to_thread(load_detector)
    except ModuleNotFoundError:
        message = "this gateway cannot detect languages: install batchway[languages]"
        raise ApiError(503, "languages_missing", message) from None


async def _count_tokens(tokenizer: ModelTokenizer, card: ModelCard, body: CallBody) -> int:
    """Counts the tokens of all prompts; for vectors, without the model's instructions."""
    if isinstance(body, ChatBody | CompletionBody):
        return await count_prompts(tokenizer, card, body)
    return await count_given(tokenizer, _inputs(body))


def _inputs(body: CallBody) -> Sequence[str | tuple[int, ...]]:
    """The prompts of a call that is no chat."""
    match body:
        case ChatBody():
            return ()
        case CompletionBody():
            return body.prompt
        case InputBody():
            return body.prompts
        case RerankBody():
            return *body.documents, body.query
        case ScoreBody():
            return *body.text_2, *body.text_1


def text_of(body: CallBody, prompt: int = -1) -> str:
    """The text of this prompt, the user's last message, or the query; '' if that is not text."""
    if isinstance(body, ChatBody):
        said = (message.text for message in reversed(body.messages) if message.role == "user")
        return next(said, "")
    text = _inputs(body)[prompt]
    return text if isinstance(text, str) else ""


def _check_shape(job: Job, card: ModelCard) -> None:
    """Raises ApiError if a pipeline, whose steps have their own parameters, cannot give the
    requested answer, or if a flow would score too many choices."""
    assert card.flow is not None
    definition = card.flow.definition
    if isinstance(definition, Cascade | Ensemble):
        num_scores = definition.num_scored * job.num_choices
        if num_scores > MAX_CALLS:
            message = f"n: {card.name!r} would score {num_scores} choices, over {MAX_CALLS}"
            raise bad_request(UNSUPPORTED, message, "n")
    if not isinstance(definition, Pipeline):
        return
    if job.pooling is None and job.num_choices > 1:
        message = f"n: the pipeline {card.name!r} answers with one choice for one prompt"
        raise bad_request(UNSUPPORTED, message, "n")
    if job.needs_tokenizer:
        param = "echo" if job.echo else "logprobs"
        message = f"{param}: the pipeline {card.name!r} does not tell tokens"
        raise bad_request(UNSUPPORTED, message, param)


def _check_ids(body: CallBody) -> None:
    """Raises ApiError for token ids, which mean something else to each model."""
    if any(not isinstance(each, str) for each in _inputs(body)):
        param = "prompt" if isinstance(body, CompletionBody) else "input"
        raise bad_request(UNSUPPORTED, f"{param}: {_message(body.model)}: send text", param)
    for param in ("logit_bias", "stop_token_ids"):
        if getattr(body, param, None):
            message = f"{param}: {_message(body.model)}, and each would read other tokens"
            raise bad_request(UNSUPPORTED, message, param)


def _check_shown_tokens(job: Job) -> None:
    """Raises ApiError if the answer would contain tokens, which differ between models."""
    if job.needs_tokenizer or job.return_token_ids:
        param = "return_token_ids" if job.return_token_ids else "logprobs"
        param = "echo" if job.echo else param
        raise bad_request(UNSUPPORTED, f"{param}: {_message(job.model)}", param)


def _message(model: str) -> str:
    return f"the models of {model!r} have different tokenizers"
