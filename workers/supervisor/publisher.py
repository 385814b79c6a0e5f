"""Appends engine output to the jobs' logs, one call for all jobs.

Output accumulates during a call, so a slow Redis makes events larger, not calls more frequent. A
call without an answer is repeated unchanged; event numbers prevent duplicates.
"""

import asyncio
import contextlib
import logging
from typing import Literal

from contract.errors import BrokerUnavailable, CommandDenied, ErrorCode, WireError
from contract.function_types import Append, Release, Verdict
from contract.jobs import JobStatus
from workers.supervisor.held_job import HeldJob
from workers.supervisor.holding import Holding
from workers.supervisor.results import ResultKeeper
from workers.supervisor.worker_broker import WorkerBroker

log = logging.getLogger(__name__)

_RETRY_S = 0.1
_MAX_ENDS = 8  # per call: Redis packs the log of each ended job, which delays other tokens


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
                items.append(
                    Append(job_id, job.epoch, number, event, num_tokens, fin, code, message, result)
                )
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
