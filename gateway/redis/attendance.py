"""Which jobs this gateway's callers follow, and the reports of it to Redis."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from contract.errors import BrokerUnavailable, CommandDenied, WireError
from contract.functions import Functions
from gateway.redis.guarded_redis import GuardedRedis

_RETRY_S = 1.0


class Attendance:
    """The followed jobs of one broker. `lapses_s`: when a job without a report ends."""

    def __init__(self, guarded: GuardedRedis, functions: Functions, *, lapses_s: float) -> None:
        self._guarded = guarded
        self._functions = functions
        self._lapses_s = lapses_s
        self._followed: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def following(self, job_id: str) -> AsyncIterator[None]:
        """A context during which the job has a caller."""
        self._followed[job_id] += 1
        try:
            yield
        finally:
            self._followed[job_id] -= 1
            if not self._followed[job_id]:
                del self._followed[job_id]

    async def report(self) -> None:
        """Reports that the followed jobs have callers, until cancelled."""
        pause_s = self._lapses_s / 3
        while True:
            await asyncio.sleep(pause_s)
            pause_s = self._lapses_s / 3
            if self._followed:
                try:
                    await self._guarded.call(lambda: self._functions.attend(list(self._followed)))
                except BrokerUnavailable:
                    pause_s = min(pause_s, _RETRY_S)  # before a sweep finds it lapsed
                except (CommandDenied, WireError):
                    pass
