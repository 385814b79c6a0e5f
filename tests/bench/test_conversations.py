"""What the bench of conversations counts as ideal, and that its parts run."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.claims import claim_us
from bench.conversations import SIMULATED, Turn, conversations_of, ideal_tokens, run_simulated


@given(st.integers(0, 1000))
def test_the_ideal_is_the_longest_prefix_of_what_was_said_before(seed: int) -> None:
    """Beside a search through all earlier texts, in blocks of 16 and without the last token."""
    rng, turns = random.Random(seed), list[Turn]()
    for number in range(12):
        before = rng.choice(turns) if turns else Turn(0.0, is_later=False)
        said = (*before.prompt_ids, *before.output_ids)
        kept = said[: rng.choice((len(said), rng.randint(0, len(said))))]
        prompt = (*kept, *(rng.randrange(2) for _ in range(rng.randint(1, 40))))
        output = tuple(rng.randrange(2) for _ in range(rng.randint(1, 20)))
        turn = Turn(float(number), is_later=bool(kept), prompt_ids=prompt, output_ids=output)
        turn.ended_s = number + rng.uniform(0.1, 3.0)
        turns.append(turn)

    expected = 0
    for number, turn in enumerate(turns):
        texts = [earlier.prompt_ids[:-1] for earlier in turns[:number]]
        texts += [
            (*earlier.prompt_ids, *earlier.output_ids[:-1])
            for earlier in turns[:number]
            if earlier.ended_s <= turn.sent_s
        ]
        lengths = range(0, len(turn.prompt_ids), 16)
        expected += max(
            length
            for length in lengths
            if not length or any(text[:length] == turn.prompt_ids[:length] for text in texts)
        )
    assert ideal_tokens(turns) == expected


def test_conversations_are_the_same_by_their_seed() -> None:
    once, again, other = (conversations_of(20, seed) for seed in ("a", "a", "b"))
    assert once == again != other
    assert all(4 <= len(about.messages) == len(about.pauses_s) <= 8 for about in once)


@pytest.mark.campaign
def test_simulated_workers_find_nearly_the_ideal_where_claims_look() -> None:
    blind, looking = (
        run_simulated(SIMULATED[name], 8, 4.0, 8192, 0)
        for name in ("claims do not look", "prefixes, sessions, retention")
    )
    assert blind.ideal == looking.ideal
    assert blind.of_ideal < 0.5
    assert looking.of_ideal > 0.9


def test_each_claim_gets_a_job() -> None:
    assert asyncio.run(claim_us(num_held=8, num_claimed=20)) > 0
