"""Reads `models.yaml`, models that consist of others, checks by the members' cards that they can do
what a flow asks of them, and makes the flow's card.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from contract.flows import (
    INPUT,
    MAX_CALLS,
    Cascade,
    Definition,
    Ensemble,
    Flow,
    Pipeline,
    Route,
    deciding_members,
)
from contract.jobs import Endpoint, weakest_resume
from contract.model_cards import Capabilities, ModelCard, PoolingCard
from contract.yaml_files import YamlFault, load_file
from gateway.child import Refused
from gateway.models.step_bodies import check_templates
from gateway.prepare.conditions import check_languages, check_pattern

_GENERATIVE = (Endpoint.CHAT, Endpoint.COMPLETIONS)
_COMBINABLE = {
    "vote": _GENERATIVE,
    "best-by-score": _GENERATIVE,
    "mean": (Endpoint.EMBEDDINGS, Endpoint.SCORE, Endpoint.RERANK, Endpoint.CLASSIFY),
}


class FlowError(Exception):
    """A flow's definition is wrong. The message names the file, the place and the fault."""


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flow in the file."""

    name: Annotated[str, msgspec.Meta(max_length=256, pattern=r"^\S+\Z")]
    route: Route | None = None
    cascade: Cascade | None = None
    ensemble: Ensemble | None = None
    pipeline: Pipeline | None = None

    def definitions(self) -> dict[str, Definition]:
        """The definitions by kind."""
        fields = msgspec.structs.asdict(self)
        return {kind: found for kind, found in fields.items() if kind != "name" and found}


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    models: tuple[_Entry, ...]


def load_flows(path: Path) -> dict[str, Definition]:
    """The definitions by name, in the file's order, checked as far as that needs no cards. Raises
    FlowError."""
    try:
        entries = _read(path).models
        found: dict[str, Definition] = {}
        for index, entry in enumerate(entries):
            place = f"models[{index}]"
            if entry.name in found:
                raise FlowError(f"{place}.name: {entry.name!r} is the name of an earlier flow")
            kinds = entry.definitions()
            if len(kinds) != 1:
                raise FlowError(
                    f"{place}: needs exactly one of route, cascade, ensemble and pipeline"
                )
            for kind, definition in kinds.items():
                _check(definition, f"{place}.{kind}")
                found[entry.name] = definition
        _check_cycles(found)
    except FlowError as fault:
        raise FlowError(f"{path}: {fault}") from fault
    return found


def members(definition: Definition) -> Iterator[tuple[str, str]]:
    """Yields the models that a flow may call, each with its place in the definition."""
    match definition:
        case Route():
            for i, rule in enumerate(definition.rules):
                yield from ((f"rules[{i}].to[{j}].model", t.model) for j, t in enumerate(rule.to))
            for i, target in enumerate(definition.otherwise):
                yield f"otherwise[{i}].model", target.model
            if definition.classifier:
                yield "classifier", definition.classifier
        case Cascade():
            yield from (
                (f"members[{i}].model", member.model) for i, member in enumerate(definition.members)
            )
            if definition.confidence.scorer:
                yield "confidence.scorer", definition.confidence.scorer
        case Ensemble():
            yield from ((f"members[{i}]", model) for i, model in enumerate(definition.members))
            if definition.scorer:
                yield "scorer", definition.scorer
        case Pipeline():
            yield from (
                (f"steps[{i}].model", step.model) for i, step in enumerate(definition.steps)
            )


def _read(path: Path) -> _File:
    try:
        raw = load_file(path)
        # Through JSON, which turns dates into text, and keys into strings.
        return msgspec.json.decode(msgspec.json.encode(raw), type=_File)
    except (OSError, UnicodeDecodeError) as exc:
        raise FlowError(f"cannot be read: {exc}") from exc
    except YamlFault as exc:
        raise FlowError(f"line {exc.line}: {exc}") from exc
    except msgspec.ValidationError as exc:
        fault, _, place = str(exc).partition(" - at `$")
        raise FlowError(f"{place.strip('`.') or 'the file'}: {fault}") from exc
    except TypeError as exc:
        raise FlowError(f"holds what JSON cannot: {exc}") from exc


def _check(definition: Definition, place: str) -> None:
    match definition:
        case Route():
            _check_route(definition, place)
        case Cascade():
            _check_cascade(definition, place)
        case Ensemble():
            needs_scorer = definition.combine == "best-by-score"
            if needs_scorer != bool(definition.scorer):
                raise FlowError(f"{place}.scorer: best-by-score needs one, and nothing else does")
        case Pipeline():
            _check_pipeline(definition, place)


def _check_route(route: Route, place: str) -> None:
    for index, rule in enumerate(route.rules):
        at, when = f"{place}.rules[{index}].when", rule.when
        if when.max_prompt_tokens is not None and when.max_prompt_tokens < when.min_prompt_tokens:
            raise FlowError(f"{at}.max_prompt_tokens: is less than min_prompt_tokens")
        if when.labels and not route.classifier:
            raise FlowError(f"{at}.labels: the route has no classifier")
        try:
            if when.pattern:
                check_pattern(when.pattern)
        except ValueError as exc:
            raise FlowError(f"{at}.pattern: {exc}") from exc
        try:
            if when.languages:
                check_languages(when.languages)
        except ValueError as exc:
            raise FlowError(f"{at}.languages: {exc}") from exc
    if route.classifier and not any(rule.when.labels for rule in route.rules):
        raise FlowError(f"{place}.classifier: no rule has labels")


def _check_cascade(cascade: Cascade, place: str) -> None:
    last = len(cascade.members) - 1
    for index, member in enumerate(cascade.members):
        at = f"{place}.members[{index}].threshold"
        if index < last and member.threshold is None:
            raise FlowError(f"{at}: is missing; `batchway cascade fit` finds one")
        if index == last and member.threshold is not None:
            raise FlowError(f"{at}: the last member's answer always stands")
    for kind, value in (("scorer", cascade.confidence.scorer), ("field", cascade.confidence.field)):
        if (cascade.confidence.by == kind) != bool(value):
            raise FlowError(f"{place}.confidence.{kind}: goes with `by: {kind}`, and only with it")


def _check_pipeline(pipeline: Pipeline, place: str) -> None:
    names = [INPUT]
    for index, step in enumerate(pipeline.steps):
        at = f"{place}.steps[{index}]"
        if step.name in names:
            raise FlowError(f"{at}.name: {step.name!r} is already the name of a value")
        for key in ("model", "stream"):
            if key in step.body:
                raise FlowError(f"{at}.body.{key}: cannot be set in a step")
        try:
            check_templates(step, names)
        except Refused as exc:
            raise FlowError(f"{at}.{exc}") from exc
        names.append(step.name)


def _check_cycles(flows: Mapping[str, Definition]) -> None:
    """Refuses flows that call themselves, and those with too many calls."""
    num_calls: dict[str, int] = {}

    def visit(name: str, path: tuple[str, ...]) -> int:
        if name not in flows:
            return 1
        if name in path:
            cycle = " -> ".join((*path[path.index(name) :], name))
            raise FlowError(f"{_place(name)}: calls itself: {cycle}")
        if name not in num_calls:
            called = [model for _, model in members(flows[name])]
            match flows[name]:  # the last of them is the scorer
                case (Cascade() | Ensemble()) as scored if scored.num_scored > 1:
                    called += called[-1:] * (scored.num_scored - 1)
            num_calls[name] = sum(visit(model, (*path, name)) for model in called)
            if num_calls[name] > MAX_CALLS:
                raise FlowError(
                    f"{_place(name)}: may make {num_calls[name]} calls; at most {MAX_CALLS} may be"
                )
        return num_calls[name]

    def _place(name: str) -> str:
        return f"models[{list(flows).index(name)}]"

    for name in flows:
        visit(name, ())


def check_flows(
    definitions: Mapping[str, Definition],
    cards: Mapping[str, ModelCard],
    path: Path = Path("models.yaml"),
) -> dict[str, Flow]:
    """Returns the flows with their endpoints, by name. `cards`: of the served models; those of
    flows are ignored. Raises FlowError, which names the file, `path`."""
    served = {name: card for name, card in cards.items() if card.flow is None}
    checker = _Checker(definitions, served)
    try:
        for index, name in enumerate(definitions):
            if name in served:
                raise FlowError(f"models[{index}].name: {name!r} is the name of a served model")
        return {
            name: Flow(
                definition=definitions[name], endpoints=_with_responses(checker.endpoints(name))
            )
            for name in definitions
        }
    except FlowError as fault:
        raise FlowError(f"{path}: {fault}") from fault


def _with_responses(endpoints: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
    return (*endpoints, Endpoint.RESPONSES) if Endpoint.CHAT in endpoints else endpoints


class _Checker:
    """The endpoints of each model, found from the members up."""

    def __init__(
        self, definitions: Mapping[str, Definition], cards: Mapping[str, ModelCard]
    ) -> None:
        self._definitions = definitions
        self._cards = cards
        self._places = {name: f"models[{i}]" for i, name in enumerate(definitions)}
        self._endpoints: dict[str, tuple[Endpoint, ...]] = {}

    def endpoints(self, name: str) -> tuple[Endpoint, ...]:
        """The endpoints of a flow or a served model. Responses are chats for members."""
        if name not in self._definitions:
            known = self._cards[name].endpoints
            return tuple(each for each in known if each is not Endpoint.RESPONSES)
        if name not in self._endpoints:
            self._endpoints[name] = self._of_flow(name)
        return self._endpoints[name]

    def _of_flow(self, name: str) -> tuple[Endpoint, ...]:
        definition = self._definitions[name]
        place = f"{self._places[name]}.{type(definition).__name__.lower()}"
        for at, model in members(definition):
            if model not in self._definitions and model not in self._cards:
                raise FlowError(f"{place}.{at}: no model {model!r} is served")
        match definition:
            case Route():
                return self._of_route(definition, place)
            case Cascade():
                return self._of_cascade(definition, place)
            case Ensemble():
                return self._of_ensemble(definition, place)
            case Pipeline():
                return self._of_pipeline(definition, place)

    def _of_route(self, route: Route, place: str) -> tuple[Endpoint, ...]:
        if route.classifier:
            if Endpoint.CLASSIFY not in self.endpoints(route.classifier):
                raise FlowError(f"{place}.classifier: {route.classifier!r} does not classify")
            self._check_labels(route, place)
        targets = [target.model for target in route.targets]
        endpoints = self._shared(targets, tuple(Endpoint), place, "the targets share no endpoint")
        if route.classifier:  # otherwise a call is a job of its target
            self._check_same_outputs(targets, endpoints, place, is_mean=False)
        return endpoints

    def _check_labels(self, route: Route, place: str) -> None:
        card = self._cards.get(route.classifier)
        if card is None or card.pooling is None or not card.pooling.labels:
            return  # a flow's outputs are not known here
        known = card.pooling.labels
        for index, rule in enumerate(route.rules):
            for label in rule.when.labels:
                if label not in known:
                    raise FlowError(
                        f"{place}.rules[{index}].when.labels: {route.classifier!r} has no label "
                        f"{label!r}; its labels are {', '.join(known[:20])}"
                    )

    def _of_cascade(self, cascade: Cascade, place: str) -> tuple[Endpoint, ...]:
        self._check_scorer(cascade.confidence.scorer, f"{place}.confidence.scorer")
        if cascade.confidence.by.endswith("logprob"):
            for index, member in enumerate(cascade.members[:-1]):
                if not self._gives_logprobs(member.model):
                    raise FlowError(
                        f"{place}.members[{index}].model: {member.model!r} is a pipeline, whose "
                        f"answers have no log probabilities; confidence needs them"
                    )
        return self._shared(
            [member.model for member in cascade.members],
            _GENERATIVE,
            place,
            "a cascade needs members that all generate text",
        )

    def _gives_logprobs(self, name: str) -> bool:
        """Whether a caller may ask for log probabilities. Only pipelines do not pass them on."""
        match self._definitions.get(name):
            case None:
                return True
            case Pipeline():
                return False
            case definition:
                return all(map(self._gives_logprobs, deciding_members(definition)))

    def _of_ensemble(self, ensemble: Ensemble, place: str) -> tuple[Endpoint, ...]:
        self._check_scorer(ensemble.scorer, f"{place}.scorer")
        endpoints = self._shared(
            ensemble.members,
            _COMBINABLE[ensemble.combine],
            place,
            f"{ensemble.combine} needs members that share one of "
            f"{', '.join(_COMBINABLE[ensemble.combine])}",
        )
        self._check_same_outputs(ensemble.members, endpoints, place, is_mean=True)
        return endpoints

    def _check_same_outputs(
        self, models: Sequence[str], endpoints: tuple[Endpoint, ...], place: str, *, is_mean: bool
    ) -> None:
        """Checks that the vectors of all deciding models are of the same kind, with the same labels
        and, for a mean, of the same size: a flow's card describes them."""
        known: dict[tuple[str, int, tuple[str, ...]], str] = {}
        for model in models:
            for pooling in self._poolings(model):
                size = pooling.num_outputs if is_mean else 0
                labels = pooling.labels if Endpoint.CLASSIFY in endpoints else ()
                known.setdefault((pooling.kind, size, labels), model)
        if len(known) > 1:
            each = []
            for (kind, size, labels), model in known.items():
                details = [kind, *([f"{size} outputs"] if size else []), *labels[:20]]
                each.append(f"{model} ({', '.join(details)})")
            raise FlowError(
                f"{place}: the outputs of its models must be the same: {'; '.join(each)}"
            )

    def _poolings(self, name: str) -> list[PoolingCard]:
        """The pooling cards of the models whose output may become that of a model or a flow."""
        if name in self._definitions:
            deciding = deciding_members(self._definitions[name])
            return [each for model in deciding for each in self._poolings(model)]
        pooling = self._cards[name].pooling
        return [] if pooling is None else [pooling]

    def _of_pipeline(self, pipeline: Pipeline, place: str) -> tuple[Endpoint, ...]:
        for index, step in enumerate(pipeline.steps):
            known = self.endpoints(step.model)
            if step.endpoint not in known:
                raise FlowError(
                    f"{place}.steps[{index}].endpoint: {step.model!r} does not answer "
                    f"{step.endpoint}; it answers {', '.join(known)}"
                )
        return (pipeline.steps[-1].endpoint,)

    def _check_scorer(self, scorer: str, place: str) -> None:
        if scorer and Endpoint.SCORE not in self.endpoints(scorer):
            raise FlowError(
                f"{place}: {scorer!r} does not answer {Endpoint.SCORE}, as rerankers and embedding "
                f"models do; it answers {', '.join(self.endpoints(scorer))}"
            )

    def _shared(
        self,
        models: list[str] | tuple[str, ...],
        allowed: tuple[Endpoint, ...],
        place: str,
        fault: str,
    ) -> tuple[Endpoint, ...]:
        """The allowed endpoints that all models answer. Raises FlowError with `fault` if none."""
        shared = tuple(
            endpoint
            for endpoint in allowed
            if all(endpoint in self.endpoints(model) for model in models)
        )
        if not shared:
            each = "; ".join(
                f"{model} answers {', '.join(self.endpoints(model))}"
                for model in dict.fromkeys(models)
            )
            raise FlowError(f"{place}: {fault}: {each}")
        return shared


def flow_card(name: str, flow: Flow, cards: Mapping[str, ModelCard]) -> ModelCard:
    """Returns a flow's card. `cards` contains those of its members. Raises FlowError."""
    deciding = [cards[model] for model in deciding_members(flow.definition)]
    called = [cards[model] for _, model in members(flow.definition)]
    generating = [card for card in deciding if card.pooling is None]
    first = (generating or deciding)[0]
    lanes = tuple(lane for lane in first.lanes if all(lane in card.lanes for card in called))
    if not lanes:
        each = "; ".join(f"{card.name} serves {', '.join(card.lanes)}" for card in called)
        raise FlowError(f"{name}: its members share no lane: {each}")
    return ModelCard(
        name=name,
        context_length=min(card.context_length for card in deciding),
        vocab_size=min(card.vocab_size for card in deciding),
        eos_token_ids=first.eos_token_ids,
        tokenizer_sha256=first.tokenizer_sha256,
        created_s=int(time.time()),
        lanes=lanes,
        capabilities=_shared([card.capabilities for card in deciding]),
        generation=first.generation,
        reasoning_parser=first.reasoning_parser,
        tool_call_parser=first.tool_call_parser,
        pooling=first.pooling,
        flow=flow,
    )


def _shared(all_of: list[Capabilities]) -> Capabilities:
    """The capabilities that all of them have."""
    return Capabilities(
        prompt_logprobs=all(each.prompt_logprobs for each in all_of),
        structured_output=all(each.structured_output for each in all_of),
        tools=all(each.tools for each in all_of),
        lora=all(each.lora for each in all_of),
        resume=weakest_resume(each.resume for each in all_of),
    )
