"""One typed call for each Redis Function, and the loading of their library.

The functions are contract/lua/*.lua; the header of each names its arguments and replies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import redis.asyncio

from contract.codec import WIRE_VERSION, decode_entry, decode_job, encode_event, encode_job
from contract.connection import broker_errors
from contract.errors import ErrorCode, JobRefused
from contract.events import LogEntry, LogEvent
from contract.jobs import TERMINAL_STATUSES, Job, JobStatus
from contract.keys import Keys

LIBRARY = "batchway_v1"
_LUA = Path(__file__).parent / "lua"
_FIRST_HASH = "00000000"

IDEMPOTENCY_TTL_S = 24 * 3600


class Verdict(StrEnum):
    """What became of one job's part of a worker's call; an ended job answers its status."""

    OK = "OK"
    GAP = "GAP"
    OVER = "OVER"
    FENCED = "FENCED"
    GONE = "GONE"


@dataclass(frozen=True, slots=True)
class Submission:
    """What `submit` is told beside the job itself. Tokens, seconds."""

    cost_tokens: int
    max_output_tokens: int
    deadline_s: float
    retention_s: float
    max_attempts: int = 3
    lane_bound_tokens: int = 0  # 0: no bound
    idempotency_key: str = ""
    body_hash: str = ""


@dataclass(frozen=True, slots=True)
class Submitted:
    """An accepted job; `is_new` is False where the same call was accepted before."""

    job_id: str
    is_new: bool
    num_jobs_ahead: int = 0
    num_tokens_ahead: int = 0


@dataclass(frozen=True, slots=True)
class Claimed:
    """A job handed to a worker, with its fencing token and where its log ends."""

    job: Job
    epoch: int
    attempt: int
    next_number: int
    hash: str
    num_logged_tokens: int


@dataclass(frozen=True, slots=True)
class Append:
    """One job's part of an append: an event, an end, or both."""

    job_id: str
    epoch: int
    number: int
    event: LogEvent | None = None
    num_tokens: int = 0
    fin: Literal["", JobStatus.SUCCEEDED, JobStatus.FAILED] = ""
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """One job given back: `drain` leaves its attempts as they were, `error` uses one up."""

    job_id: str
    epoch: int
    kind: Literal["drain", "error"]
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as its caller may see it. Times are Unix milliseconds of the Redis clock."""

    job: Job
    status: JobStatus
    lane: str
    attempt: int
    next_number: int
    num_output_tokens: int
    num_prompt_tokens: int
    created_ms: int
    claimed_ms: int | None
    first_token_ms: int | None
    finished_ms: int | None
    deadline_ms: int
    code: str
    message: str

    @property
    def is_terminal(self) -> bool:
        return self.status in TERMINAL_STATUSES


def library_source() -> str:
    """The library as one text: the shared part, then the functions by name."""
    files = [_LUA / "_shared.lua", *sorted(_LUA.glob("[a-z]*.lua"))]
    return "\n".join(path.read_text() for path in files)


async def ensure_library(client: redis.asyncio.Redis) -> None:
    """Loads the library where the server holds none or another text of it.

    Raises BrokerUnavailable.
    """
    source = library_source()
    with broker_errors():
        loaded: Any = await client.function_list(library=LIBRARY, withcode=True)
        if source.encode() not in _flatten(loaded):
            await client.function_load(source, replace=True)


def _flatten(reply: Any) -> list[Any]:
    if not isinstance(reply, list):
        return [reply]
    return [leaf for item in reply for leaf in _flatten(item)]


class Functions:
    """The functions of one partition. Every call may be repeated, and raises BrokerUnavailable."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def _call(self, name: str, *args: str | bytes | int | float, reads: bool = False) -> Any:
        call = self._client.fcall_ro if reads else self._client.fcall
        with broker_errors():
            return await call(f"{LIBRARY}_{name}", 1, self._keys.tag, *args)

    async def submit(self, job: Job, submission: Submission) -> Submitted:
        """Accepts a job. Raises JobRefused (lane_full, idempotency_mismatch)."""
        s = submission
        reply = await self._call(
            "submit",
            *(job.id, job.tenant, job.model, job.lane),
            *(s.cost_tokens, len(job.prompt_ids), s.max_output_tokens),
            *(int(s.deadline_s * 1000), int(s.retention_s * 1000), s.max_attempts),
            *(s.lane_bound_tokens, s.idempotency_key, s.body_hash, IDEMPOTENCY_TTL_S * 1000),
            *(WIRE_VERSION, encode_job(job)),
        )
        match reply:
            case [b"OK", job_id, jobs, tokens]:
                return Submitted(job_id.decode(), True, jobs, tokens)
            case [b"EXISTS", job_id]:
                return Submitted(job_id.decode(), False)
            case [b"MISMATCH", _]:
                raise JobRefused(
                    ErrorCode.IDEMPOTENCY_MISMATCH,
                    "this Idempotency-Key was used with another body",
                )
            case [b"LANE_FULL", jobs, tokens]:
                raise JobRefused(
                    ErrorCode.LANE_FULL,
                    f"lane {job.lane!r} is full: {jobs} jobs with {tokens} tokens wait in it",
                )
        raise AssertionError(f"submit: unknown reply {reply[0]!r}")

    async def claim(
        self,
        incarnation: str,
        model: str,
        lanes: Sequence[str],
        *,
        lease_s: float,
        max_jobs: int,
        max_tokens: int,
    ) -> list[Claimed]:
        """Takes waiting jobs, at most so many and of at most so many tokens in all."""
        lease_ms = int(lease_s * 1000)
        reply = await self._call(
            "claim", incarnation, model, lease_ms, max_jobs, max_tokens, *lanes
        )
        return [
            Claimed(decode_job(raw), epoch, attempt, number, hash_.decode(), num_tokens)
            for _, epoch, attempt, number, hash_, num_tokens, raw in reply
        ]

    async def append(
        self, incarnation: str, items: Sequence[Append], *, lease_s: float
    ) -> list[tuple[Verdict | JobStatus, int]]:
        """Appends a step's output; a verdict for each item, with its number where it has one."""
        args: list[str | bytes | int] = []
        for item in items:
            event = encode_event(item.event) if item.event is not None else b""
            args += [item.job_id, item.epoch, item.number, event, item.num_tokens]
            args += [item.fin, item.code, item.message]
        reply = await self._call("append", incarnation, int(lease_s * 1000), *args)
        return [_verdict(part) for part in reply]

    async def heartbeat(
        self,
        incarnation: str,
        model: str,
        held: Sequence[tuple[str, int]],
        *,
        lease_s: float,
        info: str,
        is_gone: bool = False,
    ) -> list[str]:
        """Says that a worker lives, holding jobs (id, epoch); returns the ids it has lost."""
        state = "gone" if is_gone else "up"
        pairs = [part for pair in held for part in pair]
        reply = await self._call(
            "heartbeat", incarnation, model, int(lease_s * 1000), state, info, *pairs
        )
        return [job_id.decode() for job_id in reply]

    async def release(
        self, incarnation: str, items: Sequence[Release]
    ) -> list[tuple[Verdict | JobStatus, int]]:
        """Gives jobs back; a verdict for each."""
        args: list[str | int] = []
        for item in items:
            args += [item.job_id, item.epoch, item.kind, item.code, item.message]
        return [_verdict(part) for part in await self._call("release", incarnation, *args)]

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
        _, flat, entries = reply
        record = {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}
        return _view(record), [decode_entry(number, h, raw) for number, h, raw in entries]

    async def sweep(self, max_jobs: int = 100) -> tuple[int, int]:
        """Gives lapsed jobs back and ends expired ones; returns how many of each."""
        lapsed, expired = await self._call("sweep", max_jobs)
        return lapsed, expired


def _verdict(part: list[Any]) -> tuple[Verdict | JobStatus, int]:
    word = part[0].decode()
    number = part[1] if len(part) > 1 else 0
    return (JobStatus(word) if word in TERMINAL_STATUSES else Verdict(word)), number


def _view(record: dict[str, bytes]) -> JobView:
    def ms(name: str) -> int | None:
        return int(record[name]) if record[name] else None

    return JobView(
        job=decode_job(record["job"]),
        status=JobStatus(record["state"].decode()),
        lane=record["lane"].decode(),
        attempt=int(record["attempt"]),
        next_number=int(record["next"]),
        num_output_tokens=int(record["tokens"]),
        num_prompt_tokens=int(record["prompt_tokens"]),
        created_ms=int(record["created"]),
        claimed_ms=ms("claimed"),
        first_token_ms=ms("first_token"),
        finished_ms=ms("finished"),
        deadline_ms=int(record["deadline"]),
        code=record["code"].decode(),
        message=record["message"].decode(),
    )
