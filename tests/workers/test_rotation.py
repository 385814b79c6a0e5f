"""Which lane of which partition a worker serves next."""

from collections import Counter
from itertools import count

import pytest

from contract.function_types import LaneRoom
from workers.supervisor.rotation import MAX_PASSED, Line, Rotation

SHARES = {"interactive": 0.0, "standard": 0.0, "batch": 0.2}
ONE = dict.fromkeys(SHARES, LaneRoom(1, 1000))


def served(rotation: Rotation, num_turns: int, cost: int = 10) -> Counter[Line]:
    """The lines of so many turns, each of which claims one job."""
    found, ids = Counter[Line](), count()
    for _ in range(num_turns):
        turn = rotation.choose(ONE, SHARES, {})
        assert turn is not None
        found[turn.line] += 1
        rotation.note_claimed(turn, {f"job-{next(ids)}": cost}, SHARES)
    return found


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 10), (0.5, 0.25)])
def test_partitions_are_served_by_the_weight_of_who_waits(weights: tuple[float, float]) -> None:
    rotation = Rotation()
    for partition, weight in enumerate(weights):
        rotation.note_waiting(partition, {"standard": weight})
    found = served(rotation, 220)
    assert found[0, "standard"] == pytest.approx(220 * weights[0] / sum(weights), abs=1)


def test_urgent_lanes_come_first_wherever_they_wait_but_for_minimum_shares() -> None:
    rotation = Rotation()
    rotation.note_waiting(0, {"batch": 1.0})
    rotation.note_waiting(1, {"interactive": 1.0})
    assert served(rotation, 100)[0, "batch"] == pytest.approx(20, abs=1)


def test_a_partition_that_returns_saves_no_credit() -> None:
    rotation = Rotation()
    rotation.note_waiting(0, {"standard": 1.0})
    served(rotation, 50)
    rotation.note_waiting(1, {"standard": 1.0})
    assert served(rotation, 20)[1, "standard"] == pytest.approx(10, abs=1)


def test_a_bill_corrects_the_cost() -> None:
    """A tenant whose jobs end early gets more of them."""
    rotation = Rotation()
    found, ids = Counter[Line](), count()
    for partition in (0, 1):
        rotation.note_waiting(partition, {"standard": 1.0})
    for _ in range(90):
        turn = rotation.choose(ONE, SHARES, {})
        assert turn is not None
        job_id = f"job-{next(ids)}"
        rotation.note_claimed(turn, {job_id: 10}, SHARES)
        rotation.settle(job_id, 5 if turn.line[0] == 0 else 10)
        found[turn.line] += 1
    assert found[0, "standard"] == pytest.approx(60, abs=1)


def test_a_job_that_never_fits_is_passed_a_bounded_number_of_times() -> None:
    rotation = Rotation()
    for partition in (0, 1):
        rotation.note_waiting(partition, {"standard": 1.0})
    ids, num_passed = count(), 0
    while True:
        first = rotation.choose(ONE, SHARES, {})
        assert first is not None
        if first.line[0] == 1:
            rotation.note_claimed(first, {f"job-{next(ids)}": 10}, SHARES)
            continue
        rotation.note_claimed(first, {}, SHARES)  # the job of partition 0 does not fit
        other = rotation.choose(ONE, SHARES, {first.line: ONE[first.line[1]]})
        if other is None:
            break
        rotation.note_claimed(other, {f"job-{next(ids)}": 10}, SHARES)
        num_passed += 1
    assert num_passed == MAX_PASSED - 1


@pytest.mark.parametrize("more", [LaneRoom(1, 100), LaneRoom(0, 101)])
def test_a_line_without_a_job_that_fits_is_chosen_again_once_there_is_more_room(
    more: LaneRoom,
) -> None:
    """A job ended while the worker asked the partitions one after another: the others do not take
    its place because one asked before it was free."""
    rotation = Rotation()
    for partition in (0, 1):
        rotation.note_waiting(partition, {"standard": 1.0})
    first, then = (0, "standard"), LaneRoom(0, 100)
    for room, chosen in ((then, 1), (LaneRoom(0, 99), 1), (more, 0)):
        turn = rotation.choose({"standard": room}, SHARES, {first: then})
        assert turn is not None
        assert turn.line == (chosen, "standard")
    missed = dict.fromkeys(rotation.waiting, then)
    assert rotation.choose({"standard": then}, SHARES, missed) is None


def test_a_partition_that_does_not_answer_is_left_out() -> None:
    rotation = Rotation()
    for partition in (0, 1):
        rotation.note_waiting(partition, {"standard": 1.0})
    rotation.forget(1)
    assert set(served(rotation, 10)) == {(0, "standard")}
    rotation.forget(0)
    assert rotation.choose(ONE, SHARES, {}) is None
