"""Asks for a worker when a call was refused because none lives."""

import contextlib

from contract.errors import BatchwayError, ErrorCode, JobRefused
from contract.jobs import Job
from contract.starts import Starts
from gateway.redis.guarded_redis import GuardedRedis

_AFTER_S = 60.0  # for which a wish stands after the cold start


class Wishes:
    """Of a gateway. A job that waits is seen by whoever starts workers; a refused call is not."""

    def __init__(self, redis: GuardedRedis, starts: Starts, cold_start_s: float) -> None:
        self._redis = redis
        self._starts = starts
        self._for_s = cold_start_s + _AFTER_S

    async def leave(self, job: Job, refusal: JobRefused | None) -> None:
        """The refusal stays the answer, even if this fails."""
        if refusal is None or refusal.code is not ErrorCode.NO_WORKERS:
            return
        with contextlib.suppress(BatchwayError):
            await self._redis.call(lambda: self._starts.want(job.model, job.lane, self._for_s))
