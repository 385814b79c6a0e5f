"""Moves long results to the object store, and deletes objects that no job needs.

A result is stored before its job ends. The end refers to the object, so an object written by a
fenced worker is never read. If the store does not answer, the result stays in Redis.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from contract.connection import end_tasks
from contract.errors import BrokerUnavailable, CommandDenied, WireError
from contract.payloads.encoding import encode_result
from contract.payloads.store import (
    MAX_AGE_S,
    ObjectStore,
    PayloadError,
    PayloadUnavailable,
    result_key,
)
from workers.supervisor.held_job import MAX_VECTOR_BYTES, HeldJob
from workers.supervisor.worker_broker import WorkerBroker

log = logging.getLogger(__name__)

_TOKEN_BYTES = 32  # of a logged token, at least
_TIMEOUT_S = 10.0
_MAX_AT_ONCE = 4  # concurrent reads of logs, which delay appends in Redis


class ResultKeeper:
    """Stores long results; none if `store` is None."""

    def __init__(self, store: ObjectStore | None, min_bytes: int, broker: WorkerBroker) -> None:
        self._store = store
        self._min_bytes = min_bytes
        self._broker = broker
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)

    def is_due(self, job: HeldJob) -> bool:
        """Whether the result of a complete job should be stored before the job ends."""
        if self._store is None or job.was_stored:
            return False
        if job.num_vector_bytes > MAX_VECTOR_BYTES:
            return True
        num_scores = job.num_output_tokens * (1 + (job.job.params.logprobs or 0))
        return num_scores * _TOKEN_BYTES >= self._min_bytes

    def begin(self, job: HeldJob, note: Callable[[HeldJob], None]) -> None:
        """Stores a job's result; calls `note` when the job may end."""
        job.was_stored = job.is_storing = True
        task = asyncio.create_task(self._keep(job, note))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        if self._tasks:
            await end_tasks(*self._tasks)

    async def _keep(self, job: HeldJob, note: Callable[[HeldJob], None]) -> None:
        assert self._store is not None
        try:
            async with self._slots:
                entries = await self._broker.read_log(job.job.id, job.job.tenant)
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
            job.is_storing = False
            note(job)


_TIDY_S = 1.0
_SEARCH_S = 3600.0  # between searches for old objects, which crashes leave without a job


async def tidy(store: ObjectStore | None, broker: WorkerBroker) -> None:
    """Deletes orphaned objects until cancelled; does nothing without a store."""
    searched_s = -_SEARCH_S
    while store is not None:
        try:
            await broker.delete_orphaned_objects(store)
            if time.monotonic() - searched_s > _SEARCH_S:
                searched_s = time.monotonic()
                await asyncio.to_thread(store.delete_older, MAX_AGE_S)
        except (BrokerUnavailable, CommandDenied, WireError, PayloadUnavailable) as exc:
            log.warning("orphaned objects not deleted: %s", exc)
        await asyncio.sleep(_TIDY_S)
    await asyncio.Event().wait()  # the supervisor ends with the first task that returns
