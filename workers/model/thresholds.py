"""Which tokens a row may draw: top-k, then top-p of the rest, then min-p.

Each is a minimum score. Ties with the minimum are all kept, so the set does not depend on sort
order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# The most likely tokens, sorted first. If they do not reach top-p, all are sorted.
_NUM_CANDIDATES = 1024
_NUM_TIES = 8


@dataclass(frozen=True, slots=True)
class Allowed:
    """The tokens each row may draw: those with at least its `lowest` score (num_rows, 1).

    token_ids and scores (num_rows, n): its most likely tokens, in order. is_complete (num_rows,):
    no other token may be drawn.
    """

    lowest: Tensor
    token_ids: Tensor
    scores: Tensor
    is_complete: Tensor


def find_allowed(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Allowed:
    """The tokens that may be drawn. scores (num_rows, vocab_size) float32: logits over temperature.
    top_k (num_rows,) int64, 0 for off; top_p and min_p (num_rows,) float32, 1 and 0 for off."""
    vocab_size = scores.shape[1]
    top_k = torch.where(top_k <= 0, vocab_size, top_k).clamp(max=vocab_size)[:, None]
    top_p, min_p = top_p[:, None], min_p[:, None]
    # Some more than top-k, to check for ties with the last.
    num_candidates = min(int(top_k.max()) + _NUM_TIES, _NUM_CANDIDATES, vocab_size)
    candidates, token_ids = torch.topk(scores, num_candidates, dim=-1)
    lowest = _lowest(scores, candidates, top_k, top_p, min_p)
    rows = (~_suffices(scores, candidates, top_k, top_p)).nonzero()[:, 0]
    if len(rows) > 0:
        everything = torch.sort(scores[rows], dim=-1, descending=True).values
        lowest[rows] = _lowest(scores[rows], everything, top_k[rows], top_p[rows], min_p[rows])
    is_complete = candidates[:, -1] < lowest[:, 0]
    if num_candidates == vocab_size:
        is_complete = torch.ones_like(is_complete)
    return Allowed(lowest, token_ids, candidates, is_complete)


def _suffices(scores: Tensor, candidates: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Whether the candidates (num_rows, n), sorted, decide top-k and top-p: bool (num_rows,)."""
    vocab_size, num_candidates = scores.shape[1], candidates.shape[1]
    decides_k = (top_k >= vocab_size) | (top_k <= num_candidates)
    # If top-k is among the candidates, so is top-p; otherwise their mass must reach it.
    mass = (torch.logsumexp(candidates, -1) - torch.logsumexp(scores, -1)).exp()[:, None]
    decides_p = (top_p >= 1.0) | (mass > top_p) | (top_k <= num_candidates)
    return (decides_k & decides_p)[:, 0]


def _lowest(
    scores: Tensor, candidates: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Returns all three thresholds together (num_rows, 1); each parameter (num_rows, 1)."""
    lowest = _lowest_of_top_k(candidates, top_k)
    lowest = torch.maximum(lowest, _lowest_of_top_p(scores, candidates, lowest, top_p))
    return torch.maximum(lowest, candidates[:, :1] + torch.log(min_p))  # log 0 = -inf: all


def _lowest_of_top_k(candidates: Tensor, top_k: Tensor) -> Tensor:
    """For candidates (num_rows, n) sorted -> (num_rows, 1); -inf if top-k is beyond them (off)."""
    lowest = candidates.gather(1, (top_k - 1).clamp(max=candidates.shape[1] - 1))
    return torch.where(top_k > candidates.shape[1], float("-inf"), lowest)


def _lowest_of_top_p(scores: Tensor, candidates: Tensor, lowest: Tensor, top_p: Tensor) -> Tensor:
    """For the smallest set whose mass, of what `lowest` leaves, reaches top_p. (num_rows, 1)."""
    kept = torch.where(candidates >= lowest, candidates, float("-inf"))
    # Without top-k the mass is that of the whole vocabulary, which may exceed the candidates.
    unlimited = torch.isneginf(lowest)
    total = torch.where(
        unlimited, torch.logsumexp(scores, -1, True), torch.logsumexp(kept, -1, True)
    )
    probabilities = (kept - total).exp()
    before = probabilities.cumsum(-1) - probabilities
    num_kept = (before < top_p).sum(-1, keepdim=True).clamp(min=1)
    lowest_of_top_p = candidates.gather(1, num_kept - 1)
    return torch.where(top_p >= 1.0, float("-inf"), lowest_of_top_p)
