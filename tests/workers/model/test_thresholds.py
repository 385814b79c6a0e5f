"""The tokens that a row may draw, compared with a sort of one row in float64."""

import math

import pytest
import torch
from torch import Tensor

from workers.model.sampler import find_allowed


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
