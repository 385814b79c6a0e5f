"""Queues jobs, and finds those that calls with an earlier Idempotency-Key made."""

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Header
from starlette.responses import Response

from contract.function_types import JobView, Submission, Submitted
from contract.jobs import Job, JobStatus
from gateway.follow.job_objects import accepted_response, submitted_object
from gateway.http.errors import ApiError, UnknownJob
from gateway.http.load_headers import ServerTiming, rate_headers
from gateway.prepare.auth import Caller
from gateway.redis.broker import Broker
from gateway.runners.submission import submit
from gateway.state import Gateway

log = logging.getLogger("batchway.gateway")

IdempotencyKey = Annotated[
    str,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[!-~]{0,255}$",
        description="the same key and body: the job of the first call answers",
    ),
]


async def submit_job(
    gateway: Gateway, job: Job, submission: Submission, headers: Mapping[str, str]
) -> Response:
    """Queues a job: 202 with its id."""
    timing = ServerTiming()
    submitted = await submit(gateway, job, submission)
    timing.mark("admission")
    status = JobStatus.QUEUED
    if submitted.is_new:
        _log_accepted(job)
    else:
        view = await _known_job(gateway, submitted.job_id, job.tenant)
        job, status = view.job, view.status
    shown = submitted_object(job, submitted, status)
    answer_headers = {**headers, **rate_headers(submitted.rates), **timing.headers()}
    return accepted_response(shown, answer_headers)


async def accepted_job(gateway: Gateway, job: Job, submitted: Submitted, caller: Caller) -> Job:
    """The job that answers: the new one, or the earlier one with the same idempotency key. The
    caller may cancel it, so its current lane must be permitted. Raises ApiError."""
    if submitted.is_new:
        return job
    view = await _known_job(gateway, submitted.job_id, job.tenant)
    caller.check_lane(view.lane)
    return await gateway.whole(view.job)


async def _known_job(gateway: Gateway, job_id: str, tenant: str) -> JobView:
    """The job found by an Idempotency-Key. Raises ApiError if it is no longer stored."""
    try:
        view, _ = await gateway.broker.read(job_id, tenant)
    except UnknownJob:
        message = "the answer to this Idempotency-Key is no longer kept: use a new key"
        raise ApiError(
            409, "result_expired", message, headers={"x-should-retry": "false"}
        ) from None
    return view


async def check_may_change(broker: Broker, caller: Caller, job_id: str) -> None:
    """Raises ApiError (403) if the caller's key does not permit the job's lane; UnknownJob."""
    if caller.terms.lanes:
        view, _ = await broker.read(job_id, caller.tenant)
        caller.check_lane(view.lane)


def body_hash(key: str, endpoint: str, raw: Mapping[str, Any]) -> str:
    """Returns a hash that is equal for equal bodies; '' without an Idempotency-Key."""
    if not key:
        return ""
    text = json.dumps([endpoint, raw], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _log_accepted(job: Job) -> None:
    log.info("accepted job_id=%s lane=%s num_prompt=%d", job.id, job.lane, job.num_prompt_tokens)
