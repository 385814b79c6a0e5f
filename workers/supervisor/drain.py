"""How long running jobs may continue during a drain, and when they are released."""

import asyncio
import time
from collections.abc import Callable

_MAX_RESERVE_SHARE = 1 / 3  # of a short budget, kept for releasing jobs


class Drain:
    """A drain, begun by a signal, a spot notice or an order. Times are in seconds.

    Jobs that still run `release_s` before the end of the budget are released; with a short budget,
    after two thirds of it.
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
        """Begins the drain. Returns False if it has begun before; the budget is not extended."""
        if self.begun.is_set():
            return False
        self._over_at_s = self._clock_s() + self.budget_s
        self.begun.set()
        return True

    @property
    def running_s(self) -> float:
        """Time until running jobs are released."""
        return max(0.0, self.left_s - self.reserve_s)

    @property
    def left_s(self) -> float:
        """Time until the process must end; before the drain, the time reserved for releasing."""
        if not self.begun.is_set():
            return self.reserve_s
        return max(0.0, self._over_at_s - self._clock_s())
