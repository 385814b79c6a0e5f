"""The tokens of rows with penalties, on the device, which appends those that it draws itself."""

import numpy as np
import torch
from torch import Tensor

from workers.model.staging import to_device

_LEAST_TOKENS = 512


class Histories:
    """One row of token ids for each row of the state. They are made when first needed, and doubled
    in length."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._ids = torch.zeros(num_rows, 0, dtype=torch.int64, device=device)
        self._new: list[tuple[int, int, list[int]]] = []

    def write(self, row: int, first: int, token_ids: list[int]) -> None:
        """Sets a row's tokens from position `first` on, with the next `flush`."""
        if token_ids:
            self._new.append((row, first, token_ids))

    def flush(self) -> None:
        """Copies all that is new to the device at once."""
        if not self._new:
            return
        self._make_room(max(first + len(token_ids) for _, first, token_ids in self._new))
        width = self._ids.shape[1]
        places = [row * width + first + np.arange(len(ids)) for row, first, ids in self._new]
        token_ids = [np.array(ids, dtype=np.int64) for *_, ids in self._new]
        self._new.clear()
        pairs = np.stack([np.concatenate(places), np.concatenate(token_ids)])
        shipped = to_device(pairs, self._ids.device)
        self._ids.view(-1)[shipped[0]] = shipped[1]

    def append(self, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Sets a token of each row, int64 (n,) each. Rows that are not read may be behind the
        longest: their tokens fall into the last place, where nothing is read."""
        last = self._ids.shape[1] - 1
        if last >= 0:
            self._ids[rows, positions.clamp(max=last)] = token_ids

    def read(self, rows: Tensor, longest: int) -> Tensor:
        """The first tokens of some rows, int64 (n,) -> (n, longest); anything behind their ends.
        Makes room for the next token of each."""
        self._make_room(longest + 1)
        return self._ids[rows, :longest]

    def _make_room(self, num_tokens: int) -> None:
        """For so many tokens in each row, and the last place."""
        num_rows, width = self._ids.shape
        if num_tokens < width:
            return
        longer = max(_LEAST_TOKENS, 1 << num_tokens.bit_length())
        wider = self._ids.new_zeros(num_rows, longer)
        wider[:, :width] = self._ids
        self._ids = wider
