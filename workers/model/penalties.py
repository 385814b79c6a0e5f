"""Changes logits as rows request: grammars, bias, penalties, temporarily banned tokens.

All rows together, without waiting for the device. Other rows are not touched. Token ids outside the
vocabulary are ignored; requests are validated earlier.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from contract.jobs import SamplingParams
from workers.engine.masks import StepMasks
from workers.engine.sequence import Sequence
from workers.model.staging import to_device

# For the sequences and the number of tokens that each has: ids, and whether each is output, (n, L).
# Behind a sequence's end its own ids are repeated, and are no output.
FindKnown = Callable[[Seq[Sequence], Seq[int]], tuple[Tensor, Tensor]]


def adjust_logits(
    logits: Tensor,
    sequences: Seq[Sequence],
    masks: StepMasks | None = None,
    lengths: Seq[int] | None = None,
    find_known: FindKnown | None = None,
) -> Tensor:
    """logits (num_rows, vocab_size) of any float type, one row per sequence -> the same if no row
    asks for a change, else a changed copy in float32. Waits for `masks`.

    `lengths`: the number of tokens before the one that is drawn, where the host does not know all
    of them; `find_known` does. Order: masks, bias, repetition, presence and frequency penalty, bans
    until `min_tokens`.
    """
    lengths = [s.num_known for s in sequences] if lengths is None else lengths
    num_outputs = [n - s.num_prompt for s, n in zip(sequences, lengths, strict=True)]
    rows = [i for i, s in enumerate(sequences) if _is_changed(s, num_outputs[i])]
    constrained = None if masks is None else masks.of(sequences)
    if not rows and not (constrained and constrained[0]):
        return logits
    scores = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if constrained and constrained[0]:
        index, mask = (to_device(np.array(part), scores.device) for part in constrained)
        scores[index] = scores[index].masked_fill_(mask, float("-inf"))
    flat = scores.view(-1)
    params = {row: sequences[row].params for row in rows}
    vocab_size = scores.shape[1]
    biases = [
        (row * vocab_size + token_id, value)
        for row, p in params.items()
        for token_id, value in p.logit_bias.items()
        if 0 <= token_id < vocab_size
    ]
    if biases:
        at, values = zip(*biases, strict=True)
        index = to_device(np.array(at, np.int64), flat.device)
        flat.index_add_(0, index, to_device(np.array(values, np.float32), flat.device))
    penalised = [row for row in rows if is_penalised(sequences[row])]
    if penalised:
        some = [sequences[row] for row in penalised]
        some_lengths = [lengths[row] for row in penalised]
        if find_known is None:
            known = _known_tokens(some, some_lengths, scores.device)
        else:
            known = find_known(some, some_lengths)
        penalise(scores, penalised, [sequence.params for sequence in some], *known)
    banned = [
        row * vocab_size + token_id
        for row in rows
        if num_outputs[row] < params[row].min_tokens
        for token_id in sequences[row].ending_ids
        if 0 <= token_id < vocab_size
    ]
    if banned:
        index = to_device(np.array(banned, np.int64), flat.device)
        flat.index_fill_(0, index, float("-inf"))
    return scores


def asks_for_change(sequence: Sequence) -> bool:
    """Whether the sequence's logits are changed before a token is chosen."""
    return _is_changed(sequence, sequence.num_output)


def _is_changed(sequence: Sequence, num_output: int) -> bool:
    params = sequence.params
    return bool(params.logit_bias) or num_output < params.min_tokens or is_penalised(sequence)


def is_penalised(sequence: Sequence) -> bool:
    """Whether the sequence's logits depend on its tokens."""
    params = sequence.params
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def penalise(
    scores: Tensor, rows: Seq[int], params: Seq[SamplingParams], ids: Tensor, is_output: Tensor
) -> None:
    """Applies penalties to rows of scores (num_rows, vocab_size), contiguous float32, in place. ids
    int64 and is_output bool (n, L): of those rows, see FindKnown. Does not wait for the device."""
    fields = [
        (row, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
        for row, p in zip(rows, params, strict=True)
    ]
    numbers = to_device(np.array(fields, dtype=np.float64).T[:, :, None], scores.device)
    row, repetition, presence, frequency = numbers
    at = (ids + row.long() * scores.shape[1]).view(-1)
    flat = scores.view(-1)
    values = flat[at].view(ids.shape)
    counts = None
    if any(p.presence_penalty or p.frequency_penalty for p in params):
        # The logits' own places count the tokens: no memory for it, and only these are read.
        flat.index_fill_(0, at, 0.0)
        flat.index_add_(0, at, is_output.to(torch.float32).view(-1))
        counts = flat[at].view(ids.shape).double()
    if any(p.repetition_penalty != 1.0 for p in params):
        factor = repetition.float()
        values = torch.where(values > 0, values / factor, values * factor)
    if counts is not None:
        values -= torch.where(counts > 0, frequency * counts + presence, 0.0).float()
    flat.index_put_((at,), values.view(-1))  # the same number wherever a token is repeated


def _known_tokens(
    sequences: Seq[Sequence], lengths: Seq[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Does FindKnown by the sequences themselves; prompts only where they count."""
    begins = [0 if s.params.repetition_penalty != 1.0 else s.num_prompt for s in sequences]
    starts = np.array([s.num_prompt for s in sequences]) - begins
    ends = np.array(lengths) - begins
    steps = np.arange(ends.max())
    is_known = steps < ends[:, None]
    ids = np.zeros(is_known.shape, dtype=np.int64)
    tokens = chain.from_iterable(s.token_ids[n:] for s, n in zip(sequences, begins, strict=True))
    ids[is_known] = np.fromiter(tokens, np.int64, ends.sum())
    ids = np.where(is_known, ids, ids[:, :1])
    is_output = is_known & (steps >= starts[:, None])
    return to_device(ids, device), to_device(is_output, device)
