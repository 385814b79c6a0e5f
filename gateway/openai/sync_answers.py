"""A synchronous call from its request to its response; one code path for both endpoints."""

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from starlette.responses import Response

from contract.api_keys import Scope
from contract.calls import JobView, Submission, Submitted
from contract.errors import BatchwayError
from contract.jobs import Endpoint, Job, JobStatus
from gateway.http import sse
from gateway.http.auth import Caller
from gateway.http.bodies import read_object
from gateway.http.errors import ApiError, UnknownJob, draining, invalid_value, to_call_error
from gateway.http.load_headers import ServerTiming, rate_headers
from gateway.http.responses import accepted_response
from gateway.http.responses import json_response as json_response
from gateway.jobs.event_ids import START, Position, asked_position
from gateway.jobs.job_objects import submitted_object
from gateway.jobs.patience import Patience, Preference
from gateway.jobs.streams import Gateway, call_stream, whole_answer
from gateway.jobs.sync_call import SyncCall
from gateway.openai.admission import Terms, prepare
from gateway.openai.schemas import CallBody, check_goes_on, parse_call
from gateway.openai.unsupported import ignored_header
from gateway.redis.broker import Broker

log = logging.getLogger("batchway.gateway")

_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")


def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


async def answer_call(request: Request, endpoint: Endpoint, caller: Caller) -> Response:
    """Submits the call's job and answers with its output, whole or as a stream; or with the job,
    where the caller prefers it or the time is up.
    """
    gateway = gateway_of(request)
    timing = ServerTiming()
    if gateway.drain.has_begun:
        raise draining()
    preference = Preference.of(request)
    if preference.is_given:
        caller.check_scope(Scope.JOBS_WRITE)  # the call may become a job
    patience = _patience(request, gateway, preference)
    raw = await read_object(request)
    body = parse_call(endpoint, raw)
    key = idempotency_key(request)
    terms = _terms(gateway, caller, preference, body, key, body_hash(key, endpoint, raw))
    if preference.is_at_once:
        check_goes_on(body)
        prepared = await prepare(gateway.broker, gateway.settings, endpoint, body, terms)
        told = preference.applied() | ignored_header(raw)
        return await submit_job(gateway, *prepared, told)
    position = _resumed_position(request, body, key)
    job, submission = await prepare(gateway.broker, gateway.settings, endpoint, body, terms)
    submitted_s = gateway.broker.clock()
    submitted = await gateway.submit(job, submission)
    timing.mark("admission")
    job = await accepted_job(gateway, job, submitted, caller)
    told = preference.applied() | ignored_header(raw) | rate_headers(submitted.rates)
    headers = {"x-job-id": job.id, **told}
    call = SyncCall(
        gateway.broker,
        gateway.settings,
        job,
        patience,
        timing,
        job_retention_s=caller.job_retention_s(gateway.settings),
        submitted_s=submitted_s if submitted.is_new else None,
        may_return=not _ends_with_caller(body, key),
        headers=told,
    )
    if not body.stream:
        return await _whole(request, gateway, call, headers)
    return sse.SseResponse(
        call_stream(
            gateway,
            call,
            includes_usage=body.includes_usage,
            repeats_usage=body.repeats_usage,
            has_ids=bool(key) or body.on_disconnect == "continue",
            position=position,
            starts_over=position is not START and submitted.is_new,
        ),
        headers=headers | timing.headers(),
        on_gone=call.on_gone,
    )


def _terms(
    gateway: Gateway,
    caller: Caller,
    preference: Preference,
    body: CallBody,
    key: str,
    hashed: str,
) -> Terms:
    """A call's terms; a job's, where the caller says that it may become one."""
    settings = gateway.settings
    is_job = preference.is_given
    # Who wants no answer now is not waited for.
    is_attended = _ends_with_caller(body, key) and not preference.is_at_once
    return Terms(
        caller=caller,
        deadline_s=settings.job_deadline_s if is_job else settings.sync_deadline_s,
        retention_s=caller.job_retention_s(settings)
        if is_job
        else caller.sync_retention_s(settings),
        attendance_s=settings.attendance_s if is_attended else 0.0,
        # Who prefers a job to waiting may wait for a worker too.
        needs_worker=not is_job,
        idempotency_key=key,
        body_hash=hashed,
    )


def _ends_with_caller(body: CallBody, key: str) -> bool:
    """Whether the job of a caller that leaves is cancelled. A key says: I will be back."""
    return not key if body.on_disconnect is None else body.on_disconnect == "cancel"


def _patience(request: Request, gateway: Gateway, preference: Preference) -> Patience:
    settings = gateway.settings
    return Patience.of(
        request,
        preference,
        sync_limit_s=settings.sync_limit_s,
        longest_s=settings.sync_deadline_s,
    )


async def _whole(
    request: Request, gateway: Gateway, call: SyncCall, headers: Mapping[str, str]
) -> Response:
    try:
        answer = await sse.unless_gone(request.receive, whole_answer(gateway, call))
    except sse.ClientGone:
        await call.on_gone()
        return Response(status_code=499)  # to nobody
    except sse.AnsweredOtherwise as exc:
        return exc.response
    except BatchwayError as exc:
        error = to_call_error(exc)
        error.headers["x-job-id"] = call.job.id
        raise error from exc
    call.timing.mark("total")
    return json_response(answer, headers={**headers, **call.timing.headers()})


async def submit_job(
    gateway: Gateway, job: Job, submission: Submission, headers: Mapping[str, str]
) -> Response:
    """Queues a job that nobody waits for: 202 with its id."""
    timing = ServerTiming()
    submitted = await gateway.submit(job, submission)
    timing.mark("admission")
    status = JobStatus.QUEUED
    if submitted.is_new:
        _log_accepted(job)
    else:
        view = await _known_job(gateway, submitted.job_id, job.tenant)
        job, status = view.job, view.status
    shown = submitted_object(job, submitted, status)
    told = {**headers, **rate_headers(submitted.rates), **timing.headers()}
    return accepted_response(shown, told)


async def accepted_job(gateway: Gateway, job: Job, submitted: Submitted, caller: Caller) -> Job:
    """The job that answers: this one, or the earlier one of the same idempotency key. That one may
    have been moved since, and the call can cancel it. Raises ApiError where its lane is not the
    caller's.
    """
    if submitted.is_new:
        return job
    view = await _known_job(gateway, submitted.job_id, job.tenant)
    caller.check_lane(view.lane)
    return await gateway.whole(view.job)


async def _known_job(gateway: Gateway, job_id: str, tenant: str) -> JobView:
    """The job that an Idempotency-Key led to. Raises ApiError where it is forgotten."""
    try:
        view, _ = await gateway.broker.read(job_id, tenant)
    except UnknownJob:
        message = "the answer to this Idempotency-Key is no longer kept: use a new key"
        raise ApiError(
            409, "result_expired", message, headers={"x-should-retry": "false"}
        ) from None
    return view


async def check_may_change(broker: Broker, caller: Caller, job_id: str) -> None:
    """Raises ApiError (403) where the job is in a lane that the caller's key is not for,
    UnknownJob.
    """
    if caller.terms.lanes:
        view, _ = await broker.read(job_id, caller.tenant)
        caller.check_lane(view.lane)


def idempotency_key(request: Request) -> str:
    """The header's value, '' without one. Raises ApiError."""
    key = request.headers.get("idempotency-key", "")
    if key and not _IDEMPOTENCY_KEY.fullmatch(key):
        message = "an Idempotency-Key has 1 to 255 printable ASCII characters and no spaces"
        raise invalid_value("Idempotency-Key", message)
    return key


def body_hash(key: str, endpoint: str, raw: Mapping[str, Any]) -> str:
    """The same for bodies that say the same; '' without an Idempotency-Key: nobody else asks."""
    if not key:
        return ""
    text = json.dumps([endpoint, raw], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _resumed_position(request: Request, body: CallBody, key: str) -> Position:
    """Where the caller's own earlier stream broke off. Raises ApiError."""
    param, position = asked_position(request)
    if position is not START and not (key and body.stream):
        message = (
            f"{param} goes on with the stream of an earlier call: that needs stream: true, the "
            "same body and its Idempotency-Key"
        )
        raise invalid_value(param, message)
    return position


def _log_accepted(job: Job) -> None:
    log.info("accepted job_id=%s lane=%s num_prompt=%d", job.id, job.lane, job.num_prompt_tokens)
