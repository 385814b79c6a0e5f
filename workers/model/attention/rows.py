"""Attention of single tokens whose block tables are on the device, in torch.

For steps whose rows, positions and blocks are tensors unknown to the host. Slower than a kernel;
supports every flag. Reads only the tables' own slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.model.attention.interface import AttentionFlags
from workers.model.attention.reference import attend_dense

# Tokens of a part of a context, which Triton's kernel computes for a short span. It is fixed, so
# that a row's partial sums depend only on its own length.
SPLIT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class RowsStep:
    """A step with one token per row. rows int64 (n,): row of the tables; positions int64 (n,);
    tables int64 (num_tables, num_blocks): block ids, any stride. `most_parts`: an upper bound of
    the parts of all contexts, of SPLIT_TOKENS each. `longest`: an upper bound of the contexts'
    lengths; None if the host does not know it, as in a recorded step."""

    rows: Tensor
    positions: Tensor
    tables: Tensor
    most_parts: int
    longest: int | None
    block_size: int


class PreparedRows:
    """PreparedAttention for a RowsStep. Raises ValueError if the longest context is unknown: each
    step would read as much as the longest possible one."""

    def __init__(self, step: RowsStep) -> None:
        if step.longest is None:
            raise ValueError("torch's attention reads contexts whose length the host must know")
        num_blocks = -(-step.longest // step.block_size)
        blocks = step.tables[step.rows, :num_blocks]
        offsets = torch.arange(step.block_size, device=blocks.device)
        slots = (blocks[:, :, None] * step.block_size + offsets).flatten(1)
        self._positions = step.positions[:, None]
        self._keys = torch.arange(slots.shape[1], device=blocks.device)[None]
        # Slots behind a row's position may belong to another sequence; use its first slot.
        is_own = self._keys <= self._positions
        self._slots = torch.where(is_own, slots, slots[:, :1])

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, flags: AttentionFlags) -> Tensor:
        seen = self._keys <= self._positions
        if flags.window is not None:
            seen = seen & (self._keys > self._positions - flags.window)
        found = attend_dense(
            query.unsqueeze(2),
            keys[self._slots].transpose(1, 2),
            values[self._slots].transpose(1, 2),
            seen[:, None, None, None],
            flags,
        )
        return found.squeeze(2)
