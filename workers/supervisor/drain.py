"""The end of a worker's life: how long jobs may go on, and when the rest is given back."""

import asyncio
import time
from collections.abc import Callable

_MAX_RESERVE_SHARE = 1 / 3  # of a short budget, kept for giving back


class Drain:
    """Begun once, by a signal, a notice or an order. Seconds.

    What still runs `release_s` before the budget's end is given back; where the budget is short,
    when two thirds of it are spent.
    """

    def __init__(
        self, budget_s: float, release_s: float, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.budget_s = budget_s
        self.reserve_s = min(release_s, budget_s * _MAX_RESERVE_SHARE)
        self.begun = asyncio.Event()
        self._clock_s = clock_s
        self._over_at_s = 0.0

    def begin(self) -> bool:
        """False where it had begun before: the budget is not granted twice."""
        if self.begun.is_set():
            return False
        self._over_at_s = self._clock_s() + self.budget_s
        self.begun.set()
        return True

    @property
    def running_s(self) -> float:
        """How long jobs may still go on."""
        return max(0.0, self.left_s - self.reserve_s)

    @property
    def left_s(self) -> float:
        """How long until the process should be gone; what it takes to give back, if not begun."""
        if not self.begun.is_set():
            return self.reserve_s
        return max(0.0, self._over_at_s - self._clock_s())
