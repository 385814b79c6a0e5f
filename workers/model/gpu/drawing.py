"""Samples next tokens on the device, from parameters stored there, without waiting for it.

Gives the same tokens as `sampler`, for rows with only temperature, top-k, top-p and min-p.
Undecided rows are left to the host's `sampler`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.sequence import Sequence
from workers.model.gpu.request_state import (
    MIN_P,
    NOISE,
    OUTPUT_SHIFT,
    POSITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    RequestState,
)
from workers.model.noise import gumbel, row_keys_at, uniform
from workers.model.penalties import asks_for_change
from workers.model.sampler import LOWEST_TEMPERATURE
from workers.model.thresholds import find_likeliest

OPEN = -1  # instead of a token id: not decided here, or not a number


@dataclass(frozen=True, slots=True)
class Wishes:
    """The sampling options used by any row of a step, known to the host, to skip the others."""

    draws_limited: bool = False  # with top-k, top-p or min-p
    draws_widely: bool = False


def can_draw(sequence: Sequence) -> bool:
    """Whether this sequence can be sampled on the device."""
    return sequence.params.logprobs is None and not asks_for_change(sequence)


def wishes_of(sequences: Iterable[Sequence]) -> Wishes:
    drawing = [s.params for s in sequences if s.params.temperature >= LOWEST_TEMPERATURE]
    limited = [p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in drawing]
    return Wishes(any(limited), not all(limited))


def draw(logits: Tensor, state: RequestState, rows: Tensor, wishes: Wishes) -> Tensor:
    """logits (n, vocab_size) behind the position of each row, rows int64 (n,) -> ids or OPEN."""
    raw = logits.float()
    token_ids = raw.argmax(-1)
    is_open = ~raw.gather(1, token_ids[:, None])[:, 0].isfinite()
    if wishes.draws_limited or wishes.draws_widely:
        temperatures = state.field(TEMPERATURE, rows).float()
        is_drawn = temperatures >= LOWEST_TEMPERATURE
        scores = raw / torch.where(is_drawn, temperatures, 1.0)[:, None]
        outputs = state.field(POSITION, rows) + state.field(OUTPUT_SHIFT, rows)
        keys = row_keys_at(state.field(NOISE, rows), outputs)[:, None]
        drawn, is_limited, is_undecided = _draw(scores, state, rows, keys, wishes)
        token_ids = torch.where(is_drawn, drawn, token_ids)
        is_open = is_open | (is_drawn & is_limited & is_undecided)
    return torch.where(is_open, OPEN, token_ids)


def _draw(
    scores: Tensor, state: RequestState, rows: Tensor, keys: Tensor, wishes: Wishes
) -> tuple[Tensor, Tensor, Tensor]:
    """scores (n, vocab_size), keys (n, 1) -> ids, which rows are limited, which are undecided."""
    top_k = state.field(TOP_K, rows)
    top_p, min_p = state.field(TOP_P, rows).float(), state.field(MIN_P, rows).float()
    is_limited = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    is_undecided = torch.zeros_like(is_limited)
    drawn = torch.zeros_like(rows)
    if wishes.draws_limited:
        allowed = find_likeliest(scores, top_k, top_p, min_p)
        noisy = allowed.scores + gumbel(uniform(keys, allowed.token_ids))
        noisy = noisy.masked_fill(allowed.scores < allowed.lowest, float("-inf"))
        drawn = allowed.token_ids.gather(1, noisy.argmax(-1, keepdim=True))[:, 0]
        is_undecided = ~allowed.is_complete
    if wishes.draws_widely:
        ids = torch.arange(scores.shape[1], device=scores.device)
        widely = (scores + gumbel(uniform(keys, ids))).argmax(-1)
        drawn = torch.where(is_limited, drawn, widely)
    return drawn, is_limited, is_undecided
