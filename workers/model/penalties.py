"""Changes logits as rows request: grammars, bias, penalties, temporarily banned tokens.

All rows together. Other rows are not touched. Token ids outside the
vocabulary are ignored; requests are validated earlier.
"""

from collections.abc import Sequence as Seq
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from contract.jobs import SamplingParams
from workers.engine.masks import StepMasks
from workers.engine.sequence import Sequence


def adjust_logits(
    logits: Tensor, sequences: Seq[Sequence], masks: StepMasks | None = None
) -> Tensor:
    """logits (num_rows, vocab_size) of any float type, one row per sequence -> the same if no row
    asks for a change, else a changed copy in float32. Waits for `masks`.

    Order: masks, bias, repetition, presence and frequency penalty, bans until `min_tokens`.
    """
    rows = [i for i, s in enumerate(sequences) if asks_for_change(s)]
    constrained = None if masks is None else masks.of(sequences)
    if not rows and not (constrained and constrained[0]):
        return logits
    scores = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if constrained and constrained[0]:
        index, mask = (
            torch.as_tensor(np.array(part), device=scores.device) for part in constrained
        )
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
        index = torch.tensor(at, device=flat.device)
        flat.index_add_(0, index, torch.tensor(values, dtype=torch.float32, device=flat.device))
    penalised = [row for row in rows if _is_penalised(sequences[row])]
    if penalised:
        some = [sequences[row] for row in penalised]
        known = _known_tokens(some, scores.device)
        penalise(scores, penalised, [sequence.params for sequence in some], *known)
    banned = [
        row * vocab_size + token_id
        for row in rows
        if sequences[row].num_output < params[row].min_tokens
        for token_id in sequences[row].ending_ids
        if 0 <= token_id < vocab_size
    ]
    if banned:
        flat.index_fill_(0, torch.tensor(banned, device=flat.device), float("-inf"))
    return scores


def asks_for_change(sequence: Sequence) -> bool:
    """Whether the sequence's logits are changed before a token is chosen."""
    params = sequence.params
    return (
        bool(params.logit_bias)
        or sequence.num_output < params.min_tokens
        or _is_penalised(sequence)
    )


def _is_penalised(sequence: Sequence) -> bool:
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
    int64 and is_output bool (n, L): of those rows, see _known_tokens. Does not wait for the device,
    as vLLM needs it."""
    fields = [
        (row, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
        for row, p in zip(rows, params, strict=True)
    ]
    numbers = torch.tensor(fields, dtype=torch.float64, pin_memory=scores.is_cuda)
    numbers = numbers.to(scores.device, non_blocking=True)
    row, repetition, presence, frequency = numbers.T[:, :, None]
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


def _known_tokens(sequences: Seq[Sequence], device: torch.device) -> tuple[Tensor, Tensor]:
    """The sequences' tokens, and whether each is output, (n, L); prompts only where they count.
    Behind a sequence's end its own ids are repeated, and are no output."""
    begins = [0 if s.params.repetition_penalty != 1.0 else s.num_prompt for s in sequences]
    starts = np.array([s.num_prompt for s in sequences]) - begins
    ends = np.array([s.num_known for s in sequences]) - begins
    steps = np.arange(ends.max())
    is_known = steps < ends[:, None]
    ids = np.zeros(is_known.shape, dtype=np.int64)
    tokens = chain.from_iterable(s.token_ids[n:] for s, n in zip(sequences, begins, strict=True))
    ids[is_known] = np.fromiter(tokens, np.int64, ends.sum())
    ids = np.where(is_known, ids, ids[:, :1])
    is_output = is_known & (steps >= starts[:, None])
    return torch.as_tensor(ids, device=device), torch.as_tensor(is_output, device=device)
