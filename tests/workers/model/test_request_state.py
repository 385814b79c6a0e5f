"""The device's rows: what is copied to it, which sequence has which row, and what the device
updates."""

import pytest
import torch

from tests.workers.model.driver import make_sequence
from workers.engine.sequence import Sequence
from workers.model.gpu.request_state import OWN, POSITION, TOKEN, RequestState

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


def test_the_tokens_of_penalised_rows_are_known_on_the_device(state: RequestState) -> None:
    """Those that the host has copied, then those that the device drew; what the host took in place
    of a drawn one is copied again. A row's new sequence has its own alone."""
    first = make_sequence([4, 5, 6], presence_penalty=1.0)
    second = make_sequence([7] * 600, output_ids=[8], repetition_penalty=2.0)
    for sequence in (first, second):
        state.admit(sequence, [first, second])
        state.place(sequence, sequence.token_ids[-1], sequence.num_known - 1)
    state.flush()
    rows = torch.tensor([state.row_of(first), state.row_of(second), state.padding_row])
    lengths = [first.num_known, second.num_known]

    ids, is_output = state.known([first, second], lengths)
    assert ids[0].tolist() == [4, 5, 6] + [4] * 598
    assert ids[1].tolist() == second.token_ids
    assert is_output.sum(-1).tolist() == [0, 1]

    state.advance(rows, torch.tensor([9, 10, 11]))
    ids, is_output = state.known([first, second], [n + 1 for n in lengths])
    assert ids[0, :4].tolist() == [4, 5, 6, 9]
    assert ids[1].tolist() == [*second.token_ids, 10]
    assert is_output.sum(-1).tolist() == [1, 2]

    first.token_ids += [12, 13]
    state.place(first, 13, 4)
    state.flush()
    ids, _ = state.known([first], [5])
    assert ids.tolist() == [[4, 5, 6, 12, 13]]

    third = make_sequence([14], frequency_penalty=1.0)
    assert state.admit(third, [second, third]) == int(rows[0])
    state.place(third, 14, 0)
    state.flush()
    ids, _ = state.known([third, second], [1, 601])
    assert ids[0].tolist() == [14] * 601
