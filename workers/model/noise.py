"""Sampling noise as a function of (seed, choice, position, token id). No generator, no state.

A retry, a preemption or another worker draws the same noise, alone or in any batch. The hash is
the finaliser of SplitMix64 (Steele, Lea, Flood 2014; constants by Stafford, "Mix13"):

    mix(z):  z = (z ^ z >>> 30) * 0xBF58476D1CE4E5B9
             z = (z ^ z >>> 27) * 0x94D049BB133111EB
             z ^ z >>> 31
    row      = mix(mix(mix(seed + G) + choice + G) + position + G)    G = 0x9E3779B97F4A7C15
    hash     = mix(row + (token_id + 1) * G)                          all modulo 2^64
    u        = (hash >>> 11) / 2^53                                   in (0, 1)
    gumbel   = -log(-log(1 - u))

The hash is integer arithmetic and so the same on every device. `u` is small where the noise is
large, so that float32 resolves the tail that decides a draw.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_MASK_64 = 2**64 - 1
# On a CPU the intermediate tensors of such a slice fit the caches.
_SLICE_ELEMENTS = 2**17
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24  # in float32


def row_key(seed: int, choice: int, position: int) -> int:
    """The 64-bit key of output `position` of one choice, as a signed integer."""
    key = seed
    for value in (0, choice, position):
        key = _mix((key + value + _GOLDEN) & _MASK_64)
    return _signed(key)


def add_gumbel_noise(scores: Tensor, keys: Seq[int]) -> None:
    """Adds each row's noise to scores (num_rows, vocab_size), float32, in place."""
    num_rows, vocab_size = scores.shape
    row_keys = torch.tensor(keys, dtype=torch.int64, device=scores.device)[:, None]
    width = vocab_size
    if scores.device.type == "cpu":
        width = max(1, _SLICE_ELEMENTS // max(1, num_rows))
    for first in range(0, vocab_size, width):
        part = scores[:, first : first + width]
        ids = torch.arange(first, first + part.shape[1], device=scores.device)
        part += gumbel(uniform(row_keys, ids))


def uniform(row_keys: Tensor, token_ids: Tensor) -> Tensor:
    """row_keys (num_rows, 1) and token_ids (n,), int64 -> (num_rows, n) float32 in (0, 1)."""
    bits = _mixed(row_keys + (token_ids + 1) * _signed(_GOLDEN))
    fraction = _shift_right(bits, 11).to(torch.float32).mul_(2.0**-53)
    return fraction.clamp_(2.0**-54, _LARGEST_BELOW_ONE)


def gumbel(fraction: Tensor) -> Tensor:
    """Uniform float32 in (0, 1) -> standard Gumbel noise, in place."""
    return fraction.neg_().log1p_().neg_().log_().neg_()


def _mixed(bits: Tensor) -> Tensor:
    """`mix` of each int64, in place."""
    bits ^= _shift_right(bits, 30)
    bits *= _signed(_MULTIPLIER_1)
    bits ^= _shift_right(bits, 27)
    bits *= _signed(_MULTIPLIER_2)
    bits ^= _shift_right(bits, 31)
    return bits


def _shift_right(bits: Tensor, num_bits: int) -> Tensor:
    """Logical shift of int64: torch's own fills with the sign bit."""
    return (bits >> num_bits).bitwise_and_(2 ** (64 - num_bits) - 1)


def _mix(bits: int) -> int:
    bits = ((bits ^ bits >> 30) * _MULTIPLIER_1) & _MASK_64
    bits = ((bits ^ bits >> 27) * _MULTIPLIER_2) & _MASK_64
    return bits ^ bits >> 31


def _signed(bits: int) -> int:
    """The int64 with the same 64 bits."""
    return bits - 2**64 if bits >= 2**63 else bits
