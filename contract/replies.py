"""Decodes the replies of the functions. The calls are in functions.py."""

import json
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from contract.codec import decode_job, decode_metadata, decode_ref
from contract.errors import (
    ErrorCode,
    JobRefused,
    RateLimit,
    RateLimits,
    WireError,
    wire_errors,
)
from contract.fleet_snapshot import FleetSnapshot, LaneSnapshot, WorkerSnapshot
from contract.function_types import (
    Append,
    Claimed,
    JobView,
    QueuePosition,
    TenantLimits,
    Verdict,
)
from contract.jobs import TERMINAL_STATUSES, Job, JobStatus

log = logging.getLogger("batchway.redis")

UNKNOWN_MS = -1

_SENTENCES = {
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


def claimed(reply: list[Any]) -> tuple[list[Claimed], list[Append]]:
    """Jobs in a reply of `claim` or `mine`, and ends for those with unreadable records."""
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
    """An append that fails a job with an unreadable record."""
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


def verdict(part: Sequence[Any]) -> tuple[Verdict | JobStatus, int]:
    """One job's verdict in a worker's call, with its number; 0 where it has none."""
    word = part[0].decode()
    number = part[1] if len(part) > 1 else 0
    return (JobStatus(word) if word in TERMINAL_STATUSES else Verdict(word)), number


def append_verdicts(
    items: Sequence[Append], reply: list[Any]
) -> list[tuple[Verdict | JobStatus, int]]:
    """A verdict for each item of an append, with its number. The reply lists the exceptions."""
    verdicts: list[tuple[Verdict | JobStatus, int]]
    verdicts = [(Verdict.OK, item.number + 1) for item in items]
    for place, *part in zip(reply[::3], reply[1::3], reply[2::3], strict=True):
        verdicts[place - 1] = verdict(part)
    return verdicts


def view(flat: list[bytes], position: Sequence[int] = ()) -> JobView:
    """A record as `read` and `list` reply it: field, value, … Raises WireError."""
    with wire_errors("job record"):
        raw = {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2) if flat[i + 1]}
        fields: dict[str, Any] = {
            "job": decode_job(raw.pop("job")),
            "metadata": decode_metadata(raw.pop("metadata")) if "metadata" in raw else {},
            "result": decode_ref(raw.pop("result")) if "result" in raw else None,
            "position": decode_position(position) if position else None,
        }
        if raw.get("predicted") == b"-1":
            del raw["predicted"]
        fields |= {name: value.decode() for name, value in raw.items()}
        return msgspec.convert(fields, JobView, strict=False)


def views(records: list[list[bytes]]) -> tuple[JobView, ...]:
    """Returns the readable records of a list; logs that others are omitted."""
    found = []
    for flat in records:
        try:
            found.append(view(flat))
        except WireError as exc:
            log.error("a job is omitted from a list: %s", exc)
    return tuple(found)


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


def over_requests(retry_ms: int, rates: RateLimits) -> JobRefused:
    """The error for a call over its tenant's limit of requests."""
    limit, retry_after_s = "requests_per_min", retry_ms / 1000
    return JobRefused(
        ErrorCode.TENANT_QUOTA,
        _SENTENCES[limit],
        limit=limit,
        retry_after_s=retry_after_s,
        rates=rates,
    )


def idempotency_mismatch() -> JobRefused:
    message = "this Idempotency-Key was used with another body"
    return JobRefused(ErrorCode.IDEMPOTENCY_MISMATCH, message)


def refusal(job: Job, reason: str, limit: str, retry_ms: int, rates: RateLimits) -> JobRefused:
    """The error for a refusal: its reason, limit, and ms until a retry may succeed."""
    code = ErrorCode(reason)
    if code is ErrorCode.NO_WORKERS:
        message = f"no worker of model {job.model!r} is ready"
    elif code is ErrorCode.UNKNOWN_LANE:
        message = f"lane {job.lane!r} is none of {', '.join(limit.split())}"
    elif code is ErrorCode.STORAGE_FULL:
        message = "what is kept of all jobs takes all the bytes it may"
    elif code is ErrorCode.DEADLINE_INFEASIBLE:
        message = "the job could not end before its deadline"
    else:
        message = _SENTENCES[limit].format(lane=job.lane)
    retry_after_s = None if retry_ms == UNKNOWN_MS else retry_ms / 1000
    return JobRefused(code, message, limit=limit, retry_after_s=retry_after_s, rates=rates)
