"""How partitions share the fleet's bounds: never more than all together, and not in vain."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.partitions import Entry, PartitionMap
from contract.shares import STEP, rebalanced

MANY_PERIODS = 60
ROUNDING = 1e-9


def map_of(weights: list[float]) -> PartitionMap:
    return PartitionMap(1, {number: Entry(weight) for number, weight in enumerate(weights)})


def with_parts(known: PartitionMap, parts: dict[int, float]) -> PartitionMap:
    entries = {n: Entry(entry.weight, share=parts[n]) for n, entry in known.entries.items()}
    return PartitionMap(known.version + 1, entries)


def after(known: PartitionMap, used: dict[int, float], periods: int) -> PartitionMap:
    for _ in range(periods):
        parts = rebalanced(known, used)
        known = known if parts is None else with_parts(known, parts)
    return known


@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=6), st.integers(0, 2**32))
def test_what_waits_never_exceeds_the_bound(weights: list[float], seed: int) -> None:
    """Queues grow to the parts that gateways know and sink, in any order: by the new map or the
    one before until all have read it, and by the new one alone while the next is made. A part
    changes by a step at the most, and does not sink below its floor."""
    rng, known = random.Random(seed), map_of(weights)
    before, used = known, dict.fromkeys(known.numbers, 0.0)

    def pass_time(*maps: PartitionMap) -> None:
        for number in known.numbers:
            most = max(used[number], *(each.share(number) for each in maps))
            used[number] = rng.choice((used[number], most, rng.uniform(0.0, used[number])))
        assert sum(used.values()) <= 1.0 + ROUNDING

    for _ in range(MANY_PERIODS):
        pass_time(before, known)
        pass_time(known, known)
        seen = dict(used)
        pass_time(known, known)
        parts = rebalanced(known, seen, [n for n in known.numbers if rng.random() < 0.2])
        before, known = known, known if parts is None else with_parts(known, parts)
        for number in known.numbers:
            floor = min(before.share(number), 0.25 * known.weight_share(number))
            assert known.share(number) >= floor - 2e-4
            assert abs(known.share(number) - before.share(number)) <= STEP + 2e-4


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0, 1.0], [8.0, 1.0, 1.0]])
def test_a_full_partition_gets_what_others_leave_and_gives_it_back(weights: list[float]) -> None:
    """All but the floors; afterwards parts are by weight again."""
    known = map_of(weights)
    full = dict.fromkeys(known.numbers, 0.0) | {1: 1.0}
    for _ in range(MANY_PERIODS):  # its queue is as long as it may be
        known = after(known, full | {1: known.share(1)}, 1)
    floors = sum(0.25 * known.weight_share(n) for n in known.numbers if n != 1)
    assert known.share(1) == pytest.approx(1.0 - floors, abs=0.02)
    known = after(known, dict.fromkeys(known.numbers, 0.0), MANY_PERIODS)
    for number in known.numbers:
        assert known.share(number) == pytest.approx(known.weight_share(number), abs=0.02)


def test_nothing_changes_where_all_have_room_or_none_has() -> None:
    known = map_of([1.0, 1.0])
    assert rebalanced(known, {0: 0.1, 1: 0.3}) is None
    assert rebalanced(known, {0: 0.5, 1: 0.5}) is None
    assert rebalanced(known, {0: 0.3, 1: 0.5}, [1]) is None


def test_a_new_partition_makes_all_parts_those_by_weight() -> None:
    known = with_parts(map_of([1.0, 1.0]), {0: 0.7, 1: 0.2})
    assert known.share(0) == 0.7
    more = PartitionMap(3, {**known.entries, 2: Entry(2.0)})
    assert [more.share(number) for number in (0, 1, 2)] == [0.25, 0.25, 0.5]
