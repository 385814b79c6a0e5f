"""Chooses each row's next token, all rows together.

Grammar, bias, penalties and temporarily banned tokens → temperature → top-k, top-p, min-p → Gumbel
noise → argmax. The noise is a function of the row's seed and position, so a token depends only on
its own sequence. Options that no row uses are skipped: greedy is one argmax.

top-k, top-p of the rest, and min-p each are a minimum score. Ties with the minimum are all kept, so
the set does not depend on sort order.

Log probabilities are those of the raw logits in float32, and are read with the tokens.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from contract.jobs import SamplingParams
from workers.engine.interface import RowFailed, Sample
from workers.engine.masks import StepMasks
from workers.engine.sequence import Sequence


def rank(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """logits (n, vocab_size), any float type; token_ids int64 (n,) -> float64 (n, 1 + 2 * num_top):
    each token's log probability, then the most likely ids, then theirs."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top = torch.topk(logprobs, num_top, dim=-1)
    parts = logprobs.gather(1, token_ids[:, None]), top.indices, top.values
    return torch.cat([part.double() for part in parts], dim=1)


def _rank_chosen(logits: Tensor, token_ids: Tensor, sequences: Seq[Sequence]) -> Tensor | None:
    """Does `rank` for the rows that ask for log probabilities; None if none does. Negative ids give
    numbers without a meaning."""
    rows = [row for row, s in enumerate(sequences) if s.params.logprobs is not None]
    if not rows:
        return None
    num_top = max(sequences[row].params.logprobs or 0 for row in rows)
    index = torch.tensor(rows, device=logits.device)
    return rank(logits[index], token_ids[index].clamp(min=0), min(num_top, logits.shape[1]))


def ranked_sample(token_id: int, ranked: Seq[float], num_wanted: int) -> Sample:
    """The token with its numbers from a row of `rank`, of which `num_wanted` are shown."""
    num_top = len(ranked) // 2
    ids = map(int, ranked[1 : 1 + min(num_wanted, num_top)])
    return Sample(token_id, ranked[0], tuple(zip(ids, ranked[1 + num_top :], strict=False)))


def _to_samples(
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


# A lower temperature means greedy: the scaled logits would overflow float32.
LOWEST_TEMPERATURE = 1e-5
# Of the last token of a bad word: finite, so that one is taken where nothing else is allowed.
_LEAST = -1e30
_NO_TOKEN = -1  # the row's logits are not finite numbers
_NOT_FINITE = "the model's logits are not finite numbers"


def argmax(logits: Tensor) -> Tensor:
    """logits (num_rows, vocab_size), any float type -> int64 (num_rows,): the token with the
    highest logit, the first of equals; -1 if the row has NaN or its highest is infinite."""
    return _finite(logits, logits.argmax(-1))


def _finite(logits: Tensor, token_ids: Tensor) -> Tensor:
    """The chosen tokens, but -1 where the chosen logit is not finite. argmax returns NaN if there
    is one, so that checking the chosen logit is enough."""
    is_finite = logits.gather(1, token_ids[:, None])[:, 0].isfinite()
    return torch.where(is_finite, token_ids, _NO_TOKEN)


def sample(
    logits: Tensor,
    sequences: Seq[Sequence],
    find_argmax: Callable[[Tensor], Tensor] = argmax,
    masks: StepMasks | None = None,
) -> list[Sample | RowFailed]:
    """logits (num_rows, vocab_size), any float type; row i belongs to sequence i."""
    if not sequences:
        return []
    if masks is None and not any(_draws(s) or asks_for_change(s) for s in sequences):
        token_ids = find_argmax(logits)
    else:
        scores = adjust_logits(logits, sequences, masks)
        token_ids = _choose(logits, scores, sequences)
    ranked = _rank_chosen(logits, token_ids, sequences)
    numbers = [] if ranked is None else ranked.tolist()
    return [
        RowFailed(_NOT_FINITE) if found.token_id == _NO_TOKEN else found
        for found in _to_samples(token_ids.tolist(), numbers, sequences)
    ]


def _choose(logits: Tensor, scores: Tensor, sequences: Seq[Sequence]) -> Tensor:
    """logits (num_rows, vocab_size), and the same as changed by `adjust_logits` -> token ids
    (num_rows,), or -1."""
    scores = scores.float()
    token_ids = scores.argmax(-1)
    drawing = [row for row, sequence in enumerate(sequences) if _draws(sequence)]
    if drawing:
        part, index = _rows(scores, drawing)
        if part is logits:  # which is kept
            part = part.clone()
        token_ids[index] = _draw(part, [sequences[row] for row in drawing])
    return _finite(logits, token_ids)


def _draws(sequence: Sequence) -> bool:
    """Whether its tokens are drawn, not the likeliest ones."""
    return sequence.params.temperature >= LOWEST_TEMPERATURE


def _limits(params: SamplingParams) -> bool:
    """Whether only some of the tokens may be drawn."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _draw(scores: Tensor, sequences: Seq[Sequence]) -> Tensor:
    """scores (num_rows, vocab_size), a copy that is overwritten -> token ids (num_rows,)."""
    params = [sequence.params for sequence in sequences]
    keys = [row_key(s.params.seed, s.choice_of_prompt, s.num_output) for s in sequences]
    scores /= _floats([p.temperature for p in params], scores)[:, None]
    token_ids = torch.empty(len(params), dtype=torch.int64, device=scores.device)
    limited = [row for row, p in enumerate(params) if _limits(p)]
    wide = sorted(set(range(len(params))) - set(limited))
    if limited:
        part, index = _rows(scores, limited)
        token_ids[index], is_wide = _draw_limited(
            part, [params[row] for row in limited], [keys[row] for row in limited]
        )
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
        torch.tensor([p.top_k for p in params], device=scores.device),
        _floats([p.top_p for p in params], scores),
        _floats([p.min_p for p in params], scores),
    )
    row_keys = torch.tensor(keys, dtype=torch.int64, device=scores.device)[:, None]
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
    return torch.tensor(numbers, dtype=torch.float32, device=like.device)


def _rows(scores: Tensor, rows: Seq[int]) -> tuple[Tensor, Tensor]:
    """Some rows of scores and their index; copies unless all rows are taken."""
    index = torch.tensor(rows, device=scores.device)
    return (scores if list(rows) == list(range(len(scores))) else scores[index]), index


def adjust_logits(
    logits: Tensor, sequences: Seq[Sequence], masks: StepMasks | None = None
) -> Tensor:
    """logits (num_rows, vocab_size) of any float type, one row per sequence -> the same if no row
    asks for a change, else a changed copy in float32. Waits for `masks`.

    Order: masks, allowed tokens, bias, repetition, presence and frequency penalty, bad words, bans
    until `min_tokens`.
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
    for row, p in params.items():
        if p.allowed_token_ids:
            allowed = torch.tensor(p.allowed_token_ids, device=scores.device)
            kept = scores[row, allowed]
            scores[row] = float("-inf")
            scores[row, allowed] = kept
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
    bad = [
        row * vocab_size + word[-1]
        for row, p in params.items()
        for word in p.bad_words
        if _ends_with(sequences[row], word[:-1])
    ]
    if bad:
        flat.index_fill_(0, torch.tensor(bad, device=flat.device), _LEAST)
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


def _ends_with(sequence: Sequence, token_ids: tuple[int, ...]) -> bool:
    """Whether these are the last tokens of its output."""
    num = len(token_ids)
    return num <= sequence.num_output and (
        num == 0 or tuple(sequence.token_ids[-num:]) == token_ids
    )


def asks_for_change(sequence: Sequence) -> bool:
    """Whether the sequence's logits are changed before a token is chosen."""
    params = sequence.params
    return (
        bool(params.logit_bias or params.allowed_token_ids or params.bad_words)
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


# Noise is a function of (seed, choice, position, token id): a retry, a preemption or another worker
# draws the same, alone or in any batch. The hash is the finaliser of SplitMix64 (Steele, Lea, Flood
# 2014; constants by Stafford, "Mix13"), in integers, and so the same on every device:
#
#     mix(z):  z = (z ^ z >>> 30) * 0xBF58476D1CE4E5B9
#              z = (z ^ z >>> 27) * 0x94D049BB133111EB
#              z ^ z >>> 31
#     row      = mix(mix(mix(seed + G) + choice + G) + position + G)    G = 0x9E3779B97F4A7C15
#     hash     = mix(row + (token_id + 1) * G)                          all modulo 2^64
#     u        = (hash >>> 11) / 2^53                                   in (0, 1)
#     gumbel   = -log(-log(1 - u))
#
# `u` is small where the noise is large, so that float32 resolves the tail that decides a draw.
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_MASK_64 = 2**64 - 1
# On a CPU the intermediate tensors of such a slice fit the caches.
_SLICE_ELEMENTS = 2**17
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24  # in float32


def row_key(seed: int, choice: int, position: int) -> int:
    """The 64-bit key of output `position` of one choice, as a signed integer."""
    key = seed
    for value in (0, choice, position):
        key = _mix((key + value + _GOLDEN) & _MASK_64)
    return _signed(key)


def add_gumbel_noise(scores: Tensor, keys: Seq[int]) -> None:
    """Adds each row's noise to scores (num_rows, vocab_size), float32, in place."""
    num_rows, vocab_size = scores.shape
    row_keys = torch.tensor(keys, dtype=torch.int64, device=scores.device)[:, None]
    width = vocab_size
    if scores.device.type == "cpu":
        width = max(1, _SLICE_ELEMENTS // max(1, num_rows))
    for first in range(0, vocab_size, width):
        part = scores[:, first : first + width]
        ids = torch.arange(first, first + part.shape[1], device=scores.device)
        part += gumbel(uniform(row_keys, ids))


def uniform(row_keys: Tensor, token_ids: Tensor) -> Tensor:
    """row_keys (num_rows, 1) and token_ids (n,), int64 -> (num_rows, n) float32 in (0, 1)."""
    bits = _mixed(row_keys + (token_ids + 1) * _signed(_GOLDEN))
    fraction = _shift_right(bits, 11).to(torch.float32).mul_(2.0**-53)
    return fraction.clamp_(2.0**-54, _LARGEST_BELOW_ONE)


def gumbel(fraction: Tensor) -> Tensor:
    """Uniform float32 in (0, 1) -> standard Gumbel noise, in place."""
    return fraction.neg_().log1p_().neg_().log_().neg_()


def _mixed(bits: Tensor) -> Tensor:
    """`mix` of each int64, in place."""
    bits ^= _shift_right(bits, 30)
    bits *= _signed(_MULTIPLIER_1)
    bits ^= _shift_right(bits, 27)
    bits *= _signed(_MULTIPLIER_2)
    bits ^= _shift_right(bits, 31)
    return bits


def _shift_right(bits: Tensor, num_bits: int) -> Tensor:
    """Logical shift of int64: torch's own fills with the sign bit."""
    return (bits >> num_bits).bitwise_and_(2 ** (64 - num_bits) - 1)


def _mix(bits: int) -> int:
    bits = ((bits ^ bits >> 30) * _MULTIPLIER_1) & _MASK_64
    bits = ((bits ^ bits >> 27) * _MULTIPLIER_2) & _MASK_64
    return bits ^ bits >> 31


def _signed(bits: int) -> int:
    """The int64 with the same 64 bits."""
    return bits - 2**64 if bits >= 2**63 else bits
