"""A typed call for each Redis Function.

The functions are contract/lua/*.lua; their headers describe arguments and replies.

Over 300 lines: one short method for each.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import redis.asyncio

from contract import replies
from contract.arguments import append_items, lane_argument, submit_arguments
from contract.codec import decode_entry
from contract.errors import BrokerFull, ErrorCode, wire_errors
from contract.events import LogEntry
from contract.fleet_snapshot import FleetSnapshot
from contract.function_types import (
    Append,
    Blame,
    Claimed,
    JobPage,
    JobView,
    LaneRoom,
    Quote,
    Release,
    Submission,
    Submitted,
    Swept,
    TenantLimits,
    Verdict,
    Wanted,
    WorkerCapacity,
    WorkerState,
)
from contract.jobs import Job, JobStatus
from contract.keys import Keys
from contract.library import call_function

log = logging.getLogger("batchway.redis")

MAX_LOOKS = 500  # records that one call of `list` reads
_Word = str | bytes | int | float  # of a command
BOOT_GRACE_S = 10.0  # for leases and attendance after a restart of Redis


class Functions:
    """The functions of one partition. Every call but `claim` may be repeated. Every call raises
    BrokerUnavailable, CommandDenied, and WireError for an unreadable record.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._tag = keys.tag

    async def _call(self, name: str, *args: _Word, reads: bool = False) -> Any:
        return await call_function(self._client, self._tag, name, *args, reads=reads)

    async def enter(self, tenant: str, limits: TenantLimits) -> None:
        """Counts a call against its tenant's limit of requests, before anything is done for it.
        Raises JobRefused with the time of a retry."""
        retry_ms, rates = await self._call(
            "enter", tenant, limits.requests_per_min, limits.tokens_per_min
        )
        if retry_ms:
            raise replies.over_requests(retry_ms, replies.decode_rates(limits, rates))

    async def submit(self, job: Job, submission: Submission) -> Submitted:
        """Submits a job. Raises JobRefused with the reason and the time of a retry; BrokerFull."""
        reply = await self._call("submit", *submit_arguments(job, submission))
        match reply:
            case [b"OK", job_id, place, rates]:
                limits = replies.decode_rates(submission.limits, rates)
                return Submitted(job_id.decode(), True, replies.decode_position(place), limits)
            case [b"EXISTS", job_id]:
                return Submitted(job_id.decode(), False)
            case [b"MISMATCH", _]:
                raise replies.idempotency_mismatch()
            case [b"MEMORY_FULL"]:
                raise BrokerFull(ErrorCode.MEMORY_FULL, "Redis has no memory for more jobs")
            case [b"REFUSED", reason, limit, retry_ms, rates]:
                limits = replies.decode_rates(submission.limits, rates)
                raise replies.refusal(job, reason.decode(), limit.decode(), retry_ms, limits)
        raise AssertionError(f"submit: unknown reply {reply[0]!r}")

    async def quote(self, job: Job, submission: Submission) -> Quote:
        """Returns what submit would reply; writes nothing."""
        reply = await self._call("quote", *submit_arguments(job, submission), reads=True)
        reason, limit, retry_ms, place, service_ms, cost_tokens, rates = reply
        limits = replies.decode_rates(submission.limits, rates)
        refused = None
        if reason != b"OK":
            refused = replies.refusal(job, reason.decode(), limit.decode(), retry_ms, limits)
        service_s = service_ms / 1000 if service_ms else None
        return Quote(refused, replies.decode_position(place), service_s, cost_tokens, limits)

    async def claim(
        self,
        incarnation: str,
        model: str,
        lanes: Sequence[str],
        *,
        lease_s: float,
        max_jobs: int,
        max_tokens: int,
        is_idle: bool = False,
        config_version: str = "",
        min_shares: Mapping[str, float] | None = None,
        rooms: Mapping[str, LaneRoom] | None = None,
    ) -> list[Claimed]:
        """Claims waiting jobs, up to `max_jobs` and `max_tokens` in all, or up to the room of each
        lane in `rooms`, where a lane without an entry has none.

        Lanes are in order of urgency; a lane with waiting jobs and a minimum share gets at least
        that share of the claimed tokens. An idle worker may get a suspect job, which must run
        alone. The job's record keeps the version of the worker's configuration. Candidate workers
        append ' candidate' to the version.

        Not repeated when the reply is lost; `mine` returns the jobs of a lost reply. Jobs with
        unreadable records fail as poison.
        """
        args: list[_Word] = [incarnation, model, int(lease_s * 1000), max_jobs, max_tokens]
        args += [int(is_idle), config_version]
        for lane in lanes:
            args += [lane, lane_argument(lane, min_shares or {}, rooms)]
        reply = await call_function(self._client, self._tag, "claim", *args, is_repeated=False)
        return await self._readable(incarnation, reply)

    async def mine(
        self, incarnation: str, known_ids: Sequence[str], *, lease_s: float
    ) -> list[Claimed]:
        """Jobs that a worker holds but does not know, because the reply to its claim was lost. Jobs
        with unreadable records fail as poison.
        """
        reply = await self._call("mine", incarnation, int(lease_s * 1000), *known_ids)
        return await self._readable(incarnation, reply)

    async def _readable(self, incarnation: str, reply: list[Any]) -> list[Claimed]:
        claims, spoiled = replies.claimed(reply)
        for part in spoiled:
            log.error("a job with an unreadable record fails as poison job_id=%s", part.job_id)
        if spoiled:
            await self.append(incarnation, spoiled, lease_s=0)
        return claims

    async def append(
        self, incarnation: str, items: Sequence[Append], *, lease_s: float
    ) -> list[tuple[Verdict | JobStatus, int]]:
        """Appends a step's output. Returns for each item a verdict and its number, or 0.

        `lease_s`: the leases' new duration; 0 leaves them unchanged.
        """
        ids = [item.job_id for item in items]
        packed = append_items(items)
        reply = await self._call("append", incarnation, int(lease_s * 1000), packed, *ids)
        return replies.append_verdicts(items, reply)

    async def heartbeat(
        self,
        incarnation: str,
        model: str,
        held: Sequence[tuple[str, int]],
        *,
        lease_s: float,
        info: str,
        capacity: WorkerCapacity = WorkerCapacity(),  # noqa: B008 - it is frozen
        state: WorkerState = "up",
        counted: Mapping[str, int] | None = None,
    ) -> list[str]:
        """Reports that a worker is alive and holds jobs (id, epoch); returns ids of jobs that it no
        longer holds.

        `counted`: the worker's totals since its start, by field.
        """
        pairs = [part for pair in held for part in pair]
        reply = await self._call(
            "heartbeat",
            incarnation,
            model,
            int(lease_s * 1000),
            state,
            info,
            capacity.tokens_per_s,
            capacity.stream_tokens_per_s,
            capacity.max_tokens,
            capacity.max_jobs,
            capacity.lanes_with_shares,
            msgspec.msgpack.encode(counted) if counted else b"",
            *pairs,
        )
        return [job_id.decode(errors="replace") for job_id in reply]

    async def drain(self, incarnations: Sequence[str]) -> list[bool]:
        """Orders workers to drain. Returns for each whether it has a record."""
        return [verdict == b"OK" for verdict in await self._call("drain", *incarnations)]

    async def release(
        self, incarnation: str, items: Sequence[Release]
    ) -> list[tuple[Verdict | JobStatus, int]]:
        """Returns jobs to their lanes, and a verdict for each."""
        args: list[str | int] = []
        for item in items:
            args += [item.job_id, item.epoch, item.kind, item.code, item.message]
        return [replies.verdict(part) for part in await self._call("release", incarnation, *args)]

    async def blame(
        self, incarnation: str, items: Sequence[Blame], *, max_crashes: int
    ) -> list[tuple[Verdict | JobStatus, int]]:
        """Reports jobs in whose step the engine process died; they run alone or fail as poison."""
        args: list[str | int] = []
        for item in items:
            args += [item.job_id, item.epoch, item.about]
        reply = await self._call("blame", incarnation, max_crashes, *args)
        return [replies.verdict(part) for part in reply]

    async def attend(self, job_ids: Sequence[str]) -> int:
        """Reports that callers wait for these jobs. Returns how many need attendance."""
        return int(await self._call("attend", *job_ids))

    async def reprioritise(
        self, job_id: str, tenant: str, *, lane: str = "", deadline_s: float | None = None
    ) -> Verdict | JobStatus | None:
        """Moves a job to another lane or deadline; None where the tenant has no such job."""
        deadline_ms = "" if deadline_s is None else int(deadline_s * 1000)
        reply = await self._call("reprioritise", job_id, tenant, lane, deadline_ms)
        return None if reply == [b"NOT_FOUND"] else replies.verdict(reply)[0]

    async def detach(
        self, job_id: str, tenant: str, *, deadline_s: float, retention_s: float
    ) -> Verdict | JobStatus | None:
        """Lets a job continue without a caller, with at least this deadline and retention; None
        where the tenant has no such job."""
        reply = await self._call(
            "detach", job_id, tenant, int(deadline_s * 1000), int(retention_s * 1000)
        )
        return None if reply == [b"NOT_FOUND"] else replies.verdict(reply)[0]

    async def cancel(self, job_id: str, tenant: str) -> JobStatus | None:
        """Cancels a job. Returns its status afterwards; None if the tenant has no such job."""
        [status] = await self._call("cancel", job_id, tenant)
        if status == b"NOT_FOUND":
            return None
        return JobStatus.CANCELLED if status == b"CANCELLED" else JobStatus(status.decode())

    async def read(
        self, job_id: str, tenant: str, *, after: int = 0, max_events: int = 0
    ) -> tuple[JobView, list[LogEntry]] | None:
        """Reads a job and its log after event `after`; None where the tenant has no such job.

        Raises WireError.
        """
        reply = await self._call("read", job_id, tenant, after, max_events, reads=True)
        if reply[0] == b"NOT_FOUND":
            return None
        with wire_errors("log"):
            _, flat, entries, place = reply
            view = replies.view(flat, place)
            return view, [decode_entry(number, h, raw) for number, h, raw in entries]

    async def list_jobs(
        self,
        tenant: str,
        wanted: Wanted,
        *,
        after: str = "",
        max_jobs: int = 20,
        max_looks: int = MAX_LOOKS,
    ) -> JobPage | None:
        """A tenant's jobs after the job `after`, youngest first; None where that job is not in the
        list. Reads at most `max_looks` records; omits unreadable ones.
        """
        states = "".join(f"{status} " for status in sorted(wanted.statuses))
        metadata = [part for pair in wanted.metadata.items() for part in pair]
        reply = await self._call(
            "list",
            *(tenant, after, wanted.created_after_ms, max_jobs, max_looks),
            *(states, wanted.lane, wanted.model, *metadata),
            reads=True,
        )
        if reply == [b"NOT_FOUND"]:
            return None
        _, position, records = reply
        return JobPage(replies.views(records), position.decode(errors="replace"))

    async def delete(self, job_id: str, tenant: str) -> JobStatus | bool:
        """Deletes an ended job and returns True. Returns False if the tenant has no such job, and
        the status if it has not ended."""
        [status] = await self._call("delete", job_id, tenant)
        if status == b"NOT_FOUND":
            return False
        return True if status == b"DELETED" else JobStatus(status.decode())

    async def snapshot(self, model: str, lanes: Sequence[str]) -> FleetSnapshot:
        """Returns a model's lanes, workers and totals at one moment. Raises WireError."""
        reply = await self._call("snapshot", model, *lanes, reads=True)
        with wire_errors("state of a model"):
            return replies.snapshot(lanes, reply)

    async def sweep(self, max_jobs: int = 100) -> Swept:
        """Applies what has become due; the first call after a restart of Redis extends leases
        instead."""
        return Swept(*await self._call("sweep", max_jobs, int(BOOT_GRACE_S * 1000)))
