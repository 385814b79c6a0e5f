"""Tokens drawn on the device, compared with the sampler."""

import math
import random
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.model.driver import make_sequence
from workers.engine.grammar import Mask
from workers.engine.interface import Sample
from workers.engine.masks import StepMasks
from workers.engine.sequence import Sequence
from workers.model.gpu.drawing import draw
from workers.model.gpu.request_state import RequestState
from workers.model.penalties import adjust_logits
from workers.model.sampler import OPEN, rank_chosen, sample

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WAYS = pytest.mark.parametrize("way", ["torch", "triton"])
NUM_ROWS = 24


def random_sequences(generator: random.Random) -> list[Sequence]:
    """Greedy ones, and some with limits, penalties, bias and bans, at various positions."""
    sequences = []
    for _ in range(NUM_ROWS):
        wishes: dict[str, Any] = {
            "temperature": generator.choice([0.0, 0.3, 1.0, 2.5]),
            "top_k": generator.choice([0, 0, 1, 7, 40]),
            "top_p": generator.choice([1.0, 1.0, 0.9, 0.2]),
            "min_p": generator.choice([0.0, 0.0, 0.05]),
            "repetition_penalty": generator.choice([1.0, 1.0, 1.5]),
            "presence_penalty": generator.choice([0.0, 0.0, 0.7]),
            "frequency_penalty": generator.choice([0.0, 0.0, -0.4]),
            "logit_bias": generator.choice([{}, {}, {7: 3.0, 11: -9.0}]),
            "min_tokens": generator.choice([0, 0, 3]),
            "seed": generator.randrange(2**63),
        }
        output_ids = [generator.randint(4, 9) for _ in range(generator.randint(0, 6))]
        prompt = list(range(4, 4 + generator.randint(1, 20)))
        choice = generator.randint(0, 2)
        wishes |= {"output_ids": output_ids, "choice": choice, "ending_ids": frozenset({5})}
        sequences.append(make_sequence(prompt, **wishes))
    return sequences


def draw_on_device(logits: Tensor, sequences: list[Sequence], way: str) -> list[int]:
    """Draws by the device's state, whose rows are in another order than the sequences."""
    device = DEVICE if way == "triton" else CPU
    state = RequestState(NUM_ROWS, 32, 4, 99, device)
    for sequence in reversed(sequences):
        assert state.admit(sequence, sequences) is not None
        state.place(sequence, sequence.token_ids[-1], sequence.num_known - 1)
    state.flush()
    rows = torch.tensor([state.row_of(sequence) for sequence in sequences], device=device)
    if way == "triton":
        pytest.importorskip("triton")
    lengths = [sequence.num_known for sequence in sequences]
    token_ids: list[int] = draw(
        logits.to(device), state, rows, sequences, lengths, by_triton=way != "torch"
    ).tolist()
    return token_ids


def sampled(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    return [row.token_id for row in sample(logits, sequences) if isinstance(row, Sample)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [60, 9000])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.each_pair
def test_the_device_draws_what_the_sampler_draws(
    way: str, seed: int, vocab_size: int, dtype: torch.dtype
) -> None:
    """In one tile of the vocabulary and in several; bfloat16 has many equal logits."""
    torch.manual_seed(seed)
    sequences = random_sequences(random.Random(seed))
    logits = (torch.randn(NUM_ROWS, vocab_size) * 4).to(dtype)

    assert draw_on_device(logits, sequences, way) == sampled(logits, sequences)


@WAYS
def test_flat_rows_are_drawn_from_all_they_may(way: str) -> None:
    """Thousands of tokens are within top-p."""
    torch.manual_seed(0)
    limits: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_k": 2000},
        {"top_p": 0.5, "top_k": 5000},
    ]
    sequences = [
        make_sequence([4, 5], temperature=1.0, seed=seed, **limit)
        for seed, limit in enumerate(limits)
    ]
    logits = torch.randn(3, 9000) * 0.1

    assert draw_on_device(logits, sequences, way) == sampled(logits, sequences)


@WAYS
def test_of_equal_logits_a_greedy_row_takes_the_first(way: str) -> None:
    """Whatever tile they are in."""
    logits = torch.zeros(2, 9000)
    logits[:, [4321, 8765]] = 5.0

    assert draw_on_device(logits, [make_sequence([4])] * 2, way) == [4321, 4321]


@WAYS
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_left_open(odd: float, way: str) -> None:
    """The host computes them again, and only their job fails."""
    logits = torch.randn(5, 50)
    logits[1, 7] = logits[3, 49] = odd
    logits[4, 7] = -math.inf
    greedy = [make_sequence([4, 5]) for _ in range(3)]
    drawn = [make_sequence([4, 5], temperature=1.0, top_p=0.9) for _ in range(2)]

    found = draw_on_device(logits, greedy + drawn, way)

    assert [token_id == OPEN for token_id in found] == [False, True, False, True, False]


def test_nothing_that_changes_logits_waits_for_the_device() -> None:
    """Meta tensors have no numbers: what reads one raises. A grammar's mask is among the changes,
    and so are log probabilities."""
    device = torch.device("meta")
    sequences = [
        make_sequence([4, 5], output_ids=[6], repetition_penalty=1.2, logprobs=3),
        make_sequence([4], frequency_penalty=0.2, logit_bias={3: 1.0}),
        make_sequence([4] * 9, min_tokens=4, ending_ids=frozenset({2})),
        make_sequence([4]),
    ]
    state = RequestState(4, 4, 4, 0, device)
    for sequence in sequences:
        state.admit(sequence, sequences)
        state.place(sequence, sequence.token_ids[-1], sequence.num_known - 1)
    state.flush()
    mask: Future[np.ndarray] = Future()
    mask.set_result(np.zeros((1, 50), dtype=bool))
    masks = StepMasks({sequences[0]: Mask(mask, 0)})
    logits = torch.empty(4, 50, dtype=torch.bfloat16, device=device)
    token_ids = torch.empty(4, dtype=torch.int64, device=device)
    lengths = [sequence.num_known for sequence in sequences]

    scores = adjust_logits(logits, sequences, masks, lengths, state.known)
    state.advance(token_ids, token_ids)
    ranked = rank_chosen(logits, token_ids, sequences)

    assert (scores.shape, scores.dtype) == ((4, 50), torch.float32)
    assert ranked is not None
    assert ranked.shape == (1, 1 + 2 * 3)
    with pytest.raises(RuntimeError, match="meta"):
        scores.tolist()
