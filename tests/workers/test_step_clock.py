"""The time until which places that become free with a step may be given away. The clock is the
tests' own."""

import math

import pytest

from workers.supervisor.holding import StepClock


@pytest.fixture
def clock() -> StepClock:
    """A step clock after one step of a second."""
    clock = StepClock()
    clock.end(1.0)
    return clock


def test_the_last_call_comes_before_the_step_ends(clock: StepClock) -> None:
    """A tenth of a second before the end of a one-second step, so that the engine gets the job in
    time."""
    clock.begin(10.0)
    assert clock.claim_deadline_s == pytest.approx(10.9)


def test_nothing_waits_without_a_step_or_its_length(clock: StepClock) -> None:
    """Between two steps, and in the first: jobs are claimed at once."""
    assert clock.claim_deadline_s == -math.inf
    unknown = StepClock()
    unknown.begin(10.0)
    assert unknown.claim_deadline_s == -math.inf
    clock.begin(10.0)
    clock.end(1.0)
    assert clock.claim_deadline_s == -math.inf


def test_the_shortest_of_the_latest_steps_counts(clock: StepClock) -> None:
    """A call that is too early costs a later job its turn; one that is too late costs a step of the
    place."""
    clock.end(3.0)
    clock.begin(10.0)
    assert clock.claim_deadline_s == pytest.approx(10.9)
    for _ in range(8):
        clock.end(3.0)
    clock.begin(20.0)
    assert clock.claim_deadline_s == pytest.approx(22.7)


def test_slow_claims_are_made_earlier(clock: StepClock) -> None:
    """By three times the duration of a claim. A slow claim is forgotten after some fast ones."""
    clock.note_claim(0.2)
    clock.begin(10.0)
    assert clock.claim_deadline_s == pytest.approx(10.4)
    for _ in range(20):
        clock.note_claim(0.001)
    assert clock.claim_deadline_s == pytest.approx(10.9)


def test_short_steps_have_no_late_call() -> None:
    """Ten milliseconds are too short for one: the claim is made as the step begins."""
    clock = StepClock()
    clock.end(0.01)
    clock.begin(10.0)
    assert clock.claim_deadline_s < 10.0
