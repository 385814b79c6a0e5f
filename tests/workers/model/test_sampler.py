"""The sampling pipeline, compared with references by row and with the distributions it promises."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import NoBadWordsLogitsProcessor

from tests.workers.model.driver import make_sequence
from workers.engine.interface import RowFailed, Sample
from workers.engine.sequence import Sequence
from workers.model import sampler
from workers.model.sampler import (
    add_gumbel_noise,
    adjust_logits,
    find_allowed,
    gumbel,
    row_key,
    sample,
    uniform,
)

# A correct sampler exceeds this once in 10,000, by degrees of freedom (seeds are fixed).
CHI_SQUARE_LIMITS = {3: 21.1, 4: 23.5, 7: 29.9, 15: 44.3}
NUM_DRAWS = 20_000


def draw(logits: Tensor, sequences: list[Sequence]) -> list[Sample]:
    rows = sample(logits, sequences)
    assert all(isinstance(row, Sample) for row in rows)
    return [row for row in rows if isinstance(row, Sample)]


def draw_counts(logits: Tensor, **params: Any) -> Tensor:
    """How often each token of logits (vocab_size,) is drawn, over this many seeds."""
    sequences = [
        make_sequence([4], **({"temperature": 1.0} | params | {"seed": i}))
        for i in range(NUM_DRAWS)
    ]
    ids = [s.token_id for s in draw(logits.expand(NUM_DRAWS, -1), sequences)]
    return torch.bincount(torch.tensor(ids), minlength=len(logits)).double()


def assert_distributed(counts: Tensor, probabilities: Tensor) -> None:
    """Chi-square over the tokens that can be drawn; no other may be drawn."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible].double() * NUM_DRAWS
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    assert statistic < CHI_SQUARE_LIMITS[int(possible.sum()) - 1]


LOGITS = torch.linspace(-1.5, 1.5, 16)[
    torch.randperm(16, generator=torch.Generator().manual_seed(1))
]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_at_a_temperature(temperature: float) -> None:
    """Over 20,000 seeds, by chi-square with 15 degrees of freedom."""
    counts = draw_counts(LOGITS, temperature=temperature)

    assert_distributed(counts, torch.softmax(LOGITS / temperature, 0))


def test_draws_of_one_sequence_follow_the_softmax_over_positions() -> None:
    """The same seed at 20,000 positions, as one long output would."""
    sequences = [
        make_sequence([4], output_ids=[5] * position, seed=3, temperature=1.0, n=10)
        for position in range(2000)
    ]

    counts = torch.zeros(16)
    for choice in range(10):
        for sequence in sequences:
            sequence.choice = choice
        ids = [s.token_id for s in draw(LOGITS.expand(2000, -1), sequences)]
        counts += torch.bincount(torch.tensor(ids), minlength=16)

    assert_distributed(counts, torch.softmax(LOGITS, 0))


@pytest.mark.parametrize("scale", [0.0, 0.3, 4.0])
def test_noise_for_the_likeliest_alone_draws_the_same_tokens(scale: float) -> None:
    """As noise for the whole vocabulary does. Some scores tie, because of their type or all of
    them."""
    settings: list[dict[str, Any]] = [
        {"top_k": 1}, {"top_k": 40}, {"top_k": 2000}, {"top_p": 0.5}, {"top_p": 0.99},
        {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "min_p": 0.05}, {},
    ]  # fmt: skip
    sequences = [
        make_sequence([4], temperature=0.8, **({"seed": i} | setting))
        for i, setting in enumerate(settings * 5)
    ]
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(len(sequences), 3000, generator=generator) * scale).bfloat16().float()
    params = [s.params for s in sequences]
    scores = logits / 0.8
    lowest = find_allowed(
        scores,
        torch.tensor([p.top_k for p in params]),
        torch.tensor([p.top_p for p in params]),
        torch.tensor([p.min_p for p in params]),
    ).lowest
    scores = scores.masked_fill(scores < lowest, -math.inf)
    add_gumbel_noise(scores, [row_key(p.seed, 0, 0) for p in params])

    assert [s.token_id for s in draw(logits, sequences)] == scores.argmax(-1).tolist()


def test_a_row_does_not_change_with_its_batch() -> None:
    """Seeded rows of every kind, alone and together, in two orders."""
    torch.manual_seed(0)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.3},
        {"temperature": 1.0, "logit_bias": {3: 4.0}, "presence_penalty": 1.0},
        {"temperature": 1.0, "logprobs": 3},
    ]
    sequences = [
        make_sequence([4, 5, 6], output_ids=[7] * (seed % 3), seed=seed, **kind)
        for seed in range(8)
        for kind in kinds
    ]
    logits = torch.randn(len(sequences), 2000)

    together = draw(logits, sequences)
    backwards = draw(logits.flip(0), sequences[::-1])[::-1]
    alone = [draw(logits[i : i + 1], [s])[0] for i, s in enumerate(sequences)]

    assert [s.token_id for s in together] == [s.token_id for s in alone]
    assert [s.token_id for s in together] == [s.token_id for s in backwards]


def test_noise_depends_on_seed_choice_and_position_and_nothing_else() -> None:
    """Other prompts, jobs and epochs draw the same; another seed, choice or position does not."""
    logits = torch.zeros(1, 1000)

    def token(**changes: Any) -> int:
        sequence = make_sequence([4], **{"temperature": 1.0, **changes})
        return draw(logits, [sequence])[0].token_id

    same = make_sequence([9, 9, 9], temperature=1.0)
    same.job_id, same.epoch, same.tenant, same.num_computed = "other", 7, "else", 2
    assert draw(logits, [same])[0].token_id == token()
    assert token(choice=2, n=2) == token(), "the first choice of the job's next prompt"
    assert len({token(), token(seed=2), token(choice=1, n=2), token(output_ids=[5])}) == 4


def test_greedy_takes_the_most_likely_token() -> None:
    """At temperature 0, whatever top-k, top-p and the seed are."""
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    sequences = [make_sequence([4], seed=i, top_k=3, top_p=0.1) for i in range(3)]

    assert [s.token_id for s in draw(logits, sequences)] == logits.argmax(-1).tolist()


def adjusted_by_reference(logits: list[float], sequence: Sequence) -> list[float]:
    """Bias and penalties, token by token."""
    params = sequence.params
    output = sequence.token_ids[sequence.num_prompt :]
    found = list(logits)
    for token_id in range(len(found)):
        value = found[token_id] + params.logit_bias.get(token_id, 0.0)
        if token_id in sequence.token_ids:
            is_positive = value > 0
            factor = params.repetition_penalty
            value = value / factor if is_positive else value * factor
        count = output.count(token_id)
        value -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        if sequence.num_output < params.min_tokens and token_id in sequence.ending_ids:
            value = -math.inf
        found[token_id] = value
    return found


def test_bias_penalties_and_bans_equal_a_reference_per_row() -> None:
    """One row of each kind, one of all, one of none, in one batch."""
    kinds: list[dict[str, Any]] = [
        {},
        {"logit_bias": {0: 5.0, 7: -100.0}},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.7},
        {"frequency_penalty": 0.4},
        {"min_tokens": 6},
        {"min_tokens": 5},
        {
            "logit_bias": {4: 1.0},
            "repetition_penalty": 0.8,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.3,
            "min_tokens": 9,
        },
    ]
    ending_ids = frozenset({1, 6})
    sequences = [
        make_sequence([4, 5, 5, 6], output_ids=[6, 7, 7, 7, 8], ending_ids=ending_ids, **kind)
        for kind in kinds
    ]
    logits = torch.randn(len(kinds), 12, generator=torch.Generator().manual_seed(0))
    before = logits.clone()

    found = adjust_logits(logits, sequences)

    expected = [
        adjusted_by_reference(row, s) for row, s in zip(logits.tolist(), sequences, strict=True)
    ]
    torch.testing.assert_close(found, torch.tensor(expected))
    assert torch.equal(logits, before)


def test_allowed_tokens_and_bad_words_equal_those_of_transformers() -> None:
    """Bad words are those of the output alone, as in vLLM. If only bad words are allowed, one of
    them is taken."""
    chance = random.Random(0)
    for _ in range(200):
        output_ids = chance.choices(range(4), k=chance.randrange(6))
        words = [chance.choices(range(4), k=chance.choice((1, 2, 3))) for _ in range(3)]
        allowed = sorted(chance.sample(range(6), chance.choice((1, 3, 6))))
        sequence = make_sequence(
            [0, 1, 2, 3],
            output_ids=output_ids,
            allowed_token_ids=tuple(allowed),
            bad_words=tuple(map(tuple, words)),
        )
        logits = torch.randn(1, 6)
        found = adjust_logits(logits, [sequence])
        without_bad = NoBadWordsLogitsProcessor(words)(torch.tensor([output_ids or [5]]), logits)
        expected = torch.full_like(logits, -math.inf)
        expected[:, allowed] = without_bad[:, allowed]
        is_bad = found == sampler._LEAST
        assert torch.equal(found.masked_fill(is_bad, -math.inf), expected)
        assert int(draw(logits, [sequence])[0].token_id) in allowed


def test_ids_outside_the_vocabulary_change_nothing() -> None:
    """The gateway should have refused such a request; no other row may be affected."""
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(0))
    sequence = make_sequence(
        [4], logit_bias={-1: 9.0, 20: 9.0}, min_tokens=2, ending_ids=frozenset({20, 10**9})
    )

    assert draw(logits, [sequence])[0].token_id == int(logits.argmax())


def test_logprobs_are_of_the_raw_logits() -> None:
    """Before bias, penalties and temperature; of the chosen token and the most likely ones."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    expected = torch.log_softmax(logits, -1)
    sequences = [
        make_sequence([4], logprobs=0, logit_bias={9: 100.0}),
        make_sequence([4], logprobs=3, temperature=2.0),
        make_sequence([4]),
        make_sequence([4], logprobs=50, presence_penalty=1.0),
    ]

    samples = draw(logits, sequences)

    assert samples[0].token_id == 9
    for row in (0, 1, 3):
        chosen = float(expected[row, samples[row].token_id])
        assert math.isclose(samples[row].logprob, chosen, abs_tol=1e-5)
    assert [len(s.top_logprobs) for s in samples] == [0, 3, 0, 50]
    ids, values = zip(*samples[1].top_logprobs, strict=True)
    assert list(ids) == expected[1].topk(3).indices.tolist()
    torch.testing.assert_close(torch.tensor(values), expected[1].topk(3).values)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_nan_fails_alone(temperature: float) -> None:
    """Its neighbours' draws are unchanged."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    sequences = [make_sequence([4], seed=i, temperature=temperature) for i in range(3)]
    expected = draw(logits, sequences)
    logits[1, 17] = float("nan")

    found = sample(logits, sequences)

    assert isinstance(found[1], RowFailed)
    assert [found[0], found[2]] == [expected[0], expected[2]]


def test_half_precision_logits_are_sampled_in_float32() -> None:
    """bfloat16 logits give the tokens of their float32 values."""
    logits = torch.randn(8, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    sequences = [make_sequence([4], seed=i, temperature=0.9, top_p=0.9) for i in range(8)]

    assert draw(logits, sequences) == draw(logits.float(), sequences)


# --- the allowed tokens, compared with a sort of one row in float64 ---------------------------


def allowed_by_reference(scores: Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The allowed tokens of one row, by sorting in float64. scores (vocab_size,)."""
    order = scores.argsort(descending=True).tolist()
    kept = order[: top_k or len(order)]
    probabilities = torch.softmax(scores[kept].double(), 0).tolist()
    nucleus, mass = [], 0.0
    for token_id, probability in zip(kept, probabilities, strict=True):
        if mass >= top_p and top_p < 1.0:
            break
        nucleus.append(token_id)
        mass += probability
    lowest = float(scores.max()) + (math.log(min_p) if min_p else -math.inf)
    return {token_id for token_id in nucleus if float(scores[token_id]) >= lowest}


@pytest.mark.parametrize("vocab_size", [50, 3000])
def test_the_allowed_sets_are_exact(vocab_size: int) -> None:
    """All combinations in one batch, also flat rows, whose nucleus has more than 1024 tokens."""
    torch.manual_seed(0)
    settings = [
        (k, p, m)
        for k in (0, 1, 7, 40, 2000)
        for p in (1.0, 0.99, 0.7, 0.05)
        for m in (0.0, 0.02, 0.5, 1.0)
    ]
    for scale in (0.3, 4.0):
        scores = torch.randn(len(settings), vocab_size) * scale
        top_k, top_p, min_p = (torch.tensor(column) for column in zip(*settings, strict=True))

        lowest = find_allowed(scores, top_k, top_p, min_p).lowest

        for row, setting in enumerate(settings):
            found = set((scores[row] >= lowest[row]).nonzero().flatten().tolist())
            assert found == allowed_by_reference(scores[row], *setting), setting


# --- the hash behind the draws ----------------------------------------------------------------

MASK = 2**64 - 1


def mix(z: int) -> int:
    """SplitMix64's finaliser, as published."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def rows(*keys: int) -> torch.Tensor:
    return torch.tensor(keys, dtype=torch.int64)[:, None]


def test_the_tensor_hash_is_the_documented_one() -> None:
    """Compared with the definition in Python's unbounded integers, for keys of both signs."""
    token_ids = [0, 1, 7, 150_000]
    keys = [row_key(seed, 3, 11) for seed in (0, 1, 2, 3, 2**63 - 1)]
    assert min(keys) < 0 < max(keys)

    found = uniform(rows(*keys), torch.tensor(token_ids))

    for key, values in zip(keys, found.tolist(), strict=True):
        for token_id, value in zip(token_ids, values, strict=True):
            bits = mix((key + (token_id + 1) * 0x9E3779B97F4A7C15) & MASK)
            assert math.isclose(value, (bits >> 11) / 2**53, rel_tol=1e-6)


def test_the_first_hashes_never_change() -> None:
    """Another hash would change the output of jobs that resume after a deployment."""
    assert row_key(0, 0, 0) == 2558736989570252433
    assert row_key(42, 1, 7) == -3065441783940111817


def test_noise_of_neighbouring_draws_is_uncorrelated() -> None:
    """Neighbours in seed, choice, position and token id: correlation within five standard
    deviations."""
    ids = torch.arange(50_000)
    base = uniform(rows(row_key(7, 0, 0)), ids)[0]
    neighbours = [
        uniform(rows(row_key(8, 0, 0)), ids)[0],
        uniform(rows(row_key(7, 1, 0)), ids)[0],
        uniform(rows(row_key(7, 0, 1)), ids)[0],
        base.roll(1),
    ]

    for other in neighbours:
        correlation = float(torch.corrcoef(torch.stack([base, other]))[0, 1])
        assert abs(correlation) < 5 / math.sqrt(len(ids))


def test_gumbel_noise_is_finite_at_both_ends() -> None:
    """Of the range of `uniform`."""
    assert gumbel(torch.tensor([2.0**-54, 1.0 - 2.0**-24])).isfinite().all()
