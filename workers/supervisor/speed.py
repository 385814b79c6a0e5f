"""Measures the speed of this worker, from which gateways predict waiting times.

Callers pass the time.
"""

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
