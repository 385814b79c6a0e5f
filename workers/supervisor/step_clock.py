"""Until when the places that come free with a step may wait for who takes them.

A job that is claimed during a step starts in the next one, early or late in it as the claim may
be. Knows seconds; leaves places and jobs to `Holding`. The clock is passed in.
"""

import math
from collections import deque

_NUM_STEPS = 8  # the shortest of the latest ones is counted on
_LEAST_LEAD_S = 0.02  # from the last call to the end of the step
_LEAD = 0.1  # the same, as a share of the step
_CLAIMS = 3.0  # the same, in claims of the length that they had lately
_FADING = 0.9  # of a long claim, with each one after it


class StepClock:
    """Foretells when the step under way ends, by those before it."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._claim_s = 0.0

    def begin(self, now_s: float) -> None:
        """A step is under way from now on."""
        self._began_s = now_s

    def end(self, step_s: float) -> None:
        """It took so long, and none is under way."""
        self._began_s = None
        self._steps_s.append(step_s)

    def note_claim(self, took_s: float) -> None:
        """A claim took so long, from the call to the last message to the engine."""
        self._claim_s = max(took_s, _FADING * self._claim_s)

    @property
    def last_call_s(self) -> float:
        """When to claim at the latest, so that the engine hears of it before its next step; in the
        past where no step is under way or its length is unknown."""
        if self._began_s is None or not self._steps_s:
            return -math.inf
        step_s = min(self._steps_s)
        lead_s = max(_LEAST_LEAD_S, _LEAD * step_s, _CLAIMS * self._claim_s)
        return self._began_s + step_s - lead_s
