"""Tokens drawn on the device, compared with the sampler."""

import random
from typing import Any

import pytest
import torch

from tests.workers.model.driver import make_sequence
from workers.engine.model import Sample
from workers.engine.sequence import Sequence
from workers.model.gpu.drawing import OPEN, can_draw, draw, wishes_of
from workers.model.gpu.request_state import RequestState
from workers.model.sampler import sample

CPU = torch.device("cpu")
NUM_ROWS = 24


def random_sequences(generator: random.Random) -> list[Sequence]:
    """Greedy ones, and some with one or more limits, at various positions."""
    sequences = []
    for _ in range(NUM_ROWS):
        wishes: dict[str, Any] = {
            "temperature": generator.choice([0.0, 0.3, 1.0, 2.5]),
            "top_k": generator.choice([0, 0, 1, 7, 40]),
            "top_p": generator.choice([1.0, 1.0, 0.9, 0.2]),
            "min_p": generator.choice([0.0, 0.0, 0.05]),
            "seed": generator.randrange(2**63),
        }
        output_ids = [5] * generator.randint(0, 6)
        prompt = list(range(4, 4 + generator.randint(1, 20)))
        choice = generator.randint(0, 2)
        sequences.append(make_sequence(prompt, output_ids=output_ids, choice=choice, **wishes))
    return sequences


def draw_on_device(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    """Draws by the device's state, whose rows are in another order than the sequences."""
    state = RequestState(NUM_ROWS, 32, 4, 99, CPU)
    for sequence in reversed(sequences):
        assert state.admit(sequence, sequences) is not None
        state.place(sequence, sequence.token_ids[-1], sequence.num_known - 1)
    state.flush()
    rows = torch.tensor([state.row_of(sequence) for sequence in sequences])
    return draw(logits, state, rows, wishes_of(sequences)).tolist()


@pytest.mark.parametrize("vocab_size", [60, 3000])
@pytest.mark.parametrize("seed", range(8))
def test_the_device_draws_what_the_sampler_draws(seed: int, vocab_size: int) -> None:
    """Or it leaves a row open, which is rare unless rows are flat."""
    torch.manual_seed(seed)
    sequences = random_sequences(random.Random(seed))
    logits = torch.randn(NUM_ROWS, vocab_size) * 4

    found = draw_on_device(logits, sequences)

    expected = [row.token_id for row in sample(logits, sequences) if isinstance(row, Sample)]
    differing = [a for a, b in zip(found, expected, strict=True) if a != b]
    assert set(differing) <= {OPEN}
    assert len(differing) <= 2


def test_rows_that_are_not_finite_are_left_open() -> None:
    """The host computes them again, and only their job fails."""
    logits = torch.randn(3, 50)
    logits[1, 7] = float("nan")

    found = draw_on_device(logits, [make_sequence([4, 5]) for _ in range(3)])

    assert [token_id == OPEN for token_id in found] == [False, True, False]


@pytest.mark.parametrize(
    ("wishes", "can"),
    [
        ({"temperature": 0.7, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, True),
        ({"logprobs": 0}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"logit_bias": {3: 1.0}}, False),
        ({"min_tokens": 1}, False),
    ],
)
def test_rows_that_need_the_host_are_known(wishes: dict[str, Any], can: bool) -> None:
    """Changes of logits and log probabilities are left to the sampler."""
    assert can_draw(make_sequence([4, 5], **wishes)) == can
