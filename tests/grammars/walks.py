"""Outputs of grammars: drawn from what a grammar allows, or judged by it."""

import random
from collections.abc import Sequence

from tests.fakes import EOS_ID
from workers.engine.grammar import GrammarFailed, Grammars

_ENDS = frozenset(b'"}])>\n0123456789')


def draw(
    grammars: Grammars,
    grammar: str,
    seed: int,
    *,
    start: Sequence[int] = (),
    forces: bool = True,
    most: int = 600,
) -> list[int] | None:
    """Draws the rest of an output, with forced tokens or without. Prefers tokens that lead to an
    end; None if the output gets too long. Raises GrammarFailed."""
    random_, matcher = random.Random(seed), grammars.matcher(grammar, start)
    output_ids = list(start)
    while len(output_ids) < most:
        if matcher.is_complete:
            return output_ids
        following = matcher.forced() if forces else []
        if not following:
            [forbidden] = grammars.forbidden([matcher])
            allowed = [i for i, is_forbidden in enumerate(forbidden) if not is_forbidden]
            assert allowed, "nothing can follow"
            if EOS_ID in allowed and random_.random() < 0.4:
                return output_ids
            allowed = [token_id for token_id in allowed if token_id != EOS_ID] or [EOS_ID]
            ending = [token_id for token_id in allowed if token_id in _ENDS]
            following = [random_.choice(ending if ending and random_.random() < 0.6 else allowed)]
        for token_id in following:
            matcher.consume(token_id)
            output_ids.append(token_id)
    return None


def judge(grammars: Grammars, grammar: str, token_ids: Sequence[int]) -> str:
    """Whether the grammar takes the tokens as a `whole` output, or as one `begun`; else what it
    refuses: the number of the token."""
    matcher = grammars.matcher(grammar)
    for number, token_id in enumerate(token_ids):
        try:
            matcher.consume(token_id)
        except GrammarFailed:
            return f"refused {number}"
        matcher.forced()  # has no effect
    return "whole" if matcher.state.is_accepting() else "begun"
