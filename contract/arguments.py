"""Builds the arguments of the functions. Names and units are those of contract/lua/*.lua."""

import struct
from collections.abc import Iterable, Mapping, Sequence

from contract.codec import WIRE_VERSION, encode
from contract.function_types import Append, LaneRoom, Submission
from contract.jobs import Job

IDEMPOTENCY_TTL_S = 24 * 3600
# Bytes that a finished job takes in Redis beside its arguments, as measured.
_RECORD_BYTES = 6_500
_BYTES_PER_OUTPUT_TOKEN = 13

_SIZE = struct.Struct("<I")
_HEAD = struct.Struct("<III")  # epoch, output tokens, bytes of the event
_NO_END = bytes(2)  # in place of an end, after the event's number
_NO_ROOM = LaneRoom(0, 0)


def stored_bytes(job: Job, submission: Submission, parts: Iterable[bytes]) -> int:
    """Returns the bytes that count as stored until a job is forgotten: its encoded parts, those in
    the object store, its record, and an output of full length."""
    num_bytes = sum(map(len, parts))
    if job.stored_prompt is not None:
        num_bytes += job.stored_prompt.ref.num_bytes
    if job.stored_response is not None:
        num_bytes += job.stored_response.num_bytes
    num_bytes += _RECORD_BYTES + submission.vector_bytes
    return num_bytes + _BYTES_PER_OUTPUT_TOKEN * submission.max_output_tokens


def encoded_parts(job: Job, submission: Submission) -> tuple[bytes, bytes, bytes]:
    """Job, metadata and callback, encoded."""
    metadata = encode(submission.metadata) if submission.metadata else b""
    callback = b"" if submission.callback is None else encode(submission.callback)
    return encode(job), metadata, callback


def submit_arguments(job: Job, submission: Submission) -> tuple[str | bytes, ...]:
    """The arguments of submit and quote."""
    s, limits = submission, submission.limits
    parts = encoded_parts(job, s)
    terms: dict[str, str | int | float] = {
        "prompt_tokens": job.num_prompt_tokens,
        "max_tokens": s.max_output_tokens,
        "choices": job.num_places,
        "expected_tokens": job.params.expected_tokens * job.num_choices,
        "deadline_ms": int(s.deadline_s * 1000),
        "ttl_ms": int(s.retention_s * 1000),
        "max_attempts": s.max_attempts,
        "version": WIRE_VERSION,
        "attendance_ms": int(s.attendance_s * 1000),
        "idem_key": s.idempotency_key,
        "idem_ttl_ms": IDEMPOTENCY_TTL_S * 1000,
        "body_hash": s.body_hash,
        "lane_tokens": s.lane_bound_tokens,
        "lane_wait_ms": int(s.lane_bound_s * 1000),
        "requests_per_min": limits.requests_per_min,
        "tokens_per_min": limits.tokens_per_min,
        "concurrent_tokens": limits.concurrent_tokens,
        "batch_price": s.batch_price,
        "weight": job.weight,
        "lane_share": limits.lane_share,
        "stored_bytes": stored_bytes(job, s, parts),
        "max_tenant_bytes": s.max_tenant_stored_bytes,
        "max_bytes": s.max_stored_bytes,
        "vector_bytes": s.vector_bytes,
        "is_counted": s.is_counted,
        "is_passing": s.is_passing,
        "needs_worker": s.needs_worker,
        "cold_ms": int(s.cold_start_s * 1000),
        "is_stored": job.has_objects,
        "callback_to": "" if s.callback is None else s.callback.destination(job.tenant),
        "callback_started": s.callback is not None and s.callback.notifies_start,
        "callback_every": 0 if s.callback is None else s.callback.progress_tokens,
        "part": _part(job),
        "call_prompt_tokens": s.call_prompt_tokens,
    }
    encoded, metadata, callback = parts
    names = job.id, job.tenant, job.model, job.lane
    return *names, encoded, encode(terms), metadata, callback


def _part(job: Job) -> str:
    """Whether the job is a flow's, a call of one, or both."""
    if job.flow is not None:
        return "nested" if job.parent else "parent"
    return "child" if job.parent else ""


def append_items(items: Sequence[Append]) -> bytes:
    """Packs the events and ends of an append into one argument: an argument for each value would
    cost more than the value."""
    parts: list[bytes] = []
    for item in items:
        event = encode(item.event) if item.event is not None else b""
        parts += (_HEAD.pack(item.epoch, item.num_tokens, len(event)), event, b"%d" % item.number)
        parts.append(_encode_end(item) if item.fin else _NO_END)
    return b"".join(parts)


def _encode_end(item: Append) -> bytes:
    message = item.message.encode()
    result = b"" if item.result is None else encode(item.result)
    words = f"\0{item.fin}\0{item.code}\0".encode()
    sizes = _SIZE.pack(len(message)), _SIZE.pack(len(result)), _SIZE.pack(item.prompt_tokens)
    return b"".join((words, sizes[0], message, sizes[1], result, sizes[2]))


def lane_argument(
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
