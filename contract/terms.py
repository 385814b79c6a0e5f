"""What submit and quote are told, as their arguments. Names and units are those of submit.lua."""

from contract.callbacks import encode_callback
from contract.calls import Submission
from contract.codec import WIRE_VERSION, encode_job, encode_metadata, encode_terms
from contract.jobs import Job

IDEMPOTENCY_TTL_S = 24 * 3600


def asked(job: Job, submission: Submission) -> tuple[str | bytes, ...]:
    """The arguments of submit and quote."""
    s, limits = submission, submission.limits
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
        "lane_share": limits.lane_share,
        "needs_worker": s.needs_worker,
        "cold_ms": int(s.cold_start_s * 1000),
        "is_stored": job.stored_prompt is not None,
        "callback_to": "" if s.callback is None else s.callback.destination(job.tenant),
        "callback_started": s.callback is not None and s.callback.tells_start,
        "callback_every": 0 if s.callback is None else s.callback.progress_tokens,
    }
    callback = b"" if s.callback is None else encode_callback(s.callback)
    packed = encode_job(job), encode_terms(terms), encode_metadata(s.metadata), callback
    return job.id, job.tenant, job.model, job.lane, *packed
