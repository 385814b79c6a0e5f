"""The device's rows: what is copied to it, which sequence has which row, and what the device
updates."""

import pytest
import torch

from tests.workers.model.driver import make_sequence
from workers.engine.sequence import Sequence
from workers.model.gpu.request_state import OWN, POSITION, TOKEN, RequestState
from workers.model.noise import row_base, row_key, row_keys_at

CPU = torch.device("cpu")


@pytest.fixture
def state() -> RequestState:
    return RequestState(num_rows=2, num_places=4, max_blocks=8, scratch_block_id=99, device=CPU)


def placed(state: RequestState, sequence: Sequence, position: int) -> int:
    """Admits a sequence and copies it to the device; returns its row."""
    row = state.admit(sequence, [sequence])
    assert row is not None
    state.place(sequence, 40 + position, position)
    state.cover(sequence)
    state.flush()
    return row


def where(state: RequestState, row: int) -> tuple[int, int]:
    rows = torch.tensor([row])
    return int(state.field(TOKEN, rows)), int(state.field(POSITION, rows))


def test_a_row_continues_by_itself_or_from_the_host_s_position(state: RequestState) -> None:
    """A repeated position is copied again, although the host copied the same number before."""
    sequence = make_sequence([4, 5, 6])
    row = placed(state, sequence, 2)
    state.advance(torch.tensor([row]), torch.tensor([7]))
    state.note_advance([sequence])
    assert where(state, row) == (7, 3)

    placed(state, sequence, 2)

    assert where(state, row) == (42, 2)


def test_tables_gain_blocks_and_begin_anew_after_a_preemption(state: RequestState) -> None:
    """Otherwise only new blocks are examined."""
    sequence = make_sequence([4, 5, 6])
    sequence.block_ids = [3, 1]
    row = placed(state, sequence, 2)
    sequence.block_ids.append(8)
    placed(state, sequence, 2)
    assert state.tables[row].tolist() == [3, 1, 8, 99, 99, 99, 99, 99]

    sequence.num_preemptions += 1
    sequence.block_ids = [5]
    placed(state, sequence, 2)

    assert int(state.tables[row, 0]) == 5


def test_a_row_is_taken_from_an_ended_or_idle_sequence(state: RequestState) -> None:
    """And from no other."""
    first, second, third = (make_sequence([4]) for _ in range(3))
    rows = [state.admit(first, []), state.admit(second, [])]
    assert sorted(row for row in rows if row is not None) == [0, 1]
    assert state.admit(third, [first, second, third]) is None

    assert state.admit(third, [second, third]) == rows[0]
    del second
    assert state.admit(make_sequence([5]), [third]) == rows[1]


def test_rows_after_the_order_are_padding(state: RequestState) -> None:
    """Also after a longer step. Padding rows stay at position 0 however often they run."""
    state.line_up([1, 0, 1])
    state.flush()
    assert state.order.tolist() == [1, 0, 1, state.padding_row]
    state.line_up([0])
    state.flush()
    assert state.order.tolist() == [0, *[state.padding_row] * 3]

    state.advance(state.order[1:], torch.tensor([7, 8, 9]))

    assert where(state, state.padding_row) == (0, 0)
    assert state.tables[state.padding_row].tolist() == [99] * 8


def test_places_have_the_rows_tokens_or_given_ones(state: RequestState) -> None:
    """Whose logits are wanted is known too. A shorter step clears what it does not set."""
    state.line_up([1, 1, 0], ([5, 6, OWN], [0, 1, OWN]), [1, 2])
    state.flush()

    assert state.given.tolist() == [[5, 6, OWN, OWN], [0, 1, OWN, OWN]]
    assert state.wanted.tolist()[:2] == [1, 2]

    state.line_up([0])
    state.flush()

    assert state.given.tolist() == [[OWN] * 4] * 2
    assert state.wanted.tolist() == [0, 1, 2, 3]


def test_noise_keys_on_the_device_are_the_host_s() -> None:
    """For seeds, choices and positions of all sizes."""
    cases = [(seed, c, p) for seed in (0, 1, 2**63, 2**64 - 1) for c in (0, 7) for p in (0, 9999)]
    bases = torch.tensor([row_base(seed, choice) for seed, choice, _ in cases])
    positions = torch.tensor([position for *_, position in cases])

    found = row_keys_at(bases, positions).tolist()

    assert found == [row_key(*case) for case in cases]
