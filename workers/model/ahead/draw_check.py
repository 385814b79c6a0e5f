"""Compares tokens drawn on the device with those of the sampler, on logits whose likely tokens are
far enough apart that rounding decides nothing."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.engine.interface import Sample
from workers.engine.sequence import Sequence
from workers.model.gpu.drawing import draw
from workers.model.gpu.request_state import RequestState
from workers.model.probe import probe_sequence
from workers.model.sampler import sample
from workers.model.staging import to_device

Draw = Callable[[Tensor, RequestState, Tensor, Seq[Sequence], Seq[int]], Tensor]

_FREE: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0}, {"temperature": 0.6})
_LIMITED: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.5, "top_k": 9, "top_p": 0.7, "min_p": 0.02},
)
# The prompts are of token 0, the output of the last token: both are among the likely ones.
_CHANGED: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 4.0},
    {"temperature": 1.0, "presence_penalty": 2.0, "frequency_penalty": 1.0},
    {"logit_bias": {0: -100.0, 1: 8.0}},
    {"temperature": 0.8, "top_k": 5, "min_tokens": 50},
)
# Parameters of each row: without limits and with them are two kernels, each of them for the model's
# type and for changed logits, which are float32.
_BATCHES = (_FREE, (*_LIMITED, *_FREE), (*_FREE, *_CHANGED[:3]), (*_LIMITED, *_CHANGED))
_NUM_LIKELY = 16
_SPACE = 0.5  # between their logits; exact in every type
_UNLIKELY = -30.0


def wrong_draws(
    state: RequestState, vocab_size: int, dtype: torch.dtype, draw_rows: Draw = draw
) -> str | None:
    """Describes rows for which `draw_rows` and the sampler differ; None if there are none. Compiles
    the kernels for this state and size of the vocabulary."""
    for batch in _BATCHES:
        for sequences in _groups(batch, state.num_rows, vocab_size - 1):
            logits = _logits(len(sequences), vocab_size, state.device).to(dtype)
            rows = to_device(np.array(_lined_up(state, sequences)), state.device)
            lengths = [sequence.num_known for sequence in sequences]
            found = draw_rows(logits, state, rows, sequences, lengths).tolist()
            samples = sample(logits, sequences)
            expected = [row.token_id if isinstance(row, Sample) else None for row in samples]
            if found != expected:
                return f"tokens {found} are drawn in place of {expected}"
    return None


def _groups(batch: Seq[dict[str, Any]], num_rows: int, last_id: int) -> Iterator[list[Sequence]]:
    """Yields one sequence for each row, at most `num_rows` at once."""
    for first in range(0, len(batch), num_rows):
        part = batch[first : first + num_rows]
        yield [_sequence(first + i, params, last_id) for i, params in enumerate(part)]


def _sequence(number: int, params: dict[str, Any], last_id: int) -> Sequence:
    num_prompt = 1 + number % 2
    token_ids = [0] * num_prompt + [last_id] * (1 + number)
    given = {"max_tokens": 99, "seed": number, "temperature": 0.0} | params
    sequence = probe_sequence(token_ids, num_prompt, **given)
    sequence.ending_ids = frozenset({0, last_id})
    return sequence


def _lined_up(state: RequestState, sequences: Seq[Sequence]) -> list[int]:
    """Copies the sequences' state to the device, and returns their rows."""
    for sequence in sequences:
        state.admit(sequence, sequences)
        state.place(sequence, sequence.token_ids[-1], sequence.num_known - 1)
    state.flush()
    return [state.row_of(sequence) for sequence in sequences]


def _logits(num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """float32 (num_rows, vocab_size): some likely tokens all over it, in each row in another
    order."""
    logits = torch.full((num_rows, vocab_size), _UNLIKELY)
    ids = torch.linspace(0, vocab_size - 1, min(_NUM_LIKELY, vocab_size)).long()
    for row in range(num_rows):
        logits[row, ids.roll(5 * row)] = -_SPACE * torch.arange(len(ids))
    return logits.to(device)
