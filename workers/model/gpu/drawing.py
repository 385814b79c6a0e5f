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
    *,
    by_triton: bool | None = None,
) -> Tensor:
    """logits (n, vocab_size) behind each row's position, rows int64 (n,) of the sequences, of which
    each has so many tokens, the last perhaps known to the device alone -> drawn ids, or OPEN. Waits
    for `masks`, and for the device only if Triton's kernels do not draw: by default those on a
    GPU."""
    scores = adjust_logits(logits, sequences, masks, lengths, state.known)
    if by_triton is None:
        by_triton = logits.device.type == "cuda" and find_spec("triton") is not None
    if not by_triton:
        num_outputs = [n - s.num_prompt for s, n in zip(sequences, lengths, strict=True)]
        return choose(logits, scores, sequences, num_outputs)
    from workers.model.gpu.kernels import draw_rows

    is_limited = any(draws(s) and limits(s.params) for s in sequences)
    return draw_rows(scores, state.cells, rows, is_limited=is_limited)
