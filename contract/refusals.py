"""What submit and quote answer, as types: places, rate limits, and refusals in words."""

from collections.abc import Sequence

from contract.errors import ErrorCode, JobRefused, RateLimit, RateLimits
from contract.function_types import QueuePosition, Submission
from contract.jobs import Job

UNKNOWN_MS = -1

_SENTENCES = {
    "stored_bytes": "what is kept of your jobs takes all the bytes it may: delete jobs that have "
    "ended, or ask for less retention_s",
    "requests_per_min": "the limit of requests per minute is reached",
    "tokens_per_min": "the limit of tokens per minute is reached",
    "concurrent_tokens": "the limit of tokens in unfinished jobs is reached",
    "lane_share": "your share of lane {lane!r} is taken by your jobs that wait in it",
    "lane_tokens": "lane {lane!r} is full",
    "lane_wait": "the wait in lane {lane!r} is over its bound",
}


def decode_position(place: Sequence[int]) -> QueuePosition:
    """Of {jobs ahead, tokens ahead, ms until it starts}."""
    jobs, tokens, wait_ms = place
    return QueuePosition(jobs, tokens, None if wait_ms == UNKNOWN_MS else wait_ms / 1000)


def decode_rates(submission: Submission, rates: Sequence[int]) -> RateLimits:
    """Of {requests left, ms until all are there again, tokens left, ms}."""
    requests_left, requests_ms, tokens_left, tokens_ms = rates
    limits = submission.limits

    def rate(limit: int, left: int, reset_ms: int) -> RateLimit | None:
        return RateLimit(limit, left, reset_ms / 1000) if limit else None

    return RateLimits(
        rate(limits.requests_per_min, requests_left, requests_ms),
        rate(limits.tokens_per_min, tokens_left, tokens_ms),
    )


def idempotency_mismatch() -> JobRefused:
    message = "this Idempotency-Key was used with another body"
    return JobRefused(ErrorCode.IDEMPOTENCY_MISMATCH, message)


def refusal(job: Job, reason: str, limit: str, retry_ms: int, rates: RateLimits) -> JobRefused:
    """A refusal as the functions word it: reason, limit, ms until another try may do."""
    code = ErrorCode(reason)
    if code is ErrorCode.NO_WORKERS:
        message = f"no worker of model {job.model!r} is alive"
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
