"""A step's chunks as flat tensors, without padding except where the engine asks for it."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.engine.interface import Chunk, Padding
from workers.model.answers import scored_positions
from workers.model.attention.interface import Span
from workers.model.staging import to_device


@dataclass(frozen=True, slots=True)
class Batch:
    """A step as tensors. input_ids and position_ids (1, T); slot_mapping (T,): the cache slot of
    each token; logits_index (num_rows,): the flat rows whose logits are needed, in chunk order:
    each chunk's `scored` positions, then its last ones, one for each of its `sampled`."""

    input_ids: Tensor
    position_ids: Tensor
    slot_mapping: Tensor
    logits_index: Tensor
    spans: tuple[Span, ...]
    scored: tuple[range, ...]


PAD_TOKEN_ID = 0  # any id: the result is not used


def build_batch(
    chunks: Seq[Chunk],
    block_size: int,
    device: torch.device,
    padding: Seq[Padding] = (),
    scratch_block_id: int = 0,
) -> Batch:
    """Concatenates the chunks, then padding, whose KV goes to one scratch block."""
    token_ids: list[int] = []
    block_ids: list[int] = []
    for chunk in chunks:
        sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
        num_blocks = -(-end // block_size)
        assert chunk.start < end <= len(sequence.token_ids) + max(1, len(chunk.drafts))
        assert num_blocks <= len(sequence.block_ids), "the engine has not grown the table"
        token_ids += chunk.token_ids
        if end > len(sequence.token_ids) + len(chunk.drafts):  # known to the device only
            token_ids.append(PAD_TOKEN_ID)
        block_ids += sequence.block_ids[:num_blocks]
    for pad in padding:
        token_ids += [PAD_TOKEN_ID] * pad.num_tokens
        block_ids += [scratch_block_id] * -(-(pad.start + pad.num_tokens) // block_size)
    layout = _Layout((*chunks, *padding), block_size)
    slots = block_slots(block_ids, len(block_ids) * block_size, block_size)
    spans = layout.spans(slots)
    scored = tuple([scored_positions(c.sequence, c.start, c.start + c.num_tokens) for c in chunks])
    rows: list[int] = []
    for chunk, span, wanted in zip(chunks, spans, scored, strict=False):  # padding has none
        if wanted:
            rows += [span.first + position - span.start for position in wanted]
        if chunk.samples:
            stop = span.first + span.num_tokens
            rows += range(stop - 1 - len(chunk.drafts), stop)
    mapping = slots[layout.positions + layout.begins]
    num_tokens = len(token_ids)
    numbers = np.array([*token_ids, *rows], dtype=np.int64)
    parts = (numbers[:num_tokens], layout.positions, mapping, numbers[num_tokens:])
    shipped = to_device(np.concatenate(parts), device)
    ids, positions, slot_mapping = shipped[: 3 * num_tokens].view(3, num_tokens)
    return Batch(
        input_ids=ids[None],
        position_ids=positions[None],
        slot_mapping=slot_mapping,
        logits_index=shipped[3 * num_tokens :],
        spans=spans,
        scored=scored,
    )


class _Layout:
    """The parts of a step: their tokens in the flat batch, and their sequences' slots (whole
    blocks) in one array."""

    def __init__(self, parts: Seq[Chunk | Padding], block_size: int) -> None:
        self._starts = np.array([part.start for part in parts], dtype=np.int64)
        self._counts = np.array([part.num_tokens for part in parts], dtype=np.int64)
        self._firsts = np.cumsum(self._counts) - self._counts
        num_slots = -(-(self._starts + self._counts) // block_size) * block_size
        self._begins = np.cumsum(num_slots) - num_slots
        rows = np.arange(self._counts.sum())
        self.positions = rows + np.repeat(self._starts - self._firsts, self._counts)  # (T,)
        self.begins = np.repeat(self._begins, self._counts)  # (T,): of each token's sequence

    def spans(self, slots: npt.NDArray[np.int64]) -> tuple[Span, ...]:
        """Returns a span for each part."""
        columns = (self._firsts, self._counts, self._starts, self._begins)
        return tuple(
            [
                Span(first, count, start, slots[begin : begin + start + count])
                for first, count, start, begin in zip(*(c.tolist() for c in columns), strict=True)
            ]
        )


def block_slots(block_ids: Seq[int], num_tokens: int, block_size: int) -> npt.NDArray[np.int64]:
    """The cache slots (num_tokens,) of a sequence's first `num_tokens` positions."""
    num_blocks = -(-num_tokens // block_size)
    assert num_blocks <= len(block_ids)
    blocks = np.asarray(block_ids[:num_blocks], dtype=np.int64)
    slots = blocks[:, None] * block_size + np.arange(block_size, dtype=np.int64)
    flat: npt.NDArray[np.int64] = slots.reshape(-1)[:num_tokens]
    return flat
