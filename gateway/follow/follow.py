"""The one way to follow what becomes of a job: its log as events, from a position to the end."""

import logging
from collections.abc import AsyncIterator

import msgspec

from contract.events import End, LogEntry, Members
from contract.jobs import Job
from gateway.follow.event_ids import START, LogPosition
from gateway.follow.sync_call import SyncCall
from gateway.http.errors import Draining
from gateway.redis.cursor import Idle, Reset
from gateway.state import Gateway

log = logging.getLogger("batchway.gateway")


class Ended(msgspec.Struct, frozen=True):
    """The job has ended: the last event. `sse_id`: of the log's last entry."""

    end: End
    sse_id: str


async def follow(
    gateway: Gateway,
    job: Job,
    position: LogPosition = START,
    *,
    call: SyncCall | None = None,
    submitted_s: float | None = None,
    ends_with_drain: bool = True,
) -> AsyncIterator[LogEntry | Idle | Reset | Ended]:
    """Yields output as it is logged, Reset where the log was replaced, Idle while nothing comes.
    Nothing if the position is that of the end.

    `call`, which waits for the answer, is told the first token and the models that a flow calls.
    `submitted_s`: as for Broker.events; that of the call by default. Raises Draining when the
    gateway has no more time, unless `ends_with_drain` is false, and what Broker.events raises.
    """
    if call is not None:
        submitted_s = call.submitted_s
    events = gateway.broker.events(
        job.id, job.tenant, position.number, position.hash, submitted_s=submitted_s
    )
    async for item in events:
        match item:
            case LogEntry(event=End() as end):
                if call is not None:
                    _log_answered(job, end)
                yield Ended(end, item.sse_id)
                return
            case LogEntry(event=Members() as members) if call is not None:
                call.note_members(members)
            case LogEntry() if call is not None:
                call.timing.mark("first_token")
        yield item
        if ends_with_drain and gateway.drain.is_over:
            raise Draining


def _log_answered(job: Job, end: End) -> None:
    """Logs a synchronous call at its end. Before its first token, logging would delay it."""
    log.info(
        "answered job_id=%s lane=%s status=%s num_prompt=%d num_output=%d",
        job.id,
        job.lane,
        end.status,
        end.prompt_tokens,
        end.output_tokens,
    )
