"""Keeps long results in the object store, before their jobs end. The end carries the pointer, so an
object that a fenced worker has written is never the one that is read.

A store that does not answer costs nothing but memory: the log then stays in Redis.
"""

import asyncio
import logging
from collections.abc import Callable

from contract import tasks
from contract.errors import BrokerUnavailable, CommandDenied, WireError
from payloads.results import encode_result
from payloads.store import ObjectStore, PayloadError, result_key
from workers.held_job import HeldJob
from workers.lane import Lane

log = logging.getLogger(__name__)

_TOKEN_BYTES = 32  # of a log, at least: what cannot reach the limit is not read again
_TIMEOUT_S = 10.0
_MAX_AT_ONCE = 4  # reads of logs, which Redis does before any append that comes after them


class ResultKeeper:
    """`store` is None where nothing is kept."""

    def __init__(self, store: ObjectStore | None, min_bytes: int, lane: Lane) -> None:
        self._store = store
        self._min_bytes = min_bytes
        self._lane = lane
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(_MAX_AT_ONCE)

    def is_due(self, job: HeldJob) -> bool:
        """Whether a job that has all its output should be kept before it ends."""
        if self._store is None or job.was_kept:
            return False
        num_scores = job.num_output_tokens * (1 + (job.job.params.logprobs or 0))
        return num_scores * _TOKEN_BYTES >= self._min_bytes

    def begin(self, job: HeldJob, note: Callable[[HeldJob], None]) -> None:
        """Keeps a job whose log has all its output; `note` hears when it may end."""
        job.was_kept = job.is_being_kept = True
        task = asyncio.create_task(self._keep(job, note))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        if self._tasks:
            await tasks.end(*self._tasks)

    async def _keep(self, job: HeldJob, note: Callable[[HeldJob], None]) -> None:
        assert self._store is not None
        try:
            async with self._turns:
                entries = await self._lane.read_log(job.job.id, job.job.tenant)
            if not entries or entries[-1].number != job.next_number - 1:
                return
            async with asyncio.timeout(_TIMEOUT_S):
                data = await asyncio.to_thread(encode_result, job.job, entries)
                if len(data) >= self._min_bytes:
                    key = result_key(job.job.id, job.epoch)
                    job.result = await asyncio.to_thread(self._store.put, key, data)
        except (PayloadError, BrokerUnavailable, CommandDenied, WireError, TimeoutError) as exc:
            log.warning("result stays in Redis job_id=%s: %s", job.job.id, exc or "timeout")
        finally:
            job.is_being_kept = False
            note(job)
