"""Restarts a child process that has ended."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

from infra.child import Child, Console

EXIT_USAGE = 2  # options that cannot work
EXIT_REFUSED = 3  # a model that cannot be served
_FINAL_STATUSES = frozenset({EXIT_USAGE, EXIT_REFUSED})  # a restart would not help

_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_HEALTHY_AFTER_S = 60.0


class PartLost(Exception):
    """A part has ended and will not be restarted. The message is one sentence."""


class Restarts:
    """Growing pauses between quick failures, and a limit on their number."""

    def __init__(self) -> None:
        self._num_quick = 0

    def next_pause_s(self, lived_s: float) -> float | None:
        """How long to wait before the next start; None after too many failures."""
        if lived_s >= _HEALTHY_AFTER_S:
            self._num_quick = 0
        if self._num_quick >= len(_PAUSES_S):
            return None
        self._num_quick += 1
        return _PAUSES_S[self._num_quick - 1]


async def _tell_nobody(starts_in_s: float) -> None:
    pass


async def keep_running(
    child: Child, console: Console, announce: Callable[[float], Awaitable[None]] = _tell_nobody
) -> NoReturn:
    """Starts a child and restarts it whenever it ends; `announce` is told before each start, in how
    many seconds it is. Raises PartLost."""
    restarts = Restarts()
    await announce(0.0)
    while True:
        started_s = time.monotonic()
        child.start()
        status = await child.wait()
        how = describe_status(status)
        if status in _FINAL_STATUSES:
            raise PartLost(f"{child.name} cannot run ({how}); its last lines say why")
        pause_s = restarts.next_pause_s(time.monotonic() - started_s)
        if pause_s is None:
            raise PartLost(f"{child.name} ended again and again, at last with {how}: giving up")
        console.line("batchway", f"{child.name} ended with {how}; starts again in {pause_s:g} s")
        await announce(pause_s)
        await asyncio.sleep(pause_s)


def describe_status(status: int) -> str:
    """Describes an exit status as subprocess gives it: negative for a signal."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
