"""Checks by their cards that a flow's members can do what it asks of them, and makes its card."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from contract.flows import (
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
from gateway.runners.flows.definitions import FlowError, members

_GENERATIVE = (Endpoint.CHAT, Endpoint.COMPLETIONS)
_COMBINABLE = {
    "vote": _GENERATIVE,
    "best-by-score": _GENERATIVE,
    "mean": (Endpoint.EMBEDDINGS, Endpoint.SCORE, Endpoint.RERANK, Endpoint.CLASSIFY),
}


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
