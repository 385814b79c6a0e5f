"""The calls of a flow's job, as recorded in its log; and as a tree, with their own records."""

import asyncio
import contextlib

import msgspec

from contract.events import MemberRun, Members
from contract.function_types import JobView
from contract.jobs import Job, JobStatus
from gateway.http.errors import RecordUnreadable, UnknownJob
from gateway.redis.broker import Broker

MODELS_HEADER = "x-batchway-models"
_NUM_READS = 32  # of a flow's records, at once


class TreeCall(msgspec.Struct, frozen=True):
    """A call in a tree. `view`: its record, None where it is no longer kept; `calls`: those of a
    flow."""

    run: MemberRun
    view: JobView | None = None
    calls: tuple["TreeCall", ...] = ()


class KnownMembers:
    """Calls in the order in which they began, each in its latest state in the log."""

    def __init__(self) -> None:
        self._runs: dict[str, MemberRun] = {}

    def add(self, event: Members) -> None:
        for run in event.runs:
            self._runs[run.job_id] = run

    @property
    def runs(self) -> list[MemberRun]:
        return list(self._runs.values())

    def header(self) -> dict[str, str]:
        """`x-batchway-models`: the models called so far, in order."""
        names = dict.fromkeys(run.model for run in self._runs.values())
        return {MODELS_HEADER: ", ".join(names)} if names else {}


def chosen_header(job: Job) -> dict[str, str]:
    """The header of a job whose model a route has chosen."""
    return {MODELS_HEADER: job.model} if job.asked_model and job.flow is None else {}


async def tree_of(broker: Broker, view: JobView) -> tuple[TreeCall, ...]:
    """Returns the calls of a job with their records, and theirs; if a route has chosen its model,
    the job itself. Raises UnknownJob."""
    job = view.job
    if job.flow is None:
        num_tokens = view.num_prompt_tokens, view.num_output_tokens
        run = MemberRun(job.model, job.id, view.status if view.is_terminal else None, *num_tokens)
        return (TreeCall(run, view),) if job.asked_model else ()
    found: list[TreeCall] = []
    runs = await _logged(broker, view)
    for first in range(0, len(runs), _NUM_READS):
        part = runs[first : first + _NUM_READS]
        found += await asyncio.gather(*(_member(broker, job.tenant, run) for run in part))
    return tuple(found)


async def cancel_whole(broker: Broker, job: Job) -> JobStatus:
    """Cancels a job, and a flow's calls. The process that runs the flow, if there is one, does so
    too. Raises UnknownJob, BatchwayError."""
    status = await broker.cancel(job.id, job.tenant)
    if job.flow is not None:
        view, _ = await broker.read(job.id, job.tenant)
        for run in await _logged(broker, view):
            with contextlib.suppress(UnknownJob):
                if run.status is None:
                    called, _ = await broker.read(run.job_id, job.tenant)
                    await cancel_whole(broker, called.job)
    return status


async def delete_whole(broker: Broker, job_id: str, tenant: str) -> JobStatus | None:
    """Deletes a job that has ended, and a flow's calls; if it has not ended, returns its status. If
    the job cannot be read, its calls stay until their retention is over. Raises UnknownJob,
    BatchwayError."""
    runs = []
    with contextlib.suppress(RecordUnreadable):
        view, _ = await broker.read(job_id, tenant)
        runs = [] if view.job.flow is None else await _logged(broker, view)
    status = await broker.delete(job_id, tenant)
    for run in runs if status is None else ():
        with contextlib.suppress(UnknownJob):
            await delete_whole(broker, run.job_id, tenant)
    return status


async def _logged(broker: Broker, view: JobView) -> list[MemberRun]:
    known = KnownMembers()
    async for entry in broker.log(view.job.id, view.job.tenant, up_to=view.next_number - 1):
        if isinstance(entry.event, Members):
            known.add(entry.event)
    return known.runs


async def _member(broker: Broker, tenant: str, run: MemberRun) -> TreeCall:
    try:
        view, _ = await broker.read(run.job_id, tenant)
    except (UnknownJob, RecordUnreadable):
        return TreeCall(run)
    return TreeCall(run, view, () if view.job.flow is None else await tree_of(broker, view))
