"""Asks for a worker when a call was refused because none lives."""

import contextlib

from contract.errors import BatchwayError, ErrorCode, JobRefused
from contract.jobs import Job
from contract.starts import Starts
from gateway.redis.guarded_redis import GuardedRedis

_AFTER_S = 60.0  # for which a wish stands after the cold start


class Wishes:
    """Requests for workers from one gateway. Starters of workers see waiting jobs, but not refused
    calls, which therefore leave a request."""

    def __init__(self, redis: GuardedRedis, starts: Starts, cold_start_s: float) -> None:
        self._redis = redis
        self._starts = starts
        self._for_s = cold_start_s + _AFTER_S

    async def leave(self, job: Job, refusal: JobRefused | None) -> None:
        """Asks for a worker if the refusal says that there is none. A failure changes nothing."""
        if refusal is None or refusal.code is not ErrorCode.NO_WORKERS:
            return
        with contextlib.suppress(BatchwayError):
            await self._redis.call(lambda: self._starts.want(job.model, job.lane, self._for_s))
