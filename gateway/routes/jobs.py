"""POST /v1/jobs; GET, PATCH /v1/jobs/{id}; GET …/events; POST …/cancel."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Body, Request
from starlette.responses import Response, StreamingResponse

from contract.function_types import JobView, Submission
from contract.jobs import Endpoint, Job, JobStatus
from gateway.follow.event_ids import AskedPosition
from gateway.follow.job_objects import (
    AcceptedJob,
    JobId,
    JobObject,
    JobWithResult,
    callback_object,
    has_result,
    job_object,
)
from gateway.follow.members import cancel_whole, members_of
from gateway.follow.streams import job_stream
from gateway.follow.whole_answers import ended_answer
from gateway.http import sse
from gateway.http.errors import ApiError, invalid_value
from gateway.http.handlers import answers
from gateway.prepare.admission import Terms, check_goes_on, check_lane
from gateway.prepare.auth import Caller, JobsReader, JobsWriter
from gateway.prepare.callbacks import to_callback
from gateway.prepare.calls import prepare_call
from gateway.prepare.job_bodies import AnyJob, JobChange
from gateway.prepare.response_bodies import ResponseBody
from gateway.prepare.response_jobs import prepare_response
from gateway.prepare.unsupported import ignored_header
from gateway.routes.accepted_jobs import IdempotencyKey, body_hash, check_may_change, submit_job
from gateway.routes.requests import CallRoute, WellFormed
from gateway.routes.sync_calls import EVENTS
from gateway.settings import GatewaySettings
from gateway.state import AcceptingGateway, Gateway, ThisGateway

router = APIRouter(route_class=CallRoute, tags=["jobs"], responses=answers(401, 403, 429))

AskedJob = Annotated[AnyJob, Body(discriminator="endpoint")]


@router.post(
    "/v1/jobs", status_code=202, response_model=AcceptedJob, responses=answers(404, 409, 415)
)
async def create_job(
    request: Request,
    caller: JobsWriter,
    _checked: WellFormed,
    gateway: AcceptingGateway,
    asked: AskedJob,
    key: IdempotencyKey = "",
) -> Response:
    """Queues a call; 202 with the job."""
    hashed = body_hash(key, "/v1/jobs", await request.json())
    job, submission = await prepare_job(
        gateway, asked, caller, idempotency_key=key, body_hash=hashed
    )
    return await submit_job(gateway, job, submission, ignored_header(asked.body))


@router.get("/v1/jobs/{job_id}", response_model=JobWithResult, responses=answers(404))
async def get_job(caller: JobsReader, gateway: ThisGateway, job_id: JobId) -> Response:
    """A job's state, and its result once it has ended."""
    await gateway.broker.sweep()
    view, _ = await gateway.broker.read(job_id, caller.tenant)
    members = await members_of(gateway.broker, view)
    shown = job_object(view, members).model_dump()
    shown |= {"result": None, "result_url": await _result_url(gateway, view)}
    shown["callback"] = callback_object(await gateway.broker.callback_state(job_id, caller.tenant))
    if has_result(view):
        shown["result"] = await ended_answer(gateway, view)
    return sse.json_response(shown)


@router.get(
    "/v1/jobs/{job_id}/events",
    response_class=StreamingResponse,
    responses={200: EVENTS, **answers(404)},
)
async def stream_job(
    request: Request,
    caller: JobsReader,
    gateway: ThisGateway,
    job_id: JobId,
    position: AskedPosition,
) -> Response:
    """Streams a job's events, from the start or after any event. A disconnect cancels nothing."""
    view, _ = await gateway.broker.read(job_id, caller.tenant)
    events = job_stream(gateway, view, position)
    return await sse.sse_response(request, events, headers={"x-job-id": job_id}, on_gone=_nothing)


@router.post("/v1/jobs/{job_id}/cancel", responses=answers(404, 409))
async def cancel_job(caller: JobsWriter, gateway: ThisGateway, job_id: JobId) -> JobObject:
    """Cancels a job, waiting or running; 409 if it has ended otherwise."""
    broker = gateway.broker
    await check_may_change(broker, caller, job_id)
    view, _ = await broker.read(job_id, caller.tenant)
    status = await cancel_whole(broker, view.job)
    if status is not JobStatus.CANCELLED:
        raise _already_terminal(status)
    view, _ = await broker.read(job_id, caller.tenant)
    return job_object(view)


async def _result_url(gateway: Gateway, view: JobView) -> str | None:
    """A temporary URL of a result in the object store, which needs no key."""
    ttl_s = gateway.settings.result_url_s
    return await asyncio.to_thread(gateway.broker.payloads.url, view, ttl_s)


@router.patch("/v1/jobs/{job_id}", responses=answers(404, 409, 415))
async def change_job(
    caller: JobsWriter, _checked: WellFormed, gateway: ThisGateway, job_id: JobId, change: JobChange
) -> JobObject:
    """Changes a job's lane or deadline, waiting or running; 409 if it has ended."""
    broker = gateway.broker
    await check_may_change(broker, caller, job_id)
    if change.lane is not None:
        view, _ = await broker.read(job_id, caller.tenant)
        caller.check_lane(change.lane)
        if (card := (await broker.known.models()).get(view.job.model)) is not None:
            check_lane(card, change.lane)
    ended = await broker.reprioritise(
        job_id, caller.tenant, lane=change.lane or "", deadline_s=change.deadline_s
    )
    if ended is not None:
        raise _already_terminal(ended)
    view, _ = await broker.read(job_id, caller.tenant)
    return job_object(view)


def _already_terminal(status: JobStatus) -> ApiError:
    message = f"the job has ended before: {status}"
    return ApiError(409, "already_terminal", message, headers={"x-should-retry": "false"})


async def _nothing() -> None:
    """Does nothing, as a disconnect does not cancel this job."""


async def prepare_job(
    gateway: Gateway, asked: AnyJob, caller: Caller, *, idempotency_key: str, body_hash: str
) -> tuple[Job, Submission]:
    """Raises ApiError. Parameters of the inner body are named below `body`."""
    settings = gateway.settings
    endpoint = Endpoint(asked.endpoint)
    terms = Terms(
        caller=caller,
        lane=asked.lane,
        deadline_s=asked.deadline_s or settings.job_deadline_s,
        retention_s=_retention_s(settings, asked, caller),
        metadata=asked.metadata or {},
        callback=to_callback(asked.callback, caller.tenant, settings),
        idempotency_key=idempotency_key,
        body_hash=body_hash,
    )
    try:
        check_goes_on(asked.body)
        if isinstance(asked.body, ResponseBody):
            _check_is_stored(asked.body)
            return await prepare_response(gateway, asked.body, terms)
        return await prepare_call(gateway, endpoint, asked.body, terms)
    except ApiError as exc:
        if exc.param not in (None, "lane"):
            exc.param = f"body.{exc.param}"
        raise


def _check_is_stored(body: ResponseBody) -> None:
    """Raises ApiError if nothing may be kept of what is only read later."""
    if not body.is_stored:
        message = "store: a job is kept for its retention_s; delete it when you have read it"
        raise invalid_value("store", message)


def _retention_s(settings: GatewaySettings, asked: AnyJob, caller: Caller) -> float:
    """Seconds from the job's end. Raises ApiError if more is asked for than allowed."""
    if asked.retention_s is None:
        return caller.job_retention_s(settings)
    if asked.retention_s > settings.max_retention_s:
        most = f"{settings.max_retention_s:g}"
        raise invalid_value("retention_s", f"retention_s may be at most {most} here")
    return asked.retention_s
