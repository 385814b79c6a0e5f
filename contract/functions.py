"""One typed call for each Redis Function.

The functions are contract/lua/*.lua; the header of each names its arguments and replies.
Over 300 lines: one call for each function, and each says what it takes.
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
    Verdict,
    Wanted,
    WorkerCapacity,
    WorkerState,
)
from contract.jobs import Job, JobStatus
from contract.keys import Keys
from contract.library import call_function

log = logging.getLogger("batchway.redis")

MAX_LOOKS = 500  # jobs of a list that one call looks at
_Word = str | bytes | int | float  # of a command
BOOT_GRACE_S = 10.0  # after a restart of Redis, how long leases and callers may take to renew


class Functions:
    """The functions of one partition. Every call may be repeated, and raises BrokerUnavailable,
    CommandDenied, and WireError where a record is not as this version writes it.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._tag = keys.tag

    async def _call(self, name: str, *args: _Word, reads: bool = False) -> Any:
        return await call_function(self._client, self._tag, name, *args, reads=reads)

    async def submit(self, job: Job, submission: Submission) -> Submitted:
        """Accepts a job. Raises JobRefused, which says why and when to come again; BrokerFull."""
        reply = await self._call("submit", *submit_arguments(job, submission))
        match reply:
            case [b"OK", job_id, place, rates]:
                limits = replies.decode_rates(submission, rates)
                return Submitted(job_id.decode(), True, replies.decode_position(place), limits)
            case [b"EXISTS", job_id]:
                return Submitted(job_id.decode(), False)
            case [b"MISMATCH", _]:
                raise replies.idempotency_mismatch()
            case [b"MEMORY_FULL"]:
                raise BrokerFull(ErrorCode.MEMORY_FULL, "Redis has no memory for more jobs")
            case [b"REFUSED", reason, limit, retry_ms, rates]:
                limits = replies.decode_rates(submission, rates)
                raise replies.refusal(job, reason.decode(), limit.decode(), retry_ms, limits)
        raise AssertionError(f"submit: unknown reply {reply[0]!r}")

    async def quote(self, job: Job, submission: Submission) -> Quote:
        """What submit would say of a job; queues nothing and charges nothing."""
        reply = await self._call("quote", *submit_arguments(job, submission), reads=True)
        reason, limit, retry_ms, place, service_ms, cost_tokens, rates = reply
        limits = replies.decode_rates(submission, rates)
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
        """Takes waiting jobs, at most so many and of at most so many tokens in all; `rooms`, both
        by lane, and nothing of a lane that is not named.

        Lanes come most urgent first; one with a minimum share gets that much of the tokens that
        are handed out while it has work. An idle worker may be handed one job under suspicion,
        which must run alone. The version of the worker's configuration is kept with the job.

        Not made again where its answer is lost: `mine` says what that has handed out. A job whose
        record cannot be read is handed to nobody: it is failed as poison.
        """
        says: list[_Word] = [incarnation, model, int(lease_s * 1000), max_jobs, max_tokens]
        says += [int(is_idle), config_version]
        for lane in lanes:
            says += [lane, lane_argument(lane, min_shares or {}, rooms)]
        reply = await call_function(self._client, self._tag, "claim", *says, is_repeated=False)
        return await self._readable(incarnation, reply)

    async def mine(
        self, incarnation: str, known_ids: Sequence[str], *, lease_s: float
    ) -> list[Claimed]:
        """The jobs that a worker holds without knowing: the reply to its claim was lost. As `claim`
        where a record cannot be read.
        """
        reply = await self._call("mine", incarnation, int(lease_s * 1000), *known_ids)
        return await self._readable(incarnation, reply)

    async def _readable(self, incarnation: str, reply: list[Any]) -> list[Claimed]:
        claims, spoiled = replies.claimed(reply)
        for part in spoiled:
            log.error("the record of a job is unreadable: failed as poison job_id=%s", part.job_id)
        if spoiled:
            await self.append(incarnation, spoiled, lease_s=0)
        return claims

    async def append(
        self, incarnation: str, items: Sequence[Append], *, lease_s: float
    ) -> list[tuple[Verdict | JobStatus, int]]:
        """Appends a step's output; a verdict for each item, with its number where it has one.

        `lease_s`: how long their leases run from now on; 0: they stay as they are.
        """
        ids = [item.job_id for item in items]
        says = append_items(items)
        reply = await self._call("append", incarnation, int(lease_s * 1000), says, *ids)
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
        """Says that a worker lives, holding jobs (id, epoch); returns the ids it has lost.

        `counted`: its own totals since it began, by field; only their growth is added up.
        """
        c = capacity
        says = (info, c.tokens_per_s, c.stream_tokens_per_s, c.max_tokens, c.max_jobs)
        pairs = [part for pair in held for part in pair]
        reply = await self._call(
            "heartbeat",
            incarnation,
            model,
            int(lease_s * 1000),
            state,
            *says,
            c.lanes_with_shares,
            msgspec.msgpack.encode(counted) if counted else b"",
            *pairs,
        )
        return [job_id.decode(errors="replace") for job_id in reply]

    async def drain(self, incarnations: Sequence[str]) -> list[bool]:
        """Tells workers to go; of each, whether there is one to hear it."""
        return [verdict == b"OK" for verdict in await self._call("drain", *incarnations)]

    async def release(
        self, incarnation: str, items: Sequence[Release]
    ) -> list[tuple[Verdict | JobStatus, int]]:
        """Gives jobs back; a verdict for each."""
        args: list[str | int] = []
        for item in items:
            args += [item.job_id, item.epoch, item.kind, item.code, item.message]
        return [replies.verdict(part) for part in await self._call("release", incarnation, *args)]

    async def blame(
        self, incarnation: str, items: Sequence[Blame], *, max_crashes: int
    ) -> list[tuple[Verdict | JobStatus, int]]:
        """Jobs in whose step the engine process died: run alone from now on; poison at last."""
        args: list[str | int] = []
        for item in items:
            args += [item.job_id, item.epoch, item.about]
        reply = await self._call("blame", incarnation, max_crashes, *args)
        return [replies.verdict(part) for part in reply]

    async def attend(self, job_ids: Sequence[str]) -> int:
        """Says that a caller still waits for these jobs; how many of them need one."""
        attended: int = await self._call("attend", *job_ids)
        return attended

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
        """Lets a job go on without a caller, for so long at least; None where there is none."""
        terms = (int(deadline_s * 1000), int(retention_s * 1000))
        reply = await self._call("detach", job_id, tenant, *terms)
        return None if reply == [b"NOT_FOUND"] else replies.verdict(reply)[0]

    async def cancel(self, job_id: str, tenant: str) -> JobStatus | None:
        """Cancels a job; returns the status it now has, None where the tenant has no such job."""
        reply = await self._call("cancel", job_id, tenant)
        match reply:
            case [b"NOT_FOUND"]:
                return None
            case [b"CANCELLED"]:
                return JobStatus.CANCELLED
            case [status]:
                return JobStatus(status.decode())
        raise AssertionError(f"cancel: unknown reply {reply[0]!r}")

    async def read(
        self, job_id: str, tenant: str, *, after: int = 0, max_events: int = 0
    ) -> tuple[JobView, list[LogEntry]] | None:
        """A job and its log after event `after`; None where the tenant has no such job.

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
        """A tenant's jobs after the one with the id `after`, the youngest first; None where that
        job is not in the list. Looks at `max_looks` jobs at most; leaves out what cannot be read.
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
        """Forgets a job that has ended: True. False where the tenant has no such job; the status
        of one that has not ended.
        """
        match await self._call("delete", job_id, tenant):
            case [b"DELETED"]:
                return True
            case [b"NOT_FOUND"]:
                return False
            case [status]:
                return JobStatus(status.decode())
            case reply:
                raise AssertionError(f"delete: unknown reply {reply!r}")

    async def snapshot(self, model: str, lanes: Sequence[str]) -> FleetSnapshot:
        """A model's lanes, workers and totals at one moment. Raises WireError."""
        reply = await self._call("snapshot", model, *lanes, reads=True)
        with wire_errors("state of a model"):
            return replies.snapshot(lanes, reply)

    async def sweep(self, max_jobs: int = 100) -> Swept:
        """Does what time has done, and sets right what differs from the jobs' records; after a
        restart of Redis it first grants a grace."""
        return replies.swept(await self._call("sweep", max_jobs, int(BOOT_GRACE_S * 1000)))
