"""Attention of single tokens whose block tables lie on the device, in torch.

For steps that the host does not spell out: who decodes, where, and through which blocks are
tensors. Slower than a kernel and right for every flag. Only the tables' own slots are read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.model.attention.interface import AttentionFlags
from workers.model.attention.reference import attend_dense


@dataclass(frozen=True, slots=True)
class RowsStep:
    """One token for each row. rows int64 (n,): of the tables; positions int64 (n,); tables
    int64 (num_tables, num_blocks), any stride: block ids. longest: no context of the step is
    longer.
    """

    rows: Tensor
    positions: Tensor
    tables: Tensor
    longest: int
    block_size: int


class PreparedRows:
    """PreparedAttention for a RowsStep."""

    def __init__(self, step: RowsStep) -> None:
        num_blocks = -(-step.longest // step.block_size)
        blocks = step.tables[step.rows, :num_blocks]
        offsets = torch.arange(step.block_size, device=blocks.device)
        slots = (blocks[:, :, None] * step.block_size + offsets).flatten(1)
        self._positions = step.positions[:, None]
        self._keys = torch.arange(slots.shape[1], device=blocks.device)[None]
        # What lies behind a row's own position may be another's by now: its first slot stands in.
        is_own = self._keys <= self._positions
        self._slots = torch.where(is_own, slots, slots[:, :1])

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, flags: AttentionFlags) -> Tensor:
        """See PreparedAttention.attend."""
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
