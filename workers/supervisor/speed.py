"""Measures how fast this worker is: gateways predict waiting times from its rate, and the times of
its steps say when to claim. A job claimed during a step starts in the next step, no matter when in
the step it was claimed. Callers pass the time."""

import math
from collections import deque
from collections.abc import Mapping

from contract.function_types import WorkerCapacity

_MIN_WINDOW_S = 1.0
_NEWEST_WINDOW = 0.5  # weight of the newest measurement in the average
_NEWEST_STEP = 0.05


class Speed:
    """The rate at which a full worker serves the cost of jobs, in tokens per second.

    A measurement with room left can raise the rate but not lower it.
    """

    def __init__(self) -> None:
        self.tokens_per_s = 0.0  # 0: not measured yet
        self._step_s = 0.0
        self._window: tuple[float, int] | None = None  # its start (s), and the total drained then
        self._had_room = True

    def begin(self, tokens_per_s: float) -> None:
        """Takes what the engine has measured as it was loaded (0: nothing), until more is known."""
        self.tokens_per_s = self.tokens_per_s or tokens_per_s

    def note_step(self, step_s: float) -> None:
        """Records a step, which gave each stream one token."""
        share = _NEWEST_STEP if self._step_s else 1.0
        self._step_s += share * (step_s - self._step_s)

    def note_room(self) -> None:
        """Records that there was room and no job to fill it."""
        self._had_room = True

    def measure(self, now_s: float, num_drained: int, *, has_room: bool) -> None:
        """Ends the window unless it is too short. `num_drained`: tokens served since the start."""
        if self._window is not None:
            start_s, drained_before = self._window
            if now_s - start_s < _MIN_WINDOW_S:
                return
            rate = (num_drained - drained_before) / (now_s - start_s)
            if not (self._had_room or has_room):
                share = _NEWEST_WINDOW if self.tokens_per_s else 1.0
                self.tokens_per_s += share * (rate - self.tokens_per_s)
            elif self.tokens_per_s:
                self.tokens_per_s = max(self.tokens_per_s, rate)
        self._window = now_s, num_drained
        self._had_room = has_room

    def capacity(
        self, max_tokens: int, max_jobs: int, lane_shares: Mapping[str, float]
    ) -> WorkerCapacity:
        """The capacity that a heartbeat reports."""
        stream_rate = 1 / self._step_s if self._step_s else 0.0
        rates = round(self.tokens_per_s, 3), round(stream_rate, 3)
        return WorkerCapacity(*rates, max_tokens, max_jobs, tuple(lane_shares), lane_shares)


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
