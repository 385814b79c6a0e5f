"""Restarts a child process that has ended.

A part is given up after a few quick failures, or if a restart would not help. If others can do
without it, it is tried again, at growing intervals and for ever.
"""

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

from infra.child import Child, Console

EXIT_USAGE = 2  # options that cannot work
EXIT_REFUSED = 3  # a model that cannot be served
_FINAL_STATUSES = frozenset({EXIT_USAGE, EXIT_REFUSED})  # a restart would not help

_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_TRIES_S = (15.0, 30.0, 60.0, 120.0, 300.0)  # between tries of a part that was given up
_JITTER = 0.2  # of such a pause: parts that ended together do not start together
_HEALTHY_AFTER_S = 60.0


class PartLost(Exception):
    """A part has ended and will not be restarted. The message is one sentence."""


class Restarts:
    """Growing pauses between quick failures, and a limit on their number. `draw` returns random
    numbers from 0 to 1."""

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        self._draw = draw
        self._num_quick = 0
        self._num_tries = 0

    def next_pause_s(self, lived_s: float) -> float | None:
        """The pause before the next start; None after too many failures."""
        if lived_s >= _HEALTHY_AFTER_S:
            self._num_quick = self._num_tries = 0
        if self._num_quick >= len(_PAUSES_S):
            return None
        self._num_quick += 1
        return _PAUSES_S[self._num_quick - 1]

    def next_try_s(self) -> float:
        """The pause before the next try of a part that was given up."""
        pause_s = _TRIES_S[min(self._num_tries, len(_TRIES_S) - 1)]
        self._num_tries += 1
        return pause_s * (1 - _JITTER + 2 * _JITTER * self._draw())


async def _tell_nobody(starts_in_s: float) -> None:
    pass


GiveUp = Callable[[str, float], Awaitable[None]]  # told why, and the seconds until the next try


async def keep_running(
    child: Child,
    console: Console,
    announce: Callable[[float], Awaitable[None]] = _tell_nobody,
    give_up: GiveUp | None = None,
    restarts: Restarts | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> NoReturn:
    """Starts a child and restarts it whenever it ends. `announce` gets, before each start, the
    seconds until it. A part that is given up is told to `give_up`, or PartLost is raised."""
    restarts = restarts or Restarts()
    await announce(0.0)
    while True:
        started_s = clock()
        child.start()
        status = await child.wait()
        how = describe_status(status)
        pause_s = restarts.next_pause_s(clock() - started_s)
        if status in _FINAL_STATUSES or pause_s is None:
            if give_up is None:
                raise PartLost(_lost(child.name, status, how))
            pause_s = restarts.next_try_s()
            await give_up(f"{how}: {child.last_line}" if child.last_line else how, pause_s)
        console.line("batchway", f"{child.name} ended with {how}; starts again in {pause_s:.3g} s")
        await announce(pause_s)
        await sleep(pause_s)


def _lost(name: str, status: int, how: str) -> str:
    if status in _FINAL_STATUSES:
        return f"{name} cannot run ({how}); its last lines say why"
    return f"{name} ended again and again, at last with {how}: giving up"


def describe_status(status: int) -> str:
    """Describes an exit status as subprocess gives it: negative for a signal."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
