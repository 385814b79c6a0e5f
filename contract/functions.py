"""A typed call for each Redis Function: its arguments, the call, its reply.

The functions are contract/lua/*.lua; their headers describe arguments and replies. The types
are in function_types.py.
"""

import json
import logging
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, cast, get_args

import msgspec
from msgspec.structs import replace

from contract.codec import (
    WIRE_VERSION,
    WarmPrompt,
    decode_job,
    decode_logged,
    decode_metadata,
    decode_ref,
    decode_warm_prompt,
    encode,
    wire_errors,
)
from contract.errors import (
    BrokerFull,
    ErrorCode,
    JobRefused,
    RateLimit,
    RateLimits,
    WireError,
)
from contract.events import LogEntry, Tokens
from contract.function_types import (
    Append,
    Blame,
    Claimed,
    Claims,
    FleetSnapshot,
    JobMark,
    JobPage,
    JobRun,
    JobView,
    LaneRoom,
    LaneSnapshot,
    QueuePosition,
    Quote,
    Release,
    Submission,
    Submitted,
    Swept,
    TenantLimits,
    Verdict,
    WaitingTenant,
    Wanted,
    Watched,
    WatchedJob,
    WorkerAside,
    WorkerCapacity,
    WorkerSnapshot,
    WorkerState,
)
from contract.jobs import TERMINAL_STATUSES, Job, JobStatus, MarkKind
from contract.library import Partition, Word
from contract.residence import marks_of

log = logging.getLogger("batchway.redis")

MAX_LOOKS = 500  # records that one call of `list` reads
# Of one call, which Redis runs in a millisecond or two: jobs whose records it changes or only looks
# at, events, bytes of events; and of a list jobs shown, records read.
_PAGE_VIEWS, _PAGE_LOOKS = 25, 125
_PAGE_CHANGES, _PAGE_HELD, _PAGE_EVENTS, _PAGE_BYTES = 6, 64, 64, 65_536
BOOT_GRACE_S = 10.0  # for leases and attendance after a restart of Redis
IDEMPOTENCY_TTL_S = 24 * 3600
# Bytes that a finished job takes in Redis beside its arguments, as measured.
_RECORD_BYTES = 6_500
_BYTES_PER_OUTPUT_TOKEN = 13

_SIZE = struct.Struct("<I")
_HEAD = struct.Struct("<III")  # epoch, output tokens, bytes of the event
_MARK = re.compile(
    rf"({'|'.join(get_args(MarkKind))}) ([0-9]+) ([0-9]+) ([0-9]+) ([0-9]+)", re.ASCII
)
_NO_END = bytes(2)  # in place of an end, after the event's number
_NO_ROOM = LaneRoom(0, 0)
UNKNOWN_MS = -1

# By reason, or by limit where there are several for a reason.
_SENTENCES = {
    "no_workers": "no worker of model {model!r} is ready",
    "lane_paused": "lane {lane!r} is paused: it takes no jobs until it is resumed",
    "unknown_lane": "lane {lane!r} is none of {lanes}",
    "storage_full": "what is kept of all jobs takes all the bytes it may",
    "deadline_infeasible": "the job could not end before its deadline",
    "idempotency_mismatch": "this Idempotency-Key was used with another body",
    "stored_bytes": "what is kept of your jobs takes all the bytes it may: delete jobs that have "
    "ended, or ask for less retention_s",
    "requests_per_min": "the limit of requests per minute is reached",
    "tokens_per_min": "the limit of tokens per minute is reached",
    "concurrent_tokens": "the limit of tokens in unfinished jobs is reached",
    "lane_share": "your share of lane {lane!r} is taken by your jobs that wait in it",
    "lane_tokens": "lane {lane!r} is full",
    "lane_memory": "jobs in lane {lane!r} take all the memory that they may, kept ones included",
    "tenant_memory": "your jobs in lane {lane!r} take all the memory that they may: delete some "
    "that have ended, or ask for less retention_s",
    "lane_wait": "the wait in lane {lane!r} is over its bound",
}


class Functions(Partition):
    """The functions of one partition. Every call but `claim` may be repeated. Every call raises
    BrokerUnavailable, CommandDenied, and WireError for an unreadable record.
    """

    async def enter(self, tenant: str, limits: TenantLimits) -> None:
        """Counts a call against its tenant's limit of requests, before anything is done for it.
        Raises JobRefused with the time of a retry."""
        retry_ms, rates = await self._call(
            "enter", tenant, limits.requests_per_min, limits.tokens_per_min
        )
        if retry_ms:
            left = decode_rates(limits, rates)
            raise refusal(None, "tenant_quota", "requests_per_min", retry_ms, left)

    async def submit(self, job: Job, submission: Submission) -> Submitted:
        """Submits a job. Raises JobRefused with the reason and the time of a retry; BrokerFull."""
        reply = await self._call("submit", *_submit_arguments(job, submission))
        match reply:
            case [b"OK", job_id, place, rates]:
                limits = decode_rates(submission.limits, rates)
                position = decode_position(place) if place else None
                return Submitted(job_id.decode(), True, position, limits)
            case [b"EXISTS", job_id]:
                return Submitted(job_id.decode(), False)
            case [b"MISMATCH", _]:
                raise refusal(job, "idempotency_mismatch", "", UNKNOWN_MS, None)
            case [b"MEMORY_FULL"]:
                raise BrokerFull(ErrorCode.MEMORY_FULL, "Redis has no memory for more jobs")
            case [b"REFUSED", reason, limit, retry_ms, rates]:
                limits = decode_rates(submission.limits, rates)
                raise refusal(job, reason.decode(), limit.decode(), retry_ms, limits)
        raise AssertionError(f"submit: unknown reply {reply[0]!r}")

    async def quote(self, job: Job, submission: Submission) -> Quote:
        """Returns what submit would reply; writes nothing."""
        reply = await self._call("quote", *_submit_arguments(job, submission), reads=True)
        reason, limit, retry_ms, place, service_ms, cost_tokens, rates, num_cached = reply
        limits = decode_rates(submission.limits, rates)
        refused = None
        if reason != b"OK":
            refused = refusal(job, reason.decode(), limit.decode(), retry_ms, limits)
        service_s = service_ms / 1000 if service_ms else None
        return Quote(refused, decode_position(place), service_s, cost_tokens, limits, num_cached)

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
        prompt_token_s: float | None = None,
    ) -> Claims:
        """Claims waiting jobs, up to `max_jobs` and `max_tokens` in all, or up to the room of each
        lane in `rooms`, where a lane without an entry has none; then what other workers offer.

        Lanes are in order of urgency; a lane with waiting jobs and a minimum share gets at least
        that share of the claimed tokens. An idle worker may get a suspect job, which must run
        alone. The job's record keeps the version of the worker's configuration. Candidate workers
        append ' candidate' to the version. `prompt_token_s`: what a token of a prompt takes a
        worker that keeps prefixes; it leaves jobs to others that hold theirs, for what that saves.

        Not repeated when the reply is lost; `mine` returns the jobs of a lost reply. Jobs with
        unreadable records fail as poison.
        """
        args: list[Word] = [incarnation, model, int(lease_s * 1000), max_jobs, max_tokens]
        keeps = "" if prompt_token_s is None else f" {round(1e6 * prompt_token_s)}"
        args += [f"{is_idle:d}{keeps}", config_version]
        for lane in lanes:
            args += [lane, _lane_argument(lane, min_shares or {}, rooms)]
        reply = await self._call("claim", *args, is_repeated=False)
        again_ms = reply.pop() if reply and isinstance(reply[-1], int) else None
        claims = Claims(await self._readable(incarnation, reply))
        claims.again_s = None if again_ms is None else again_ms / 1000
        return claims

    async def warm(self, job: Job, num_known: int, *, lives_s: float) -> bool:
        """Leaves the prompt of a job that may come to a worker that holds a part of it. Returns
        whether little of the like was of use. `num_known`: its tokens that are computed."""
        prompt = encode((job.tenant, num_known, job.prompt_ids))
        words = job.model, job.tenant, job.lane, marks_of(job), prompt, int(lives_s * 1000)
        return bool(await self._call("warm", *words))

    async def warm_take(
        self, incarnation: str, model: str, worth: Sequence[Word]
    ) -> tuple[float, WarmPrompt] | None:
        """Takes what `warm` left, and the seconds for which it lives. `worth`: as in warm_take.lua.
        Not repeated when the reply is lost."""
        reply = await self._call("warm_take", incarnation, model, *worth, is_repeated=False)
        return (reply[0] / 1000, decode_warm_prompt(reply[1])) if reply else None

    async def mine(
        self, incarnation: str, known_ids: Sequence[str], *, lease_s: float
    ) -> list[Claimed]:
        """Jobs that a worker holds but does not know, because the reply to its claim was lost. Jobs
        with unreadable records fail as poison.
        """
        reply = await self._call("mine", incarnation, int(lease_s * 1000), *known_ids)
        return await self._readable(incarnation, reply)

    async def _readable(self, incarnation: str, reply: list[Any]) -> list[Claimed]:
        claims, spoiled = [], []
        for part in reply:
            raw_id, epoch, _, number, *_ = part
            job_id = raw_id.decode(errors="replace")
            try:
                claims.append(_claimed(part))
            except WireError:
                log.error("a job with an unreadable record fails as poison job_id=%s", job_id)
                spoiled.append(poisoned(job_id, epoch, number))
        if spoiled:
            await self.append(incarnation, spoiled, lease_s=0)
        return claims

    async def append(
        self, incarnation: str, items: Sequence[Append], *, lease_s: float
    ) -> list[tuple[Verdict | JobStatus, int]]:
        """Appends a step's output. Returns for each item a verdict and its number, or 0.

        `lease_s`: the leases' new duration; 0 leaves them unchanged.
        """
        packed = [_append_item(item) for item in items]
        verdicts: list[tuple[Verdict | JobStatus, int]] = []
        while (first := len(verdicts)) < len(items):
            sums = accumulate(map(len, packed[first : first + _PAGE_EVENTS]))
            last = first + max(1, sum(num_bytes <= _PAGE_BYTES for num_bytes in sums))
            verdicts += [(Verdict.OK, item.number + 1) for item in items[first:last]]
            ids, page = [item.job_id for item in items[first:last]], b"".join(packed[first:last])
            reply = await self._call("append", incarnation, int(lease_s * 1000), page, *ids)
            for place, *part in zip(reply[::3], reply[1::3], reply[2::3], strict=True):
                if part[0] == b"LATER":
                    del verdicts[first + place - 1 :]
                else:
                    verdicts[first + place - 1] = _verdict(part)
        return verdicts

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
        reply = await self._in_pages(
            "heartbeat",
            _PAGE_HELD,
            held or [()],
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
        )
        return [job_id.decode(errors="replace") for job_id in reply]

    async def leave(
        self, incarnation: str, model: str, counted: Mapping[str, int] | None = None
    ) -> None:
        """Reports that this incarnation ends, with its final counts."""
        terms: dict[str, Any] = {"lease_s": 0.0, "info": "", "state": "gone", "counted": counted}
        await self.heartbeat(incarnation, model, [], **terms)

    async def drain(self, incarnations: Sequence[str]) -> list[bool]:
        """Orders workers to drain. Returns for each whether it has a record."""
        return [verdict == b"OK" for verdict in await self._call("drain", *incarnations)]

    async def release(
        self, incarnation: str, items: Sequence[Release]
    ) -> list[tuple[Verdict | JobStatus, int]]:
        """Returns jobs to their lanes, and a verdict for each."""
        rows = [(i.job_id, i.epoch, i.kind, i.code, i.message) for i in items]
        reply = await self._in_pages("release", _PAGE_CHANGES, rows, incarnation)
        return [_verdict(part) for part in reply]

    async def blame(
        self, incarnation: str, items: Sequence[Blame], *, max_crashes: int
    ) -> list[tuple[Verdict | JobStatus, int]]:
        """Reports jobs in whose step the engine process died; they run alone or fail as poison."""
        rows = [(item.job_id, item.epoch, item.about) for item in items]
        reply = await self._in_pages("blame", _PAGE_CHANGES, rows, incarnation, max_crashes)
        return [_verdict(part) for part in reply]

    async def attend(self, job_ids: Sequence[str]) -> int:
        """Reports that callers wait for these jobs. Returns how many need attendance."""
        pages = [job_ids[n : n + _PAGE_HELD] for n in range(0, len(job_ids), _PAGE_HELD)]
        return sum([int(await self._call("attend", *page)) for page in pages])

    async def reprioritise(
        self,
        job_id: str,
        tenant: str,
        *,
        lane: str = "",
        deadline_s: float | None = None,
        start_at_s: float | None = None,
    ) -> Verdict | JobStatus | None:
        """Gives a job another lane, deadline or start (Unix time); None where the tenant has no
        such job. One that a worker had claimed gets no other start: RUNNING."""
        times = ["" if s is None else int(s * 1000) for s in (deadline_s, start_at_s)]
        reply = await self._call("reprioritise", job_id, tenant, lane, *times)
        return None if reply == [b"NOT_FOUND"] else _verdict(reply)[0]

    async def detach(
        self, job_id: str, tenant: str, *, deadline_s: float, retention_s: float
    ) -> Verdict | JobStatus | None:
        """Lets a job continue without a caller, with at least this deadline and retention; None
        where the tenant has no such job."""
        reply = await self._call(
            "detach", job_id, tenant, int(deadline_s * 1000), int(retention_s * 1000)
        )
        return None if reply == [b"NOT_FOUND"] else _verdict(reply)[0]

    async def cancel(self, job_id: str, tenant: str) -> JobStatus | None:
        """Cancels a job. Returns its status afterwards; None if the tenant has no such job."""
        [status] = await self._call("cancel", job_id, tenant)
        if status == b"NOT_FOUND":
            return None
        return JobStatus.CANCELLED if status == b"CANCELLED" else JobStatus(status.decode())

    async def read(
        self, job_id: str, tenant: str, *, after: int = 0, max_events: int = 0
    ) -> tuple[JobView, list[LogEntry]] | None:
        """Reads a job and a page of its log, which follows event `after`; None where the tenant has
        no such job. `JobView.ends_with` tells whether the page is the last.

        Raises WireError.
        """
        reply = await self._call("read", job_id, tenant, after, max_events, reads=True)
        if reply[0] == b"NOT_FOUND":
            return None
        with wire_errors("log"):
            _, flat, entries, place = reply
            return _view(flat, place), [decode_logged(raw) for raw in entries]

    async def list_jobs(
        self,
        tenant: str,
        wanted: Wanted,
        *,
        after: str = "",
        max_jobs: int = 20,
        max_looks: int = MAX_LOOKS,
    ) -> JobPage | None:
        """A tenant's jobs (without a tenant: all) after the job `after`, in order; None where
        that job is not in the list. Reads at most `max_looks` records; omits unreadable ones.
        """
        views, packed = list[JobView](), encode(wanted)
        while True:
            bounds = min(max_jobs - len(views), _PAGE_VIEWS), min(max_looks, _PAGE_LOOKS)
            reply = await self._call("list", tenant, after, *bounds, packed, reads=True)
            if reply == [b"NOT_FOUND"]:
                return None
            _, position, records = reply
            for flat in records:
                try:
                    views.append(_view(flat))
                except WireError as exc:
                    log.error("a job is omitted from a list: %s", exc)
            after, max_looks = position.decode(errors="replace"), max_looks - _PAGE_LOOKS
            if not after or max_looks <= 0 or len(views) >= max_jobs:
                return JobPage(tuple(views), after)

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
            now_ms, totals, seen, workers, deliveries, aside = reply
            sights = [LaneSnapshot(a, b, c, d, wait_ms / 1000) for a, b, c, d, wait_ms in seen]
            return FleetSnapshot(
                now_ms / 1000,
                dict(zip(lanes, sights, strict=True)),
                tuple(_worker(*row) for row in workers),
                _counts(totals),
                _counts(deliveries),
                tuple(
                    WorkerAside(_worker(*row), state.decode(), for_ms / 1000)
                    for *row, state, for_ms in aside
                ),
            )

    async def watch(self, model: str, lanes: Sequence[str], max_jobs: int = 1000) -> Watched:
        """Returns up to `max_jobs` jobs that the model's workers hold, and up to 64 waiting tenants
        of each lane. Raises WireError."""
        held = list[Any]()

        async def part(*words: Word) -> list[Any]:
            return cast("list[Any]", _texts(await self._call("watch", model, *words, reads=True)))

        with wire_errors("state of a model"):
            for first in range(0, max_jobs, _PAGE_HELD):
                held += (page := (await part(_PAGE_HELD, first))[0])
                if not page:
                    break
            waiting = [row for lane in lanes for row in (await part(0, 0, lane))[1]]
            [_, _, callbacks] = await part(0, 0)
            return Watched(
                tuple(WatchedJob(*row) for row in held),
                tuple(
                    WaitingTenant(lane, tenant, num_jobs, num_tokens, float(weight))
                    for lane, tenant, num_jobs, num_tokens, weight in waiting
                ),
                *callbacks,
            )

    async def sweep(self, max_jobs: int = 400) -> Swept:
        """Applies what has become due, to at most so many jobs."""
        swept = [0, 0, 0, 0, 0]
        while room := min(_PAGE_CHANGES, max_jobs - sum(swept)):
            reply = await self._call("sweep", room, int(BOOT_GRACE_S * 1000))
            swept = [sum(pair) for pair in zip(swept, reply, strict=True)]
            if sum(reply) < room:
                break
        return Swept(*swept)


# --- arguments


def stored_bytes(job: Job, submission: Submission, parts: Iterable[bytes]) -> int:
    """Returns the bytes that count as stored until a job is forgotten: its encoded parts, those in
    the object store, its record, and an output of full length."""
    num_bytes = sum(map(len, parts))
    if job.stored_prompt is not None:
        num_bytes += job.stored_prompt.ref.num_bytes
    if job.stored_response is not None:
        num_bytes += job.stored_response.num_bytes
    num_bytes += sum(image.num_bytes for image in job.images)
    num_bytes += _RECORD_BYTES + submission.vector_bytes
    return num_bytes + _BYTES_PER_OUTPUT_TOKEN * submission.max_output_tokens


def encoded_parts(job: Job, submission: Submission) -> tuple[bytes, bytes, bytes]:
    """Job, metadata and callback, encoded."""
    metadata = encode(submission.metadata) if submission.metadata else b""
    callback = b"" if submission.callback is None else encode(submission.callback)
    return encode(job), metadata, callback


_TERMS = [
    (each.name, re.sub("_s$", "_ms", each.encode_name))
    for each in msgspec.structs.fields(Submission)
    if each.name not in ("limits", "metadata", "callback", "marks")
]


def _submit_arguments(job: Job, submission: Submission) -> tuple[str | bytes, ...]:
    """The arguments of submit and quote."""
    parts, to = encoded_parts(job, submission), submission.callback
    terms: dict[str, str | int | float] = {
        **job.queue_terms(),
        **msgspec.structs.asdict(submission.limits),
        "version": WIRE_VERSION,
        "idem_ttl_ms": IDEMPOTENCY_TTL_S * 1000,
        "stored_bytes": stored_bytes(job, submission, parts),
        "callback_to": "" if to is None else to.destination(job.tenant),
        "callback_started": to is not None and to.notifies_start,
        "callback_every": 0 if to is None else to.progress_tokens,
    }
    for name, term in _TERMS:
        value = getattr(submission, name)
        terms[term] = int(value * 1000) if term.endswith("_ms") else value
    encoded, metadata, callback = parts
    names = job.id, job.tenant, job.model, job.lane
    return *names, encoded, encode(terms), metadata, callback, submission.marks


def _append_item(item: Append) -> bytes:
    """Packs an event and an end; those of an append are one argument: an argument for each value
    would cost more than the value."""
    event = encode(item.event) if item.event is not None else b""
    end = _encode_end(item) if item.fin else _NO_END
    num_cached = item.event.num_cached if isinstance(item.event, Tokens) else item.cached_tokens
    if item.marks:
        end = _encode_marks(item.marks) + end[1:]
    if num_cached:
        end = b"\0found\0" + _SIZE.pack(num_cached) + end[1:]
    if item.held:
        end = b"\0held\0" + _SIZE.pack(len(item.held)) + item.held + end[1:]
    head = _HEAD.pack(item.epoch, item.num_tokens, len(event))
    return b"".join((head, event, b"%d" % item.number, end))


def _encode_marks(marks: Sequence[JobMark]) -> bytes:
    lines = [f"{m.kind} {m.begun_ms} {m.ended_ms} {m.num} {m.num_tokens}\n" for m in marks]
    raw = "".join(lines).encode()
    return b"\0marked\0" + _SIZE.pack(len(raw)) + raw


def _encode_end(item: Append) -> bytes:
    message = item.message.encode()
    result = b"" if item.result is None else encode(item.result)
    words = f"\0{item.fin}\0{item.code}\0".encode()
    sizes = _SIZE.pack(len(message)), _SIZE.pack(len(result)), _SIZE.pack(item.prompt_tokens)
    return b"".join((words, sizes[0], message, sizes[1], result, sizes[2]))


def _lane_argument(
    lane: str, shares: Mapping[str, float], rooms: Mapping[str, LaneRoom] | None
) -> str:
    """A lane's argument of `claim`: its minimum share, and its room where rooms are given."""
    share = str(shares.get(lane, 0.0))
    if rooms is None:
        return share
    room = rooms.get(lane, _NO_ROOM)
    words: list[str | int | float] = [share, room.max_jobs, room.max_tokens, room.max_owed]
    if room.fair is not None:
        words += [room.fair.max_jobs, room.fair.max_tokens]
        for tenant, held in room.fair.held.items():
            words += [tenant, *held]
    return " ".join(map(str, words))


# --- replies


def poisoned(job_id: str, epoch: int, number: int) -> Append:
    """An append that fails a job with an unreadable record."""
    message = "the record of the job could not be read"
    return Append(
        job_id, epoch, number, fin=JobStatus.FAILED, code=ErrorCode.POISON, message=message
    )


def _claimed(part: list[Any]) -> Claimed:
    """Decodes a job in a reply of `claim` or `mine`. Raises WireError."""
    with wire_errors("job record"):
        raw_id, epoch, attempt, number, hash_, num_tokens, deadline_ms, alone, cost, raw = part
        job, place = decode_job(raw), (number, hash_.decode(), num_tokens)
        if job.id != raw_id.decode():
            raise ValueError("the record of another job")
        return Claimed(job, epoch, attempt, *place, deadline_ms / 1000, alone == 1, cost)


def _verdict(part: Sequence[Any]) -> tuple[Verdict | JobStatus, int]:
    """One job's verdict in a worker's call, with its number; 0 where it has none."""
    word = part[0].decode()
    number = part[1] if len(part) > 1 else 0
    return (JobStatus(word) if word in TERMINAL_STATUSES else Verdict(word)), number


def _view(flat: list[bytes], position: Sequence[int] = ()) -> JobView:
    """A record as `read` and `list` reply it: field, value, … Raises WireError."""
    with wire_errors("job record"):
        raw = {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2) if flat[i + 1]}
        fields: dict[str, Any] = {
            "job": decode_job(raw.pop("job")),
            "metadata": decode_metadata(raw.pop("metadata")) if "metadata" in raw else {},
            "result": decode_ref(raw.pop("result")) if "result" in raw else None,
            "position": decode_position(position) if position else None,
            "runs": decode_runs(raw.pop("runs", b"")),
        }
        if raw.get("predicted") == b"-1":
            del raw["predicted"]
        fields |= {name: value.decode() for name, value in raw.items()}
        return msgspec.convert(fields, JobView, strict=False)


def decode_runs(raw: bytes) -> tuple[JobRun, ...]:
    """The lines of claims, each followed by those of its marks; the first may be cut."""
    runs: list[JobRun] = []
    for line in raw.decode(errors="replace").splitlines():
        if (claim := re.fullmatch(r"([0-9]+) ([0-9]+) (.*)", line, re.ASCII)) is not None:
            runs.append(JobRun(claim[3], int(claim[1]), int(claim[2])))
        elif runs and (found := _MARK.fullmatch(line)) is not None:
            kind, *numbers = found.groups()
            mark = JobMark(cast("MarkKind", kind), *map(int, numbers))
            runs[-1] = replace(runs[-1], marks=(*runs[-1].marks, mark))
    return tuple(runs)


def _worker(incarnation: bytes, seen_ms: int, raw_info: bytes) -> WorkerSnapshot:
    info = json.loads(raw_info or b"{}")
    names = ("num_running", "num_waiting", "num_blocks", "num_free_blocks", "num_retained_blocks")
    cached, share = info.get("num_cached_blocks"), info.get("gpu_share")
    return WorkerSnapshot(
        incarnation=incarnation.decode(),
        seen_s=seen_ms / 1000,
        num_jobs_held=int(info.get("jobs_held", 0)),
        **{name: int(info.get(name, 0)) for name in names},
        num_places=int(info.get("places", 0)),
        version=str(info.get("version", "")),
        device=str(info.get("device", "")),
        notice=str(info.get("notice", "")),
        num_cached_blocks=None if cached is None else int(cached),
        gpu_share=None if share is None else float(share),
    )


def _texts(reply: Any) -> Any:
    """The reply with text in place of bytes."""
    if isinstance(reply, list):
        return [_texts(part) for part in reply]
    return reply.decode(errors="replace") if isinstance(reply, bytes) else reply


def _counts(flat: list[bytes]) -> dict[str, int]:
    return {flat[i].decode(): int(flat[i + 1]) for i in range(0, len(flat), 2)}


def decode_position(place: Sequence[int]) -> QueuePosition:
    """Decodes {jobs ahead, tokens ahead, ms until it starts}."""
    jobs, tokens, wait_ms = place
    return QueuePosition(jobs, tokens, None if wait_ms == UNKNOWN_MS else wait_ms / 1000)


def decode_rates(limits: TenantLimits, rates: Sequence[int]) -> RateLimits:
    """Decodes {requests left, ms until full, tokens left, ms until full}."""
    requests_left, requests_ms, tokens_left, tokens_ms = rates

    def rate(limit: int, left: int, reset_ms: int) -> RateLimit | None:
        return RateLimit(limit, left, reset_ms / 1000) if limit else None

    return RateLimits(
        rate(limits.requests_per_min, requests_left, requests_ms),
        rate(limits.tokens_per_min, tokens_left, tokens_ms),
    )


def refusal(
    job: Job | None, reason: str, limit: str, retry_ms: int, rates: RateLimits | None
) -> JobRefused:
    """The error for a refusal: its reason, limit, and ms until a retry may succeed. `job`: None
    before there is one."""
    sentence = _SENTENCES.get(reason) or _SENTENCES[limit]
    model, lane = (job.model, job.lane) if job else ("", "")
    message = sentence.format(model=model, lane=lane, lanes=", ".join(limit.split()))
    retry_after_s = None if retry_ms == UNKNOWN_MS else retry_ms / 1000
    code = ErrorCode(reason)
    return JobRefused(code, message, limit=limit, retry_after_s=retry_after_s, rates=rates)
