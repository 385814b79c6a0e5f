"""What a step must know of its sequences, kept on the device: last tokens, positions, block tables,
sampling parameters. The host ships only what has changed.

The device moves tokens and positions on by itself; a mirror on the host says what else lies there.
Knows nothing of models. One more row than sequences, the last, belongs to padding.
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from workers.engine.sequence import Sequence
from workers.model.gpu.staging import to_device
from workers.model.noise import row_base

TOKEN, POSITION, OUTPUT_SHIFT, NOISE, TOP_K, TEMPERATURE, TOP_P, MIN_P, NUM_FIELDS = range(9)
_UNKNOWN = -1  # only the device knows: no token id and no position


@dataclass(slots=True)
class _Row:
    number: int
    num_preemptions: int  # of its sequence, when its table was begun
    num_covered: int = 0  # blocks of the sequence that the table has


class RequestState:
    """One row of int64 cells for each sequence, and the order of the rows in the next step."""

    def __init__(
        self,
        num_rows: int,
        num_places: int,
        max_blocks: int,
        scratch_block_id: int,
        device: torch.device,
    ) -> None:
        """`num_places`: rows of the largest step, padding included."""
        self._num_rows, self._width = num_rows, NUM_FIELDS + max_blocks
        self._device = device
        self._rows: WeakKeyDictionary[Sequence, _Row] = WeakKeyDictionary()
        num_cells = (num_rows + 1) * self._width
        self._mirror = np.zeros(num_cells + num_places, dtype=np.int64)
        self._cells = self._mirror[:num_cells].reshape(num_rows + 1, self._width)
        self._cells[:, NUM_FIELDS:] = scratch_block_id
        self._mirror[num_cells:] = self.padding_row
        self._changed: dict[int, int] = {}
        flat = torch.from_numpy(self._mirror.copy()).to(device)
        cells = flat[:num_cells].view(num_rows + 1, self._width)
        self._flat = flat
        self._ints, self._floats = cells, cells.view(torch.float64)
        self.order = flat[num_cells:]  # int64 (num_places,): padding behind the rows of the step
        self.tables = cells[:, NUM_FIELDS:]  # int64 (num_rows + 1, max_blocks)
        self.padding_order = torch.full_like(self.order, self.padding_row)

    @property
    def padding_row(self) -> int:
        return self._num_rows

    def field(self, name: int, rows: Tensor) -> Tensor:
        """One number of each row, int64 or float64. rows int64 (n,) -> (n,)."""
        cells = self._floats if name >= TEMPERATURE else self._ints
        return cells[rows, name]

    def advance(self, rows: Tensor, token_ids: Tensor) -> None:
        """The rows' sampled tokens become their last ones. Padding stays where it is."""
        is_real = rows != self.padding_row
        self._ints[rows, TOKEN] = torch.where(is_real, token_ids, 0)
        self._ints[rows, POSITION] = torch.where(is_real, self._ints[rows, POSITION] + 1, 0)

    # --- the host's side ----------------------------------------------------------------------

    def admit(self, sequence: Sequence, busy: Collection[Sequence]) -> int | None:
        """The sequence's row, which may have been one of a sequence that is not `busy`; None
        where all are.
        """
        row = self._rows.get(sequence)
        if row is None:
            number = self._free_row(busy)
            if number is None:
                return None
            row = self._rows[sequence] = _Row(number, sequence.num_preemptions)
            self._begin(row, sequence)
        elif row.num_preemptions != sequence.num_preemptions:
            row.num_preemptions, row.num_covered = sequence.num_preemptions, 0
            self._begin(row, sequence)
        return row.number

    def row_of(self, sequence: Sequence) -> int:
        """The row of a sequence that was admitted."""
        return self._rows[sequence].number

    def place(self, sequence: Sequence, token_id: int, position: int) -> None:
        """Where the row goes on, unless the device knows it already."""
        first = self._rows[sequence].number * self._width
        self._write(first + TOKEN, token_id)
        self._write(first + POSITION, position)

    def cover(self, sequence: Sequence) -> None:
        """Brings blocks that the sequence has gained into its table."""
        row = self._rows[sequence]
        first = row.number * self._width + NUM_FIELDS
        for index in range(row.num_covered, len(sequence.block_ids)):
            self._write(first + index, sequence.block_ids[index])
        row.num_covered = len(sequence.block_ids)

    def line_up(self, rows: Seq[int]) -> None:
        """The order of the next step; all behind it is padding."""
        wanted = np.full(len(self.order), self.padding_row, dtype=np.int64)
        wanted[: len(rows)] = rows
        first = (self._num_rows + 1) * self._width
        for index in np.nonzero(self._mirror[first:] != wanted)[0].tolist():
            self._write(first + index, int(wanted[index]))

    def flush(self) -> None:
        """Ships what has changed, in one copy."""
        if not self._changed:
            return
        pairs = np.array([list(self._changed), list(self._changed.values())], dtype=np.int64)
        self._changed.clear()
        shipped = to_device(pairs, self._device)
        self._flat[shipped[0]] = shipped[1]

    def note_advance(self, sequences: Seq[Sequence]) -> None:
        """The device has moved these on by one token, which the host does not know yet."""
        for sequence in sequences:
            cells = self._cells[self._rows[sequence].number]
            cells[TOKEN] = _UNKNOWN
            cells[POSITION] += 1

    def _begin(self, row: _Row, sequence: Sequence) -> None:
        """Writes the parameters. Blocks of the row's last sequence may stay behind those that
        `cover` brings: nothing reads beyond a row's position.
        """
        first, params = row.number * self._width, sequence.params
        self._write(first + OUTPUT_SHIFT, 1 - sequence.num_prompt)
        self._write(first + NOISE, row_base(params.seed, sequence.choice_of_prompt))
        self._write(first + TOP_K, params.top_k)
        values = np.array([params.temperature, params.top_p, params.min_p])
        for name, bits in zip((TEMPERATURE, TOP_P, MIN_P), values.view(np.int64), strict=True):
            self._write(first + name, int(bits))

    def _free_row(self, busy: Collection[Sequence]) -> int | None:
        taken = {row.number for row in self._rows.values()}
        for number in range(self._num_rows):
            if number not in taken:
                return number
        for sequence, row in list(self._rows.items()):
            if sequence not in busy:
                del self._rows[sequence]
                return row.number
        return None

    def _write(self, index: int, value: int) -> None:
        if self._mirror[index] != value:
            self._mirror[index] = value
            self._changed[index] = value
