"""Chooses each row's next token, all rows together.

Grammar → bias and penalties → temperature → top-k, top-p, min-p → Gumbel noise → argmax. The noise
is a function of the row's seed and position (see `noise`), so a token depends only on its own
sequence. Options that no row uses are skipped: greedy is one argmax.

Log probabilities are of the raw logits in float32, before penalties and temperature.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from contract.jobs import SamplingParams
from workers.engine.interface import RowFailed, Sample
from workers.engine.masks import StepMasks
from workers.engine.sequence import Sequence
from workers.model.kernels import likeliest
from workers.model.noise import add_gumbel_noise, gumbel, row_key, uniform
from workers.model.penalties import adjust_logits, asks_for_change
from workers.model.staging import to_device
from workers.model.thresholds import find_allowed

# A lower temperature means greedy: the scaled logits would overflow float32.
LOWEST_TEMPERATURE = 1e-5
_NOT_FINITE = "the model's logits are not finite numbers"


def sample(
    logits: Tensor,
    sequences: Seq[Sequence],
    find_likeliest: Callable[[Tensor], Tensor] = likeliest,
    masks: StepMasks | None = None,
) -> list[Sample | RowFailed]:
    """logits (num_rows, vocab_size), any float type; row i belongs to sequence i."""
    if not sequences:
        return []
    if masks is None and all(map(_is_plain, sequences)):
        return [
            Sample(token_id) if token_id >= 0 else RowFailed(_NOT_FINITE)
            for token_id in find_likeliest(logits).tolist()
        ]
    raw = logits.float()
    scores = adjust_logits(_mask(raw, sequences, masks), sequences)
    token_ids = scores.argmax(-1)
    drawing = [row for row, sequence in enumerate(sequences) if _draws(sequence)]
    if drawing:
        index = to_device(np.array(drawing), raw.device)
        token_ids[index] = _draw(scores[index], [sequences[row] for row in drawing])
    samples = _samples(raw, token_ids, sequences)
    # argmax returns NaN if there is one, so checking the chosen logit is enough.
    is_finite = raw.gather(1, token_ids[:, None])[:, 0].isfinite().tolist()
    return [
        sample if finite else RowFailed(_NOT_FINITE)
        for sample, finite in zip(samples, is_finite, strict=True)
    ]


def _mask(logits: Tensor, sequences: Seq[Sequence], masks: StepMasks | None) -> Tensor:
    """The logits (num_rows, vocab_size), with -inf for tokens that a grammar forbids; a copy unless
    no row is constrained."""
    if masks is None:
        return logits
    rows, forbidden = masks.of(sequences)
    if not rows:
        return logits
    index = to_device(np.array(rows), logits.device)
    mask = to_device(forbidden, logits.device)
    return logits.index_put((index,), logits[index].masked_fill_(mask, float("-inf")))


def _draws(sequence: Sequence) -> bool:
    return sequence.params.temperature >= LOWEST_TEMPERATURE


def _is_plain(sequence: Sequence) -> bool:
    """Whether only the highest logit matters."""
    is_greedy = not _draws(sequence) and not asks_for_change(sequence)
    return is_greedy and sequence.params.logprobs is None


def _draw(scores: Tensor, sequences: Seq[Sequence]) -> Tensor:
    """scores (num_rows, vocab_size), a copy that is overwritten -> token ids (num_rows,)."""
    params = [sequence.params for sequence in sequences]
    keys = [row_key(s.params.seed, s.choice_of_prompt, s.num_output) for s in sequences]
    scores /= _floats([p.temperature for p in params], scores)[:, None]
    token_ids = torch.empty(len(params), dtype=torch.int64, device=scores.device)
    limited = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0]
    wide = sorted(set(range(len(params))) - set(limited))
    if limited:
        limits = [params[row] for row in limited]
        part, index = _rows(scores, limited)
        token_ids[index], is_wide = _draw_limited(part, limits, [keys[row] for row in limited])
        if is_wide.any():
            scores[index[is_wide]] = part[is_wide]
            wide += index[is_wide].tolist()
    if wide:
        part, index = _rows(scores, wide)
        add_gumbel_noise(part, [keys[row] for row in wide])
        token_ids[index] = part.argmax(-1)
    return token_ids


def _draw_limited(
    scores: Tensor, params: Seq[SamplingParams], keys: Seq[int]
) -> tuple[Tensor, Tensor]:
    """Samples among the most likely tokens, with noise for those only.

    scores (num_rows, vocab_size) -> token ids (num_rows,), and which rows (num_rows,) may also draw
    other tokens; their ids are invalid, and forbidden scores are set to -inf.
    """
    allowed = find_allowed(
        scores,
        to_device(np.array([p.top_k for p in params]), scores.device),
        _floats([p.top_p for p in params], scores),
        _floats([p.min_p for p in params], scores),
    )
    row_keys = to_device(np.array(keys, dtype=np.int64), scores.device)[:, None]
    noisy = allowed.scores + gumbel(uniform(row_keys, allowed.token_ids))
    noisy.masked_fill_(allowed.scores < allowed.lowest, float("-inf"))
    token_ids = allowed.token_ids.gather(1, noisy.argmax(-1, keepdim=True))[:, 0]
    is_wide = ~allowed.is_complete
    if is_wide.any():
        part = scores[is_wide]
        scores[is_wide] = part.masked_fill(part < allowed.lowest[is_wide], float("-inf"))
    return token_ids, is_wide


def _floats(numbers: Seq[float], like: Tensor) -> Tensor:
    """float32 (n,) on the device of `like`."""
    return to_device(np.array(numbers, dtype=np.float32), like.device)


def _rows(scores: Tensor, rows: Seq[int]) -> tuple[Tensor, Tensor]:
    """Some rows of scores and their index; copies unless all rows are taken."""
    index = to_device(np.array(rows), scores.device)
    return (scores if list(rows) == list(range(len(scores))) else scores[index]), index


def _samples(raw: Tensor, token_ids: Tensor, sequences: Seq[Sequence]) -> list[Sample]:
    """raw logits (num_rows, vocab_size), token_ids (num_rows,) -> one sample per row."""
    samples = [Sample(token_id) for token_id in token_ids.tolist()]
    rows = [row for row, s in enumerate(sequences) if s.params.logprobs is not None]
    if not rows:
        return samples
    index = to_device(np.array(rows), raw.device)
    logprobs = torch.log_softmax(raw[index], dim=-1)
    chosen = logprobs.gather(1, token_ids[index][:, None])[:, 0].tolist()
    num_wanted = [sequences[row].params.logprobs or 0 for row in rows]
    top = torch.topk(logprobs, min(max(num_wanted), logprobs.shape[1]), dim=-1)
    for row, logprob, n, ids, values in zip(
        rows, chosen, num_wanted, top.indices.tolist(), top.values.tolist(), strict=True
    ):
        pairs = tuple(zip(ids[:n], values[:n], strict=True))
        samples[row] = Sample(samples[row].token_id, logprob, pairs)
    return samples
