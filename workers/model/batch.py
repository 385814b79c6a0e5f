"""One step's chunks as flat tensors: no batch dimension worth the name, and no padding but that
which the engine asks for.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.engine.model import Chunk, Padding
from workers.model.answers import scored_positions
from workers.model.attention.interface import Span


@dataclass(frozen=True, slots=True)
class Batch:
    """input_ids and position_ids (1, T); slot_mapping (T,): the cache slot of each token;
    logits_index (num_rows,): the flat rows whose logits are wanted, in the chunks' order: of each
    chunk the positions in `scored`, then its last one where it samples.
    """

    input_ids: Tensor
    position_ids: Tensor
    slot_mapping: Tensor
    logits_index: Tensor
    spans: tuple[Span, ...]
    scored: tuple[range, ...]


PAD_TOKEN_ID = 0  # any id will do: no one reads what comes of it


def build_batch(
    chunks: Seq[Chunk],
    block_size: int,
    device: torch.device,
    padding: Seq[Padding] = (),
    scratch_block_id: int = 0,
) -> Batch:
    """Lays the chunks one behind the other, and padding, whose KV goes to one block, behind all."""
    token_ids: list[int] = []
    positions: list[npt.NDArray[np.int64]] = []
    spans: list[Span] = []
    for chunk in chunks:
        end = chunk.start + chunk.num_tokens
        assert chunk.num_tokens > 0
        assert end <= chunk.sequence.num_known
        slots = block_slots(chunk.sequence.block_ids, end, block_size)
        spans.append(Span(len(token_ids), chunk.num_tokens, chunk.start, slots))
        token_ids += chunk.sequence.token_ids[chunk.start : end]
        positions.append(np.arange(chunk.start, end, dtype=np.int64))
    for pad in padding:
        end = pad.start + pad.num_tokens
        slots = scratch_block_id * block_size + np.arange(end, dtype=np.int64) % block_size
        spans.append(Span(len(token_ids), pad.num_tokens, pad.start, slots))
        token_ids += [PAD_TOKEN_ID] * pad.num_tokens
        positions.append(np.arange(pad.start, end, dtype=np.int64))
    scored = tuple(
        scored_positions(chunk.sequence, chunk.start, chunk.start + chunk.num_tokens)
        for chunk in chunks
    )
    rows: list[int] = []
    for chunk, span, wanted in zip(chunks, spans, scored, strict=False):  # not of padding
        rows += [span.first + position - span.start for position in wanted]
        rows += [span.first + span.num_tokens - 1] * chunk.samples
    slot_mapping = np.concatenate([span.slots[span.start :] for span in spans])
    return Batch(
        input_ids=torch.tensor([token_ids], device=device),
        position_ids=torch.from_numpy(np.concatenate(positions))[None].to(device),
        slot_mapping=torch.from_numpy(slot_mapping).to(device),
        logits_index=torch.tensor(rows, dtype=torch.int64, device=device),
        spans=tuple(spans),
        scored=scored,
    )


def block_slots(block_ids: Seq[int], num_tokens: int, block_size: int) -> npt.NDArray[np.int64]:
    """The cache slots (num_tokens,) of a sequence's first `num_tokens` positions."""
    num_blocks = -(-num_tokens // block_size)
    assert num_blocks <= len(block_ids), "the engine has not grown the block table"
    blocks = np.asarray(block_ids[:num_blocks], dtype=np.int64)
    slots = blocks[:, None] * block_size + np.arange(block_size, dtype=np.int64)
    flat: npt.NDArray[np.int64] = slots.reshape(-1)[:num_tokens]
    return flat
