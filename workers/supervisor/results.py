"""Moves long results to the object store, and deletes objects that no job needs.

A result is stored before its job ends; the end carries the pointer, so an object written by a
fenced worker is never read. If the store does not answer, the log stays in Redis.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from contract import tasks
from contract.errors import BrokerUnavailable, CommandDenied, WireError
from contract.payloads.encoding import encode_result
from contract.payloads.store import (
    MAX_AGE_S,
    ObjectStore,
    PayloadError,
    PayloadUnavailable,
    result_key,
)
from workers.supervisor.held_job import HeldJob
from workers.supervisor.worker_broker import WorkerBroker

log = logging.getLogger(__name__)

_TOKEN_BYTES = 32  # lower bound per logged token
_TIMEOUT_S = 10.0
_MAX_AT_ONCE = 4  # reads of logs, which Redis does before any append that comes after them


class ResultKeeper:
    """`store` is None if no results are stored."""

    def __init__(self, store: ObjectStore | None, min_bytes: int, lane: WorkerBroker) -> None:
        self._store = store
        self._min_bytes = min_bytes
        self._lane = lane
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(_MAX_AT_ONCE)

    def is_due(self, job: HeldJob) -> bool:
        """Whether a job that has all its output should be stored before it ends."""
        if self._store is None or job.was_kept:
            return False
        num_scores = job.num_output_tokens * (1 + (job.job.params.logprobs or 0))
        return num_scores * _TOKEN_BYTES >= self._min_bytes

    def begin(self, job: HeldJob, note: Callable[[HeldJob], None]) -> None:
        """Stores a job's result; calls `note` when the job may end."""
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


_TIDY_S = 1.0
_LOOK_S = 3600.0  # between searches for objects without a job, which crashes leave


async def tidy(store: ObjectStore | None, lane: WorkerBroker) -> None:
    """Deletes orphaned objects for ever; does nothing without a store."""
    looked_s = -_LOOK_S
    while store is not None:
        try:
            await lane.delete_orphaned_objects(store)
            if time.monotonic() - looked_s > _LOOK_S:
                looked_s = time.monotonic()
                await asyncio.to_thread(store.delete_older, MAX_AGE_S)
        except (BrokerUnavailable, CommandDenied, WireError, PayloadUnavailable) as exc:
            log.warning("objects not tidied: %s", exc)
        await asyncio.sleep(_TIDY_S)
    await asyncio.Event().wait()  # the other tasks go on
