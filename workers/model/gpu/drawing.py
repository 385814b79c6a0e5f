"""Samples next tokens on the device, from parameters stored there, without waiting for it.

Gives the same tokens as `sampler`.
"""

from collections.abc import Sequence as Seq
from importlib.util import find_spec

from torch import Tensor

from workers.engine.masks import StepMasks
from workers.engine.sequence import Sequence
from workers.model.gpu.request_state import RequestState
from workers.model.penalties import adjust_logits
from workers.model.sampler import choose, draws, limits


def draw(
    logits: Tensor,
    state: RequestState,
    rows: Tensor,
    sequences: Seq[Sequence],
    lengths: Seq[int],
    masks: StepMasks | None = None,
) -> Tensor:
    """logits (n, vocab_size) behind each row's position, rows int64 (n,) of the sequences, of which
    each has so many tokens, the last perhaps known to the device alone -> drawn ids, or OPEN. Waits
    for `masks`, not for the device."""
    is_fast = logits.device.type == "cuda" and find_spec("triton") is not None
    way = draw_by_triton if is_fast else draw_by_torch
    return way(logits, state, rows, sequences, lengths, masks)


def draw_by_triton(
    logits: Tensor,
    state: RequestState,
    rows: Tensor,
    sequences: Seq[Sequence],
    lengths: Seq[int],
    masks: StepMasks | None = None,
) -> Tensor:
    """Does `draw` by our kernels."""
    from workers.model.gpu.kernels import draw_rows

    scores = adjust_logits(logits, sequences, masks, lengths, state.known)
    is_limited = any(draws(s) and limits(s.params) for s in sequences)
    return draw_rows(scores, state.cells, rows, is_limited=is_limited)


def draw_by_torch(
    logits: Tensor,
    state: RequestState,
    rows: Tensor,
    sequences: Seq[Sequence],
    lengths: Seq[int],
    masks: StepMasks | None = None,
) -> Tensor:
    """Does `draw` as the sampler does, which may wait for the device."""
    scores = adjust_logits(logits, sequences, masks, lengths, state.known)
    num_outputs = [n - s.num_prompt for s, n in zip(sequences, lengths, strict=True)]
    return choose(logits, scores, sequences, num_outputs)
