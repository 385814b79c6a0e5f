"""Changes logits as single rows request: bias, penalties, temporarily banned tokens.

Other rows are not touched. Token ids outside the vocabulary are ignored; requests are validated
earlier.
"""

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.engine.sequence import Sequence
from workers.model.staging import to_device


def adjust_logits(logits: Tensor, sequences: Seq[Sequence]) -> Tensor:
    """logits (num_rows, vocab_size) float32, one row per sequence -> the same, or a changed copy.

    Order: bias, repetition, presence and frequency penalty, bans until `min_tokens`.
    """
    rows = [row for row, sequence in enumerate(sequences) if asks_for_change(sequence)]
    if not rows:
        return logits
    adjusted = logits.clone()
    for row in rows:
        _adjust_row(adjusted[row], sequences[row])
    return adjusted


def asks_for_change(sequence: Sequence) -> bool:
    """Whether the sequence's logits are changed before a token is chosen."""
    params = sequence.params
    return (
        bool(params.logit_bias)
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or sequence.num_output < params.min_tokens
    )


def _adjust_row(logits: Tensor, sequence: Sequence) -> None:
    """logits (vocab_size,), changed in place."""
    params = sequence.params
    vocab_size = logits.shape[0]
    if params.logit_bias:
        bias = {i: value for i, value in params.logit_bias.items() if 0 <= i < vocab_size}
        logits.index_add_(0, _ids(list(bias), logits), _floats(list(bias.values()), logits))
    if params.repetition_penalty != 1.0:
        seen = _ids(sequence.token_ids, logits)
        values = logits[seen]
        logits[seen] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        ids, counts = np.unique(
            np.array(sequence.token_ids[sequence.num_prompt :], dtype=np.int64), return_counts=True
        )
        penalties = params.frequency_penalty * counts + params.presence_penalty
        logits[_ids(ids, logits)] -= _floats(penalties, logits)
    if sequence.num_output < params.min_tokens:
        banned = [i for i in sequence.ending_ids if 0 <= i < vocab_size]
        logits[_ids(banned, logits)] = float("-inf")


def _floats(numbers: npt.ArrayLike, logits: Tensor) -> Tensor:
    return to_device(np.asarray(numbers, dtype=np.float32), logits.device)


def _ids(token_ids: npt.ArrayLike, logits: Tensor) -> Tensor:
    return to_device(np.asarray(token_ids, dtype=np.int64), logits.device)
