"""How the model reasons in one chat, for a grammar of its output (grammars/rules/frames.py)."""

from collections.abc import Sequence
from typing import Any

import msgspec

from contract.model_cards import ModelCard
from gateway.http.errors import UNSUPPORTED, bad_request
from gateway.models.tokens import ModelTokenizer

BUDGET = "thinking_token_budget"


def reasoning_of(
    tokenizer: ModelTokenizer, card: ModelCard, prompt_ids: Sequence[int], budget: int | None
) -> dict[str, Any] | None:
    """Returns a frames.Reasoning; None if the model does not reason. Raises ApiError for a budget
    that cannot be enforced."""
    format_ = tokenizer.files.reasoning
    if budget is not None:
        _check_budget(tokenizer, card)
    if format_ is None:
        return None
    state = format_.state_after(tokenizer.end_of(prompt_ids))
    is_bounded = state != "closed"
    return {
        "format": msgspec.structs.asdict(format_),
        "state": state,
        "budget": budget if is_bounded else None,
    }


def _check_budget(tokenizer: ModelTokenizer, card: ModelCard) -> None:
    format_ = tokenizer.files.reasoning
    if format_ is None:
        fault = "does not reason"
    elif not card.capabilities.structured_output:
        fault = "has an engine that cannot constrain its output"
    elif not format_.close.lstrip().startswith(tuple(tokenizer.marks["ids"])):
        fault = "ends its reasoning with text, which no token marks"
    else:
        return
    raise bad_request(UNSUPPORTED, f"{BUDGET}: {card.name!r} {fault}", BUDGET)
