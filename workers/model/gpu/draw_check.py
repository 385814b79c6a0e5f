"""Compares tokens drawn on the device with those of the sampler, on logits whose likely tokens are
far enough apart that rounding decides nothing."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from contract.jobs import SamplingParams
from workers.engine.interface import Sample
from workers.engine.sequence import Sequence
from workers.model.gpu.drawing import Wishes, draw, wishes_of
from workers.model.gpu.request_state import RequestState
from workers.model.sampler import sample
from workers.model.staging import to_device

Draw = Callable[[Tensor, RequestState, Tensor, Wishes], Tensor]

_FREE = (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0)
_LIMITED = (1.0, 3, 1.0, 0.0), (0.8, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.1), (2.5, 9, 0.7, 0.02)
# (temperature, top-k, top-p, min-p) of each row: without limits and with them are two kernels.
_BATCHES = (_FREE, (*_LIMITED, *_FREE))
_NUM_LIKELY = 16
_SPACE = 0.5  # between their logits; exact in every type
_UNLIKELY = -30.0


def wrong_draws(
    state: RequestState, vocab_size: int, dtype: torch.dtype, draw_rows: Draw = draw
) -> str | None:
    """Describes rows for which `draw_rows` and the sampler differ; None if there are none. Compiles
    the kernels for this state and size of the vocabulary."""
    for rows in _BATCHES:
        for sequences in _groups(rows, state.num_rows):
            logits = _logits(len(sequences), vocab_size, state.device).to(dtype)
            number = to_device(np.array(_lined_up(state, sequences)), state.device)
            found = draw_rows(logits, state, number, wishes_of(sequences)).tolist()
            samples = sample(logits, sequences)
            expected = [row.token_id if isinstance(row, Sample) else None for row in samples]
            if found != expected:
                return f"tokens {found} are drawn in place of {expected}"
    return None


def _groups(rows: Seq[tuple[float, int, float, float]], num_rows: int) -> Iterator[list[Sequence]]:
    """Yields one sequence for each row, at most `num_rows` at once."""
    for first in range(0, len(rows), num_rows):
        part = rows[first : first + num_rows]
        yield [_sequence(first + number, *row) for number, row in enumerate(part)]


def _sequence(number: int, temperature: float, top_k: int, top_p: float, min_p: float) -> Sequence:
    params = SamplingParams(
        max_tokens=99, seed=number, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    return Sequence(
        job_id="check",
        epoch=0,
        choice=0,
        tenant="",
        lane="",
        token_ids=[0] * (2 + number),
        num_prompt=1 + number % 2,
        params=params,
    )


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
