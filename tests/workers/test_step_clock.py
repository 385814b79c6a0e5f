"""The time until which places that become free with a step may be given away. The clock is the
tests' own."""

import math

import pytest

from workers.supervisor.holding import StepClock


@pytest.mark.parametrize(
    ("steps_s", "claims_s", "deadline_s"),
    [
        # A tenth of a second before the end, so that the engine gets the job in time.
        ([1.0], [], 10.9),
        # The shortest of the latest steps counts: a call that is too early costs a later job its
        # turn; one that is too late costs a step of the place.
        ([1.0, 3.0], [], 10.9),
        ([1.0, *[3.0] * 9], [], 12.7),
        # Slow claims are made earlier, by three times their duration; some fast ones later not.
        ([1.0], [0.2], 10.4),
        ([1.0], [0.2, *[0.001] * 20], 10.9),
        # A step of ten milliseconds is too short: the claim is made as it begins.
        ([0.01], [], 9.99),
        # In a step of unknown length jobs are claimed at once.
        ([], [], -math.inf),
    ],
)
def test_the_last_call_comes_before_the_step_ends(
    steps_s: list[float], claims_s: list[float], deadline_s: float
) -> None:
    """Between two steps there is none."""
    clock = StepClock()
    for step_s in steps_s:
        clock.end(step_s)
    for claim_s in claims_s:
        clock.note_claim(claim_s)
    assert clock.claim_deadline_s == -math.inf
    clock.begin(10.0)
    assert clock.claim_deadline_s == pytest.approx(deadline_s)
    clock.end(1.0)
    assert clock.claim_deadline_s == -math.inf
