"""The waiting queue, compared with sorting."""

import math
import random

import pytest

from contract.jobs import SamplingParams
from workers.engine.interface import Chunk
from workers.engine.order import Lanes, VirtualTokenCounters, WaitingQueue
from workers.engine.sequence import Sequence
from workers.lanes import DEFAULT_LANES


def waiting(arrival: int, draw: random.Random) -> Sequence:
    """A waiting sequence of some lane and tenant, with its own length and deadline."""
    params = SamplingParams(max_tokens=draw.randrange(1, 2_000), seed=0)
    lane, tenant = draw.choice(["interactive", "standard", "batch"]), draw.choice("abc")
    sequence = Sequence(f"job-{arrival}", 1, 0, tenant, lane, [0], 1, params, arrival=arrival)
    sequence.deadline_s = draw.choice([None, draw.uniform(0, 500)])
    return sequence


@pytest.mark.parametrize("lane", [None, "standard"])
def test_the_waiting_queue_is_sorted(lane: str | None) -> None:
    """While sequences return and leave and tenants are served: by level, then key, then arrival."""
    draw = random.Random(3)
    lanes, policy = Lanes(DEFAULT_LANES, 100), VirtualTokenCounters()
    line = WaitingQueue(lanes, policy)
    present: list[Sequence] = []
    for arrival in draw.sample(range(200), 200):  # those preempted come with an early arrival
        sequence = waiting(arrival, draw)
        lanes.arrive(sequence)
        policy.arrive(sequence)
        line.add(sequence)
        line.admit(sequence)
        present.append(sequence)
        served = draw.choice(present)
        policy.charge(served.account, 10, 3)
        lanes.settle([Chunk(served, 0, 5_000, samples=False)])
        if draw.random() < 0.2:
            line.discard(present.pop(draw.randrange(len(present))))
    expected = sorted(
        (s for s in present if lane in (None, s.lane)),
        key=lambda s: (lanes.level(s), policy.key(s), s.arrival),
    )
    assert [sequence for _, sequence in line.ordered(lane, math.inf, ())] == expected
    assert line.first_priority == min(lanes.of(s).priority for s in present)


def test_a_sequence_held_back_by_its_strategy_is_never_the_head() -> None:
    """Its strategy holds it back: its lane shows, but it is never the head."""
    draw = random.Random(5)
    lanes = Lanes(DEFAULT_LANES, 100)
    line = WaitingQueue(lanes, VirtualTokenCounters())
    sequence = waiting(0, draw)
    lanes.arrive(sequence)
    line.add(sequence)
    assert (len(line), line.lanes, line.first_priority) == (1, (sequence.lane,), None)
    assert not any(line.ordered(None, math.inf, ()))
    line.discard(sequence)
    assert (len(line), line.lanes) == (0, ())
