"""What submit and quote are told, as their arguments. Names and units are those of submit.lua."""

from collections.abc import Iterable

from contract.callbacks import encode_callback
from contract.codec import WIRE_VERSION, encode_job, encode_metadata, encode_terms
from contract.function_types import Submission
from contract.jobs import Job

IDEMPOTENCY_TTL_S = 24 * 3600
# What a job takes in Redis beside what it brings, as measured of jobs that have run.
_RECORD_BYTES = 6_500
_BYTES_PER_OUTPUT_TOKEN = 13


def stored_bytes(job: Job, submission: Submission) -> int:
    """What is counted as stored of a job until it is forgotten: its parts as they are sent, its
    prompt in the object store, and what its record and an output of full length take."""
    return _stored_bytes(job, submission, _packed(job, submission))


def _stored_bytes(job: Job, submission: Submission, packed: Iterable[bytes]) -> int:
    brought = sum(map(len, packed))
    if job.stored_prompt is not None:
        brought += job.stored_prompt.ref.num_bytes
    return brought + _RECORD_BYTES + _BYTES_PER_OUTPUT_TOKEN * submission.max_output_tokens


def _packed(job: Job, submission: Submission) -> tuple[bytes, bytes, bytes]:
    """Job, metadata and callback."""
    callback = b"" if submission.callback is None else encode_callback(submission.callback)
    return encode_job(job), encode_metadata(submission.metadata), callback


def asked(job: Job, submission: Submission) -> tuple[str | bytes, ...]:
    """The arguments of submit and quote."""
    s, limits = submission, submission.limits
    packed = _packed(job, s)
    terms: dict[str, str | int | float] = {
        "prompt_tokens": job.num_prompt_tokens,
        "max_tokens": s.max_output_tokens,
        "choices": job.num_choices,
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
        "weight": job.weight,
        "lane_share": limits.lane_share,
        "stored_bytes": _stored_bytes(job, s, packed),
        "max_tenant_bytes": s.max_tenant_stored_bytes,
        "max_bytes": s.max_stored_bytes,
        "needs_worker": s.needs_worker,
        "cold_ms": int(s.cold_start_s * 1000),
        "is_stored": job.stored_prompt is not None,
        "callback_to": "" if s.callback is None else s.callback.destination(job.tenant),
        "callback_started": s.callback is not None and s.callback.tells_start,
        "callback_every": 0 if s.callback is None else s.callback.progress_tokens,
    }
    encoded, metadata, callback = packed
    names = job.id, job.tenant, job.model, job.lane
    return *names, encoded, encode_terms(terms), metadata, callback
