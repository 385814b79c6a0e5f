"""Per-sequence state on the device: last tokens, positions, block tables, sampling parameters, the
tokens of rows with penalties; and which tokens the next step computes.

The device advances tokens and positions itself, and appends the tokens that it draws; the host
mirrors the rest and copies only changes. One extra row, the last, belongs to padding."""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from workers.engine.sequence import Sequence
from workers.model.noise import row_base
from workers.model.penalties import is_penalised
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


class HostCopy:
    """A tensor being copied to the host; `read` waits for this copy only."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._host = tensor.clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def read(self) -> list[Any]:
        """The tensor's numbers, nested by its dimensions."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[Any] = self._host.tolist()
        return numbers


TOKEN, POSITION, OUTPUT_SHIFT, NOISE, TOP_K, TEMPERATURE, TOP_P, MIN_P, NUM_FIELDS = range(9)
_UNKNOWN = -1  # known only to the device: not a valid token id or position
OWN = -1  # a place has its row's token and position


@dataclass(slots=True)
class _Row:
    number: int
    num_preemptions: int  # of its sequence when the table was started
    num_covered: int = 0  # blocks already in the table
    num_kept: int = 0  # tokens that the host has copied, if it is penalised


class RequestState:
    """One row of int64 cells per sequence, and the places of the next step, one for each token."""

    def __init__(
        self,
        num_rows: int,
        num_places: int,
        max_blocks: int,
        scratch_block_id: int,
        device: torch.device,
    ) -> None:
        """`num_places`: tokens of the largest step, including padding."""
        self._num_rows, self._width = num_rows, NUM_FIELDS + max_blocks
        self.device = device
        self._rows: WeakKeyDictionary[Sequence, _Row] = WeakKeyDictionary()
        num_cells = (num_rows + 1) * self._width
        self._mirror = np.zeros(num_cells + 4 * num_places, dtype=np.int64)
        self._cells = self._mirror[:num_cells].reshape(num_rows + 1, self._width)
        self._cells[:, NUM_FIELDS:] = scratch_block_id
        self._places = self._mirror[num_cells:].reshape(4, num_places)
        own = np.full(num_places, OWN)
        padding = np.full(num_places, self.padding_row), own, own, np.arange(num_places)
        self._padding = np.stack(padding)
        self._places[:] = self._padding
        self._changed: dict[int, int] = {}
        flat = to_device(self._mirror.copy(), device)
        cells = flat[:num_cells].view(num_rows + 1, self._width)
        self._flat = flat
        self._ints = cells
        places = flat[num_cells:].view(4, num_places)
        self.order = places[0]  # int64 (num_places,): the rows of the step's tokens, then padding
        self.given = places[1:3]  # int64 (2, num_places): tokens and positions that are not OWN
        self.wanted = places[3]  # int64 (num_places,): places whose logits are needed
        self.tables = cells[:, NUM_FIELDS:]  # int64 (num_rows + 1, max_blocks)
        self._histories = Histories(num_rows + 1, device)

    @property
    def num_rows(self) -> int:
        """Rows of sequences."""
        return self._num_rows

    @property
    def padding_row(self) -> int:
        return self._num_rows

    @property
    def cells(self) -> Tensor:
        """int64 (num_rows + 1, width): each row's fields, then its table."""
        return self._ints

    def field(self, name: int, rows: Tensor) -> Tensor:
        """An integer field of each row. rows int64 (n,) -> int64 (n,)."""
        return self._ints[rows, name]

    def advance(self, rows: Tensor, token_ids: Tensor) -> None:
        """Makes the sampled tokens the rows' last ones. Padding does not advance."""
        is_real = rows != self.padding_row
        self._ints[rows, TOKEN] = torch.where(is_real, token_ids, 0)
        positions = torch.where(is_real, self._ints[rows, POSITION] + 1, 0)
        self._ints[rows, POSITION] = positions
        self._histories.append(rows, positions, token_ids)

    def known(self, sequences: Seq[Sequence], lengths: Seq[int]) -> tuple[Tensor, Tensor]:
        """Finds the tokens of penalised sequences; see FindKnown."""
        fields = [
            (self.row_of(s), n, s.num_prompt) for s, n in zip(sequences, lengths, strict=True)
        ]
        rows, ends, starts = to_device(np.array(fields, dtype=np.int64).T, self.device)
        ids = self._histories.read(rows, max(lengths))
        steps = torch.arange(ids.shape[1], device=self.device)
        is_known = steps < ends[:, None]
        return torch.where(is_known, ids, ids[:, :1]), is_known & (steps >= starts[:, None])

    # --- the host's side ----------------------------------------------------------------------

    def admit(self, sequence: Sequence, busy: Collection[Sequence]) -> int | None:
        """The sequence's row, possibly taken from a sequence that is not `busy`; None if all are
        busy."""
        row = self._rows.get(sequence)
        if row is None:
            number = self._free_row(busy)
            if number is None:
                return None
            row = self._rows[sequence] = _Row(number, sequence.num_preemptions)
            self._begin(row, sequence)
        elif row.num_preemptions != sequence.num_preemptions:
            row.num_preemptions = sequence.num_preemptions
            row.num_covered = row.num_kept = 0
            self._begin(row, sequence)
        return row.number

    def row_of(self, sequence: Sequence) -> int:
        """The row of an admitted sequence."""
        return self._rows[sequence].number

    def place(self, sequence: Sequence, token_id: int, position: int) -> None:
        """Sets the row's token and position, unless the device has them already. The host knows
        all tokens up to this one; those that the device drew since the last call are set again."""
        row = self._rows[sequence]
        first = row.number * self._width
        self._write(first + TOKEN, token_id)
        self._write(first + POSITION, position)
        if is_penalised(sequence):
            new_ids = sequence.token_ids[row.num_kept : position + 1]
            self._histories.write(row.number, row.num_kept, new_ids)
            row.num_kept = position + 1

    def cover(self, sequence: Sequence) -> None:
        """Adds the sequence's new blocks to its table."""
        row = self._rows[sequence]
        first = row.number * self._width + NUM_FIELDS
        for index in range(row.num_covered, len(sequence.block_ids)):
            self._write(first + index, sequence.block_ids[index])
        row.num_covered = len(sequence.block_ids)

    def line_up(
        self, rows: Seq[int], given: tuple[Seq[int], Seq[int]] = ((), ()), wanted: Seq[int] = ()
    ) -> None:
        """Sets the next step; the rest is padding. rows (n,); given: tokens and positions (n,), OWN
        for those that the row has, or none; wanted: the places whose logits are needed first."""
        places = self._padding.copy()
        for line, numbers in zip(places, (rows, *given, wanted), strict=True):
            line[: len(numbers)] = numbers
        changed = np.nonzero(self._places != places)
        first = (self._num_rows + 1) * self._width
        indexes = np.ravel_multi_index(changed, places.shape) + first
        self._changed.update(zip(indexes.tolist(), places[changed].tolist(), strict=True))
        self._places[:] = places

    def flush(self) -> None:
        """Copies all changes to the device."""
        self._histories.flush()
        if not self._changed:
            return
        pairs = np.array([list(self._changed), list(self._changed.values())], dtype=np.int64)
        self._changed.clear()
        shipped = to_device(pairs, self.device)
        self._flat[shipped[0]] = shipped[1]

    def note_advance(self, sequences: Seq[Sequence]) -> None:
        """Records that the device has advanced these by one token unknown to the host."""
        for sequence in sequences:
            cells = self._cells[self._rows[sequence].number]
            cells[TOKEN] = _UNKNOWN
            cells[POSITION] += 1

    def _begin(self, row: _Row, sequence: Sequence) -> None:
        """Writes the parameters. Old blocks may remain behind those that `cover` writes; nothing
        reads beyond a row's position."""
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
