"""The cards of flows, made of their members' cards."""

import time
from collections.abc import Mapping

from contract.flows import Flow, deciding_members
from contract.jobs import weakest_resume
from contract.model_cards import Capabilities, ModelCard
from gateway.runners.flows.definitions import FlowError, members


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
