"""Log probabilities of chosen tokens and of the most likely ones, of the raw logits in float32.

They are computed where the logits are, and read together.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from workers.engine.interface import Sample
from workers.engine.sequence import Sequence
from workers.model.staging import to_device


def rank(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """logits (n, vocab_size), any float type; token_ids int64 (n,) -> float64 (n, 1 + 2 * num_top):
    each token's log probability, then the most likely ids, then theirs."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top = torch.topk(logprobs, num_top, dim=-1)
    parts = logprobs.gather(1, token_ids[:, None]), top.indices, top.values
    return torch.cat([part.double() for part in parts], dim=1)


def rank_chosen(logits: Tensor, token_ids: Tensor, sequences: Seq[Sequence]) -> Tensor | None:
    """Does `rank` for the rows that ask for log probabilities; None if none does. Negative ids give
    numbers without a meaning."""
    rows = [row for row, s in enumerate(sequences) if s.params.logprobs is not None]
    if not rows:
        return None
    num_top = max(sequences[row].params.logprobs or 0 for row in rows)
    index = to_device(np.array(rows), logits.device)
    return rank(logits[index], token_ids[index].clamp(min=0), min(num_top, logits.shape[1]))


def ranked_sample(token_id: int, ranked: Seq[float], num_wanted: int) -> Sample:
    """The token with its numbers from a row of `rank`, of which `num_wanted` are shown."""
    num_top = len(ranked) // 2
    ids = map(int, ranked[1 : 1 + min(num_wanted, num_top)])
    return Sample(token_id, ranked[0], tuple(zip(ids, ranked[1 + num_top :], strict=False)))


def to_samples(
    token_ids: Seq[int], ranked: Seq[Seq[float]], sequences: Seq[Sequence]
) -> list[Sample]:
    """One sample for each sequence; `ranked` of those that ask, in order."""
    if not ranked:
        return list(map(Sample, token_ids))
    rows = iter(ranked)
    return [
        Sample(token_id)
        if sequence.params.logprobs is None
        else ranked_sample(token_id, next(rows), sequence.params.logprobs)
        for token_id, sequence in zip(token_ids, sequences, strict=True)
    ]
