"""Decides how long to delay the claim for the places that a step frees.

A job claimed during a step starts in the next step, no matter when in the step it was claimed.
Callers pass the time.
"""

import math
from collections import deque

_NUM_STEPS = 8  # the shortest of the last steps predicts the current one
# The claim is made before the end of the step by the largest of:
_MIN_LEAD_S = 0.02
_LEAD_SHARE = 0.1  # of the step
_LEAD_CLAIMS = 3.0  # recent claim durations
_CLAIM_DECAY = 0.9  # of the recent claim duration, with each shorter claim


class StepClock:
    """Predicts the end of the current step from earlier ones."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._claim_s = 0.0

    def begin(self, now_s: float) -> None:
        """Records that a step begins."""
        self._began_s = now_s

    def end(self, step_s: float) -> None:
        """Records that the step ended after `step_s` seconds."""
        self._began_s = None
        self._steps_s.append(step_s)

    def note_claim(self, took_s: float) -> None:
        """Records a claim's duration, including the messages to the engine."""
        self._claim_s = max(took_s, _CLAIM_DECAY * self._claim_s)

    @property
    def claim_deadline_s(self) -> float:
        """Latest time to claim a job that starts in the next step; -inf if no step is running or
        the length of steps is unknown."""
        if self._began_s is None or not self._steps_s:
            return -math.inf
        step_s = min(self._steps_s)
        lead_s = max(_MIN_LEAD_S, _LEAD_SHARE * step_s, _LEAD_CLAIMS * self._claim_s)
        return self._began_s + step_s - lead_s
