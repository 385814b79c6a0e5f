"""How a call looks to each model whose answer may become a flow's. Reads no definitions from files:
functions load this module at their start."""

from collections.abc import Mapping

from msgspec.structs import replace

from contract.flows import Pipeline, deciding_members
from contract.model_cards import ModelCard

_ENDLESS = 2**31 - 1  # tokens


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
