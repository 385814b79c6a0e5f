"""The hash used for sampling: its definition, its uniformity, and its independence of the batch."""

import math

import torch

from workers.model.sampler import gumbel, row_key, uniform

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
