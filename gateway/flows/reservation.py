"""How many tokens the calls of a flow may take: what its job reserves. An estimate, because later
prompts are not known; the bill is that of the calls."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from contract.endpoints import VECTOR_ENDPOINTS
from contract.flows import INPUT, Cascade, Ensemble, Pipeline, Route, Step
from contract.jobs import Endpoint
from contract.model_cards import ModelCard
from gateway.openai.generation import COMPLETION_TOKENS
from gateway.settings import GatewaySettings

_LIMITS = ("max_completion_tokens", "max_tokens")


class NumTokens(NamedTuple):
    """Of one call or several."""

    prompt: int
    output: int


class Reservation:
    """`cards`: of all models, by name. `body`: of the flow's call, as JSON."""

    def __init__(
        self, cards: Mapping[str, ModelCard], settings: GatewaySettings, body: bytes
    ) -> None:
        self._cards = cards
        self._settings = settings
        self._body: dict[str, Any] = msgspec.json.decode(body)

    def estimate(self, model: str, own: NumTokens) -> NumTokens:
        """All calls that a call of a model may make. `own`: if it had to make none."""
        card = self._cards.get(model)
        if card is None or card.flow is None:
            return own
        score = NumTokens(sum(own), 0)  # a scorer reads the prompt and the answer
        match card.flow.definition:
            case Route() as route:
                most = max((self.estimate(to.model, own) for to in route.targets), key=sum)
                return _sum([most, *([NumTokens(own.prompt, 0)] if route.classifier else [])])
            case Cascade() as cascade:
                members = [self.estimate(member.model, own) for member in cascade.members]
                return _sum([*members, *[score] * cascade.num_scored])
            case Ensemble() as ensemble:
                members = [self.estimate(member, own) for member in ensemble.members]
                return _sum([*members, *[score] * ensemble.num_scored])
            case Pipeline() as pipeline:
                steps = pipeline.steps
                return _sum(
                    self.estimate(step.model, NumTokens(own.prompt, self._step_output(step)))
                    for step in steps
                )

    def _step_output(self, step: Step) -> int:
        """The most output of a step's call."""
        if step.endpoint in VECTOR_ENDPOINTS:
            return 0
        for name in _LIMITS:
            value = self._value(step, name)
            if isinstance(value, int) and value > 0:
                return min(value, self._settings.max_output_tokens)
        is_chat = step.endpoint is Endpoint.CHAT
        return self._settings.default_output_tokens if is_chat else COMPLETION_TOKENS

    def _value(self, step: Step, name: str) -> object:
        """A field of a step's body; None if it is not known before earlier steps have answered."""
        # Only here: most gateways render no templates of their own, and a cold start need not wait.
        from gateway.flows.templates import TemplateFault, render

        alone = msgspec.structs.replace(step, body={name: step.body.get(name)})
        try:
            return render(alone, {INPUT: self._body})[name]
        except TemplateFault:
            return None


def _sum(parts: Iterable[NumTokens]) -> NumTokens:
    prompts, outputs = zip(*parts, strict=True)
    return NumTokens(sum(prompts), sum(outputs))
