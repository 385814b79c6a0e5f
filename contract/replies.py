"""What the functions answer, from lists of bytes to types. The calls are in functions.py."""

import json
import logging
from collections.abc import Sequence
from typing import Any

from contract.codec import decode_job, decode_metadata, decode_ref
from contract.errors import ErrorCode, WireError, wire_errors
from contract.fleet_snapshot import FleetSnapshot, LaneSnapshot, WorkerSnapshot
from contract.function_types import Append, Claimed, Correction, JobView, Swept, Verdict
from contract.jobs import TERMINAL_STATUSES, JobStatus
from contract.refusals import decode_position

log = logging.getLogger("batchway.recount")


def claimed(reply: list[Any]) -> tuple[list[Claimed], list[Append]]:
    """Jobs handed out by `claim` and `mine`; and what ends those whose records cannot be read."""
    claims, spoiled = [], []
    for part in reply:
        raw_id, epoch, _, number, *_ = part
        job_id = raw_id.decode(errors="replace")
        try:
            claims.append(_claimed(job_id, part))
        except WireError:
            spoiled.append(poisoned(job_id, epoch, number))
    return claims, spoiled


def poisoned(job_id: str, epoch: int, number: int) -> Append:
    """What ends a job that no worker can begin, for what its record says."""
    message = "the record of the job could not be read"
    return Append(
        job_id, epoch, number, fin=JobStatus.FAILED, code=ErrorCode.POISON, message=message
    )


def _claimed(job_id: str, part: list[Any]) -> Claimed:
    with wire_errors("job record"):
        _, epoch, attempt, number, hash_, num_tokens, deadline_ms, alone, cost, raw = part
        job = decode_job(raw)
        if job.id != job_id:
            raise ValueError("the record of another job")
        return Claimed(
            job,
            epoch,
            attempt,
            number,
            hash_.decode(),
            num_tokens,
            deadline_ms / 1000,
            alone == 1,
            cost,
        )


def verdict(part: list[Any]) -> tuple[Verdict | JobStatus, int]:
    """One job's part of a worker's call, with its number where it has one."""
    if part[0] == b"OK" and len(part) > 1:  # what an append nearly always says
        return Verdict.OK, part[1]
    word = part[0].decode()
    number = part[1] if len(part) > 1 else 0
    return (JobStatus(word) if word in TERMINAL_STATUSES else Verdict(word)), number


def view(flat: list[bytes], place: Sequence[int] = ()) -> JobView:
    """A record as `read` and `list` say it: field, value, … Raises WireError."""
    with wire_errors("job record"):
        return _view(flat, place)


def views(records: list[list[bytes]]) -> tuple[JobView, ...]:
    """Those records of a list that can be read; the others are said in the log."""
    found = []
    for flat in records:
        try:
            found.append(view(flat))
        except WireError as exc:
            log.error("a job is left out of a list: %s", exc)
    return tuple(found)


def _view(flat: list[bytes], place: Sequence[int]) -> JobView:
    record = {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}

    def ms(name: str) -> int | None:
        return int(record[name]) if record[name] else None

    predicted_ms = int(record["predicted"] or -1)
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
        metadata=decode_metadata(record["metadata"]),
        result=decode_ref(record["result"]) if record["result"] else None,
        predicted_wait_ms=None if predicted_ms < 0 else predicted_ms,
        position=decode_position(place) if place else None,
    )


def swept(reply: list[Any]) -> Swept:
    """The reply of `sweep`; what it set right goes into the log."""
    lapsed, expired, unattended, forgotten, rows = reply
    corrections = tuple(
        Correction(*(part.decode(errors="replace") for part in row)) for row in rows
    )
    for it in corrections:
        words = (it.kind, *(_shown(word) for word in (it.key, it.field, it.held, it.holds)))
        log.error("corrected %s key=%s field=%s held=%s holds=%s", *words)
    return Swept(lapsed, expired, unattended, forgotten, corrections)


def _shown(word: str) -> str:
    """A word of a correction, as a log may have it: whoever broke a list may have written it."""
    return word[:200] if word.isascii() and word.isprintable() else "?"


def snapshot(lanes: Sequence[str], reply: list[Any]) -> FleetSnapshot:
    """The reply of `snapshot`."""
    now_ms, totals, seen, workers, deliveries = reply
    sights = [LaneSnapshot(a, b, c, d, wait_ms / 1000) for a, b, c, d, wait_ms in seen]
    return FleetSnapshot(
        now_ms / 1000,
        dict(zip(lanes, sights, strict=True)),
        tuple(_worker(*row) for row in workers),
        _counts(totals),
        _counts(deliveries),
    )


def _worker(incarnation: bytes, seen_ms: int, raw_info: bytes) -> WorkerSnapshot:
    info = json.loads(raw_info or b"{}")
    names = ("jobs_held", "num_running", "num_waiting", "num_blocks", "num_free_blocks")
    return WorkerSnapshot(
        incarnation.decode(), seen_ms / 1000, *(int(info.get(name, 0)) for name in names)
    )


def _counts(flat: list[bytes]) -> dict[str, int]:
    return {flat[i].decode(): int(flat[i + 1]) for i in range(0, len(flat), 2)}
