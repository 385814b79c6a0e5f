"""Turns a step's logits into next tokens and into log probabilities of prompts."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from workers.engine.interface import Chunk, Drawn, PromptLogprobs, Row, RowFailed, Sample
from workers.engine.masks import StepMasks
from workers.engine.sequence import Sequence
from workers.model.kernels import likeliest
from workers.model.sampler import rank, ranked_sample, sample
from workers.model.staging import to_device

# Compute log probabilities of this many logits at once (64 MiB of float32).
_SLICE_ELEMENTS = 2**24


def scored_positions(sequence: Sequence, start: int, end: int) -> range:
    """Positions among `start .. end - 1` whose logits score the next prompt token; none unless the
    job asks."""
    if not sequence.scores_prompt:
        return range(start, start)
    return range(start, max(start, min(end, sequence.num_prompt - 1)))


def answer_chunks(
    logits: Tensor,
    chunks: Seq[Chunk],
    scored: Seq[range],
    find_likeliest: Callable[[Tensor], Tensor] = likeliest,
    masks: StepMasks | None = None,
) -> list[Row]:
    """Returns one row per chunk. logits (num_rows, vocab_size): for each chunk its scored
    positions, then its last positions, one for each of its `sampled`."""
    prompts: list[PromptLogprobs | None] = []
    sample_rows: list[int] = []
    num_rows = 0
    for chunk, positions in zip(chunks, scored, strict=True):
        prompt = None
        if positions:  # slicing a tensor costs microseconds
            part = logits[num_rows : num_rows + len(positions)]
            prompt = score_prompt(part, chunk.sequence, positions.start)
            num_rows += len(positions)
        prompts.append(prompt)
        num_sampled = len(chunk.sampled)
        sample_rows += range(num_rows, num_rows + num_sampled)
        num_rows += num_sampled
    if len(sample_rows) < num_rows:
        logits = logits[to_device(np.array(sample_rows, dtype=np.int64), logits.device)]
    sampling = [sequence for chunk in chunks for sequence in chunk.sampled]
    samples = iter(sample(logits, sampling, find_likeliest, masks))
    return [_answer(chunk, samples, prompt) for chunk, prompt in zip(chunks, prompts, strict=True)]


def _answer(
    chunk: Chunk, samples: Iterator[Sample | RowFailed], prompt: PromptLogprobs | None
) -> Row:
    """Takes the chunk's samples from those of the step."""
    if chunk.drafts:
        return Drawn(tuple(islice(samples, len(chunk.sampled))))
    if not chunk.samples:
        return prompt
    return with_prompt(next(samples), prompt)


def with_prompt(row: Row, prompt: PromptLogprobs | None) -> Row:
    """The row of a chunk that samples, with its prompt's log probabilities."""
    if prompt is None or not isinstance(row, Sample):
        return row
    return Sample(row.token_id, row.logprob, row.top_logprobs, prompt)


def score_prompt(logits: Tensor, sequence: Sequence, start: int) -> PromptLogprobs:
    """Scores n tokens from logits (n, vocab_size) of positions `start ..`."""
    num_top = min(sequence.params.prompt_logprobs or 0, logits.shape[1])
    at_once = max(1, _SLICE_ELEMENTS // logits.shape[1])
    tokens: list[Sample] = []
    for part in torch.split(logits, at_once):
        first = start + 1 + len(tokens)
        ids = sequence.token_ids[first : first + len(part)]
        ranked = rank(part, to_device(np.array(ids), logits.device), num_top).tolist()
        tokens += [ranked_sample(*pair, num_top) for pair in zip(ids, ranked, strict=True)]
    return PromptLogprobs(start + 1, tuple(tokens))
