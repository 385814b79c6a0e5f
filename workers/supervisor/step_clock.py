"""Decides how long a claim for the places that a step frees may wait.

A job claimed during a step starts in the next one, no matter when in the step it was claimed. The
clock is passed in.
"""

import math
from collections import deque

_NUM_STEPS = 8  # the shortest of the latest steps is used
_LEAST_LEAD_S = 0.02  # lead before the end of the step
_LEAD = 0.1  # the same, as a share of the step
_CLAIMS = 3.0  # the same, in recent claim durations
_FADING = 0.9  # decay of a long claim with each later one


class StepClock:
    """Predicts the end of the current step from earlier ones."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._claim_s = 0.0

    def begin(self, now_s: float) -> None:
        """A step begins."""
        self._began_s = now_s

    def end(self, step_s: float) -> None:
        """The step ended after `step_s` seconds."""
        self._began_s = None
        self._steps_s.append(step_s)

    def note_claim(self, took_s: float) -> None:
        """A claim took so long, up to the last message to the engine."""
        self._claim_s = max(took_s, _FADING * self._claim_s)

    @property
    def last_call_s(self) -> float:
        """Latest time to claim so that the engine is told before its next step; in the past if no
        step is under way or its length is unknown."""
        if self._began_s is None or not self._steps_s:
            return -math.inf
        step_s = min(self._steps_s)
        lead_s = max(_LEAST_LEAD_S, _LEAD * step_s, _CLAIMS * self._claim_s)
        return self._began_s + step_s - lead_s
