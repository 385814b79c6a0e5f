"""Samples next tokens on the device, from parameters stored there, without waiting for it.

Gives the same tokens as `sampler`, for rows with only temperature, top-k, top-p and min-p.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from workers.engine.sequence import Sequence
from workers.model.gpu.request_state import (
    MIN_P,
    NOISE,
    OPEN,
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
from workers.model.thresholds import find_allowed


@dataclass(frozen=True, slots=True)
class Wishes:
    """The sampling options used by any row of a step, known to the host, to skip the others."""

    draws_limited: bool = False  # with top-k, top-p or min-p
    draws_widely: bool = False  # without


def can_draw(sequence: Sequence) -> bool:
    """Whether this sequence can be sampled on the device."""
    return sequence.params.logprobs is None and not asks_for_change(sequence)


def wishes_of(sequences: Iterable[Sequence]) -> Wishes:
    drawing = [s.params for s in sequences if s.params.temperature >= LOWEST_TEMPERATURE]
    limited = [p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in drawing]
    return Wishes(any(limited), not all(limited))


def draw(logits: Tensor, state: RequestState, rows: Tensor, wishes: Wishes) -> Tensor:
    """logits (n, vocab_size) behind each row's position, rows int64 (n,) -> drawn ids, or OPEN."""
    is_fast = logits.device.type == "cuda" and find_spec("triton") is not None
    return (draw_by_triton if is_fast else draw_by_torch)(logits, state, rows, wishes)


def draw_by_triton(logits: Tensor, state: RequestState, rows: Tensor, wishes: Wishes) -> Tensor:
    """Does `draw` by our kernels."""
    from workers.model.gpu.kernels import draw_rows

    return draw_rows(logits, state.cells, rows, is_limited=wishes.draws_limited)


def draw_by_torch(logits: Tensor, state: RequestState, rows: Tensor, wishes: Wishes) -> Tensor:
    """Does `draw` without our kernels. With limits it waits for the device."""
    raw = logits.float()
    token_ids = raw.argmax(-1)
    is_open = ~raw.gather(1, token_ids[:, None])[:, 0].isfinite()
    if wishes.draws_limited or wishes.draws_widely:
        temperatures = state.field(TEMPERATURE, rows).float()
        is_drawn = temperatures >= LOWEST_TEMPERATURE
        scores = raw / torch.where(is_drawn, temperatures, 1.0)[:, None]
        if wishes.draws_limited:
            fractions = [state.field(name, rows).float() for name in (TOP_P, MIN_P)]
            lowest = find_allowed(scores, state.field(TOP_K, rows), *fractions).lowest
            scores = scores.masked_fill(scores < lowest, float("-inf"))
        outputs = state.field(POSITION, rows) + state.field(OUTPUT_SHIFT, rows)
        keys = row_keys_at(state.field(NOISE, rows), outputs)[:, None]
        ids = torch.arange(scores.shape[1], device=scores.device)
        drawn = (scores + gumbel(uniform(keys, ids))).argmax(-1)
        token_ids = torch.where(is_drawn, drawn, token_ids)
    return torch.where(is_open, OPEN, token_ids)
