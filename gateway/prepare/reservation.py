"""Estimates how many tokens the calls of a flow may take, which its job reserves. Later prompts are
not known; the bill counts the actual calls."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from contract.endpoints import VECTOR_ENDPOINTS
from contract.flows import INPUT, Cascade, Ensemble, Pipeline, Route, Step
from contract.jobs import Endpoint
from contract.model_cards import ModelCard
from gateway.models.step_templates import StepTemplates, TemplateFault
from gateway.prepare.generation import COMPLETION_TOKENS
from gateway.settings import GatewaySettings

_LIMITS = ("max_completion_tokens", "max_tokens")


class NumTokens(NamedTuple):
    """Tokens of one call or several."""

    prompt: int
    output: int


class Reservation:
    """An estimate for a flow's call. `cards`: all models' by name. `body`: the call's, as JSON."""

    def __init__(
        self,
        cards: Mapping[str, ModelCard],
        settings: GatewaySettings,
        body: bytes,
        templates: StepTemplates,
    ) -> None:
        self._cards = cards
        self._settings = settings
        self._templates = templates
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
