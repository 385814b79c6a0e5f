"""Notices an engine that hangs: its process lives, so its socket stays open, but no step ends."""

import asyncio
from collections.abc import Callable

_NUM_LOOKS = 10


class Watchdog:
    """Waits for an engine that says nothing for `limit_s` seconds although it has work.

    Counts looks and not the clock: while a machine is suspended the engine has no time either.
    """

    def __init__(self, limit_s: float, has_work: Callable[[], bool]) -> None:
        self._every_s = limit_s / _NUM_LOOKS
        self._has_work = has_work
        self._num_silent = 0

    def hear(self) -> None:
        """The engine has said something."""
        self._num_silent = 0

    async def engine_hangs(self) -> None:
        """Returns once it does."""
        while self._num_silent < _NUM_LOOKS:
            await asyncio.sleep(self._every_s)
            self._num_silent = self._num_silent + 1 if self._has_work() else 0
