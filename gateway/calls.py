"""A synchronous call from its request to its response; one code path for both endpoints."""

import hashlib
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import Request
from starlette.responses import Response

from contract.calls import Submitted
from contract.errors import BatchwayError
from contract.jobs import Endpoint, Job, JobStatus
from gateway import sse
from gateway.admission import Terms, prepare
from gateway.auth import Caller
from gateway.bodies import read_object
from gateway.errors import ApiError, UnknownJob, draining, invalid_value, no_workers, to_api_error
from gateway.job_objects import submitted_object
from gateway.schemas import CallBody, parse_call
from gateway.streams import Gateway, call_stream, whole_answer

log = logging.getLogger("batchway.gateway")

_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")


def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


async def answer_call(request: Request, endpoint: Endpoint, caller: Caller) -> Response:
    """Submits the call's job and answers with its output, whole or as a stream."""
    gateway = gateway_of(request)
    if gateway.drain.has_begun:
        raise draining()
    raw = await read_object(request)
    body = parse_call(endpoint, raw)
    if _prefers_async(request):
        return await _as_job(request, gateway, endpoint, body, raw, caller)
    settings = gateway.settings
    key = idempotency_key(request)
    terms = Terms(
        caller=caller,
        deadline_s=settings.sync_deadline_s,
        retention_s=settings.sync_retention_s,
        attendance_s=0.0 if key else settings.attendance_s,  # a key says: I will be back
        idempotency_key=key,
        body_hash=body_hash(endpoint, raw),
    )
    job, submission = await prepare(gateway.broker, settings, endpoint, body, terms)
    if not await gateway.broker.num_live_workers(job.model):
        raise no_workers(job.model)
    submitted = await gateway.broker.submit(job, submission)
    job = await accepted_job(gateway, job, submitted)
    on_gone = _leave_running if terms.idempotency_key else _canceller(gateway, job)
    if body.stream:
        return sse.SseResponse(
            call_stream(gateway, job, includes_usage=body.includes_usage),
            headers={"x-job-id": job.id},
            stall_timeout_s=settings.stall_timeout_s,
            on_gone=on_gone,
        )
    return await _whole(request, gateway, job, on_gone)


async def _whole(
    request: Request, gateway: Gateway, job: Job, on_gone: Callable[[], Awaitable[None]]
) -> Response:
    try:
        answer = await sse.unless_gone(request.receive, whole_answer(gateway, job))
    except sse.ClientGone:
        await on_gone()
        return Response(status_code=499)  # to nobody
    except BatchwayError as exc:
        error = to_api_error(exc)
        error.headers["x-job-id"] = job.id
        raise error from exc
    return json_response(answer, headers={"x-job-id": job.id})


async def _as_job(
    request: Request,
    gateway: Gateway,
    endpoint: Endpoint,
    body: CallBody,
    raw: Mapping[str, Any],
    caller: Caller,
) -> Response:
    """`Prefer: respond-async`: the call becomes a job, under a job's terms."""
    terms = Terms(
        caller=caller,
        deadline_s=gateway.settings.job_deadline_s,
        retention_s=gateway.settings.job_retention_s,
        idempotency_key=idempotency_key(request),
        body_hash=body_hash(endpoint, raw),
    )
    return await submit_job(gateway, endpoint, body, terms, {"preference-applied": "respond-async"})


async def submit_job(
    gateway: Gateway,
    endpoint: Endpoint,
    body: CallBody,
    terms: Terms,
    headers: Mapping[str, str],
) -> Response:
    """Queues a job that nobody waits for: 202 with its id."""
    job, submission = await prepare(gateway.broker, gateway.settings, endpoint, body, terms)
    submitted = await gateway.broker.submit(job, submission)
    status = JobStatus.QUEUED
    if submitted.is_new:
        _log_accepted(job)
    else:
        view, _ = await gateway.broker.read(submitted.job_id, terms.caller.tenant)
        job, status = view.job, view.status
    return json_response(
        submitted_object(job, submitted, status),
        status=202,
        headers={**headers, "x-job-id": job.id, "location": f"/v1/jobs/{job.id}"},
    )


async def accepted_job(gateway: Gateway, job: Job, submitted: Submitted) -> Job:
    """The job that answers: this one, or the earlier one of the same idempotency key."""
    if submitted.is_new:
        _log_accepted(job)
        return job
    try:
        view, _ = await gateway.broker.read(submitted.job_id, job.tenant)
    except UnknownJob:
        message = "the answer to this Idempotency-Key is no longer kept: use a new key"
        raise ApiError(
            409, "result_expired", message, headers={"x-should-retry": "false"}
        ) from None
    return await gateway.whole(view.job)


def idempotency_key(request: Request) -> str:
    """The header's value, '' without one. Raises ApiError."""
    key = request.headers.get("idempotency-key", "")
    if key and not _IDEMPOTENCY_KEY.fullmatch(key):
        message = "an Idempotency-Key has 1 to 255 printable ASCII characters and no spaces"
        raise invalid_value("Idempotency-Key", message)
    return key


def body_hash(endpoint: str, raw: Mapping[str, Any]) -> str:
    """The same for bodies that say the same."""
    text = json.dumps([endpoint, raw], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def json_response(
    content: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        sse.encode_json(content), status, headers=headers, media_type="application/json"
    )


def _prefers_async(request: Request) -> bool:
    preferences = ",".join(request.headers.getlist("prefer")).lower().split(",")
    return "respond-async" in {preference.strip() for preference in preferences}


async def _leave_running() -> None:
    """Who brings an Idempotency-Key may come back; the deadline bounds the cost."""


def _canceller(gateway: Gateway, job: Job) -> Callable[[], Awaitable[None]]:
    async def cancel() -> None:
        try:
            status = await gateway.broker.cancel(job.id, job.tenant)
        except BatchwayError as exc:
            log.warning("caller gone, not cancelled (%s) job_id=%s", type(exc).__name__, job.id)
            return
        log.info("caller gone, job is %s job_id=%s lane=%s", status, job.id, job.lane)

    return cancel


def _log_accepted(job: Job) -> None:
    log.info("accepted job_id=%s lane=%s num_prompt=%d", job.id, job.lane, job.num_prompt_tokens)
