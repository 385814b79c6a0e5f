"""Masks of one bit for each token, of several choices and their drafts in one array."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.grammars.compiled import Kind, compile_grammar
from tests.fakes import VOCAB_SIZE, hash_grammars
from workers.engine.grammar import Matcher

GRAMMARS = [
    compile_grammar(Kind.REGEX, "[a-f]{1,9}"),
    compile_grammar(Kind.REGEX, "(ab|ba)+c?"),
    compile_grammar(Kind.CHOICE, ["abba", "abc", "b"]),
    compile_grammar(Kind.JSON_SCHEMA, {"enum": ["ab", "ba", 12, None]}),
]
LETTERS = [*b'abcdef"12nul']


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(GRAMMARS), st.lists(st.sampled_from(LETTERS), max_size=6)),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 3),
)
def test_rows_of_a_draft_are_those_of_its_tokens_taken_one_by_one(
    drawn: list[tuple[str, list[int]]], num_between: int
) -> None:
    """Rows between them, and behind the token that a grammar refuses, stay as they were."""
    grammars = hash_grammars()
    matchers = [grammars.matcher(grammar) for grammar, _ in drawn]
    drafts = [
        token_ids[: matcher.num_allowed(token_ids)]
        for matcher, (_, token_ids) in zip(matchers, drawn, strict=True)
    ]
    height = 7 + num_between
    mask = np.full((len(drawn) * height, grammars.num_mask_words), -1, dtype=np.int32)

    rows = [(m, n * height, d) for n, (m, d) in enumerate(zip(matchers, drafts, strict=True))]
    grammars.fill(mask, rows)

    bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB_SIZE]
    for (grammar, _), (_, first, draft) in zip(drawn, rows, strict=True):
        expected = [_allowed(grammars.matcher(grammar, draft[:n])) for n in range(len(draft) + 1)]
        assert (bits[first : first + len(expected)] == expected).all()
        assert bits[first + len(expected) : first + height].all()


def _allowed(matcher: Matcher) -> np.ndarray:
    [forbidden] = hash_grammars().forbidden([matcher])
    allowed: np.ndarray = ~forbidden
    return allowed
