"""How large a stage's batches become, and when they are sent."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.runners.flows.stage_queues import GROWTH, Queues, StageBatcher


def measured(
    base_s: float, call_s: float, noise: float = 0.0, num_batches: int = 50
) -> StageBatcher:
    """A stage that ran batches of its best size, each `base_s` and `call_s` for each call."""
    rng = random.Random(0)
    stage = StageBatcher()
    for _ in range(num_batches):
        size = stage.best_size
        seconds = base_s + call_s * size
        stage.ended(size, seconds * rng.uniform(1 - noise, 1 + noise))
    return stage


def throughput(base_s: float, call_s: float, size: float) -> float:
    return size / (base_s + call_s * size)


@given(st.floats(1e-3, 1.0), st.floats(1e-4, 0.1))
def test_the_best_size_is_where_throughput_stops_growing(base_s: float, call_s: float) -> None:
    """Twice it adds less than the stated share; a smaller one more, unless it is a bound."""
    size = measured(base_s, call_s).best_size
    double = throughput(base_s, call_s, 2 * size + 1) / throughput(base_s, call_s, size + 0.5)
    assert double <= 1 + GROWTH + 1e-9 or size == 256
    smaller = 0.75 * size - 1
    if smaller >= 1:
        growth = throughput(base_s, call_s, 2 * smaller) / throughput(base_s, call_s, smaller)
        assert growth >= 1 + GROWTH


def test_sizes_are_tried_from_one_up() -> None:
    """Never more than twice what was measured."""
    stage = StageBatcher()
    sizes = []
    for _ in range(10):
        sizes.append(stage.best_size)
        stage.ended(sizes[-1], 0.1)
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 128, 256, 256]


def test_noise_moves_the_size_little() -> None:
    """A tenth of noise, from half to double the exact size."""
    exact = measured(0.02, 0.001).best_size
    assert exact / 2 < measured(0.02, 0.001, noise=0.1, num_batches=200).best_size < 2 * exact


def test_a_stage_that_slows_down_changes_its_size() -> None:
    """Old measurements fade: where calls cost ten times as much, smaller batches do."""
    stage = measured(0.02, 0.001)
    before = stage.best_size
    rng = random.Random(0)
    for _ in range(300):
        size = rng.randint(1, stage.best_size)
        stage.ended(size, 0.02 + 0.01 * size)
    assert stage.best_size < before / 5


SENT = {
    "nothing": (Queues(num_waiting=0, waited_s=0.0, num_before=0), 0),
    "full": (Queues(num_waiting=200, waited_s=0.0, num_before=9), 90),
    "more may come": (Queues(num_waiting=5, waited_s=0.0, num_before=9), 0),
    "no more comes": (Queues(num_waiting=5, waited_s=0.0, num_before=0), 5),
    "waited": (Queues(num_waiting=5, waited_s=1.0, num_before=9), 5),
    "next full": (Queues(200, 1.0, 0, num_next=8, next_best_size=4), 0),
    "next not": (Queues(200, 1.0, 0, num_next=7, next_best_size=4), 90),
    "one batch runs": (Queues(200, 1.0, 0, num_under_way=90), 90),
    "two run": (Queues(200, 1.0, 0, num_under_way=91), 0),
}


@pytest.mark.parametrize(("queues", "num_sent"), SENT.values(), ids=SENT.keys())
def test_calls_are_sent_when_waiting_gains_nothing(queues: Queues, num_sent: int) -> None:
    """A full batch at once, a part when no more can join, none before a full next stage."""
    assert measured(0.02, 0.001).num_to_send(queues) == num_sent


def test_a_call_waits_at_most_what_a_batch_takes() -> None:
    """Before a measurement, not at all."""
    waiting = Queues(num_waiting=1, waited_s=0.0, num_before=9)
    assert StageBatcher().num_to_send(waiting) == 1
    stage = measured(0.02, 0.001)
    assert stage.hold_s == pytest.approx(0.11, rel=0.01)
    assert stage.num_to_send(waiting) == 0


@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(0.0, 1e6)), max_size=20),
    st.builds(
        Queues,
        st.integers(0, 1000),
        st.floats(0, 1e3),
        st.integers(0, 9),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
)
def test_any_measurements_give_a_size_and_a_sending(
    batches: list[tuple[int, float]], queues: Queues
) -> None:
    """At least one call, never more than wait."""
    stage = StageBatcher()
    for size, seconds in batches:
        stage.ended(size, seconds)
    assert 1 <= stage.best_size <= 256
    assert 0 <= stage.num_to_send(queues) <= queues.num_waiting
    assert stage.hold_s >= 0
