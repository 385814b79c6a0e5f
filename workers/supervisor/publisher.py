"""Appends engine output to the jobs' logs, one call for all jobs; moves long results to the object
store, and deletes objects that no job needs.

Output accumulates during a call, so a slow Redis makes events larger, not calls more frequent. A
call without an answer is repeated unchanged; event numbers prevent duplicates.

A result is stored before its job ends. The end refers to the object, so an object written by a
fenced worker is never read. If the store does not answer, the result stays in Redis."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Literal

from contract.connection import end_tasks
from contract.errors import BrokerUnavailable, CommandDenied, ErrorCode, WireError
from contract.function_types import Append, Release, Verdict
from contract.jobs import JobStatus
from contract.payloads.encoding import encode_result
from contract.payloads.store import (
    MAX_AGE_S,
    ObjectStore,
    PayloadError,
    PayloadUnavailable,
    result_key,
)
from workers.supervisor.held_job import MAX_VECTOR_BYTES, HeldJob
from workers.supervisor.holding import Holding
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


_RETRY_S = 0.1
_MAX_ENDS = 8  # per call: an end takes Redis as long as the tokens of eight jobs


class Publisher:
    """Appends the output of held jobs and drops jobs that have ended."""

    def __init__(self, broker: WorkerBroker, holding: Holding, results: ResultKeeper) -> None:
        self._broker = broker
        self._holding = holding
        self._results = results
        self._news: dict[str, HeldJob] = {}
        self._failures: dict[tuple[str, int], tuple[str, str]] = {}  # by job and epoch
        self._has_news = asyncio.Event()
        self._generation = 0

    def note(self, job: HeldJob) -> None:
        """Schedules an append: the job has unlogged output or has ended."""
        self._news[job.job.id] = job
        self._has_news.set()

    def fail(self, job: HeldJob, code: str, message: str) -> None:
        """Ends the job with an error."""
        self._failures[(job.job.id, job.epoch)] = (code, message)
        self.note(job)

    def clear(self) -> None:
        """Discards all output: this worker may no longer write to the jobs' logs."""
        self._news.clear()
        self._failures.clear()
        self._generation += 1

    async def run(self) -> None:
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            jobs, items = self._gather()
            if items:
                await self._publish(jobs, items, self._generation)

    def _gather(self) -> tuple[list[HeldJob], list[Append]]:
        """Takes at most one event per job; the rest waits for the next call."""
        jobs, items, num_ends = [], [], 0
        news, self._news = self._news, {}
        for job_id, job in news.items():
            event, num_tokens = job.take_event()
            code, message = "", ""
            fin: Literal["", JobStatus.SUCCEEDED, JobStatus.FAILED] = ""
            if job.has_news:
                self.note(job)
            elif self._failures and (job_id, job.epoch) in self._failures:
                fin = JobStatus.FAILED
                code, message = self._failures.pop((job_id, job.epoch))
            elif job.is_complete and num_ends == _MAX_ENDS:
                self.note(job)
            elif job.is_complete:
                if not self._results.is_due(job):
                    fin = "" if job.is_storing else JobStatus.SUCCEEDED
                elif event is None:
                    self._results.begin(job, self.note)
                else:
                    self.note(job)  # store the result after this event is logged
            num_ends += bool(fin)
            if event is not None or fin:
                jobs.append(job)
                number = job.next_number
                result = job.result if fin is JobStatus.SUCCEEDED else None
                marks = job.take_marks(time.monotonic())
                keeps = fin is JobStatus.SUCCEEDED and self._holding.engine.options.prefix_caching
                held = job.held_marks() if keeps else b""
                items.append(
                    Append(
                        job_id, job.epoch, number, event, num_tokens, fin, code, message, result,
                        marks=marks, held=held,
                    )
                )  # fmt: skip
        return jobs, items

    async def _publish(self, jobs: list[HeldJob], items: list[Append], generation: int) -> None:
        while generation == self._generation:
            try:
                verdicts = await self._broker.append(items)
            except BrokerUnavailable:
                await asyncio.sleep(_RETRY_S)
                continue
            except (WireError, CommandDenied) as exc:
                await self._publish_alone(jobs, items, generation, exc)
                return
            for job, item, (verdict, number) in zip(jobs, items, verdicts, strict=True):
                if verdict is Verdict.OK and not item.fin:
                    job.next_number = number
                else:
                    await self._apply_verdict(job, item, verdict, number)
            return

    async def _publish_alone(
        self, jobs: list[HeldJob], items: list[Append], generation: int, exc: Exception
    ) -> None:
        """Appends job by job and drops the job whose append fails; its lease expires."""
        if len(jobs) == 1:
            log.error("job dropped: %s job_id=%s", exc, jobs[0].job.id)
            self._holding.drop(jobs[0])
            return
        for job, item in zip(jobs, items, strict=True):
            await self._publish([job], [item], generation)

    async def _apply_verdict(
        self, job: HeldJob, item: Append, verdict: Verdict | JobStatus, number: int
    ) -> None:
        """Handles the verdict of an append after which the job does not simply continue."""
        if verdict is Verdict.OK:
            job.next_number = number
            assert item.fin, "only an ended job gets here"
            self._holding.drop(job, item.fin)
            return
        if isinstance(verdict, JobStatus):
            self._holding.end(job, verdict, item.num_tokens)
            return
        if verdict in (Verdict.GAP, Verdict.OVER):
            log.warning("append refused job_id=%s verdict=%s", job.job.id, verdict)
            # If this fails, the lease expires.
            with contextlib.suppress(BrokerUnavailable, CommandDenied, WireError):
                await self._broker.release([_release_of(job, verdict)])
        self._holding.drop(job)


def _release_of(job: HeldJob, verdict: Verdict) -> Release:
    """The release of a job whose append was refused. If Redis lost events, the job keeps its
    attempt; output beyond its cap is an error."""
    if verdict is Verdict.GAP:
        return Release(job.job.id, job.epoch, "drain")
    message = "more output than its cap"
    return Release(job.job.id, job.epoch, "error", ErrorCode.ENGINE_ERROR, message)
