"""POST /v1/jobs; GET, PATCH /v1/jobs/{id}; GET …/events; POST …/cancel."""

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from contract.calls import JobView
from contract.jobs import JobStatus
from gateway.http import sse
from gateway.http.auth import JobsReader, JobsWriter
from gateway.http.bodies import read_object
from gateway.http.errors import ApiError, draining
from gateway.http.routing import Route
from gateway.jobs.event_ids import asked_position
from gateway.jobs.job_objects import callback_object, checked_id, job_object
from gateway.jobs.job_terms import prepare_job
from gateway.jobs.streams import Gateway, job_stream
from gateway.openai.admission import check_lane
from gateway.openai.answers import Answer
from gateway.openai.schemas import parse_job, parse_job_change
from gateway.openai.sync_answers import (
    body_hash,
    check_may_change,
    gateway_of,
    idempotency_key,
    json_response,
    submit_job,
)
from gateway.openai.unsupported import ignored_header

router = APIRouter(route_class=Route)


@router.post("/v1/jobs")
async def create_job(request: Request, caller: JobsWriter) -> Response:
    """Queues a call to be run whenever there is room; 202."""
    gateway = gateway_of(request)
    if gateway.drain.has_begun:
        raise draining()
    raw = await read_object(request)
    asked = parse_job(raw)
    key = idempotency_key(request)
    hashed = body_hash(key, "/v1/jobs", raw)
    job, submission = await prepare_job(
        gateway, asked, caller, idempotency_key=key, body_hash=hashed
    )
    return await submit_job(gateway, job, submission, ignored_header(asked.body))


@router.get("/v1/jobs/{job_id}")
async def get_job(request: Request, caller: JobsReader, job_id: str) -> Response:
    """A job's state, with its result once it has ended."""
    gateway = gateway_of(request)
    await gateway.broker.sweep()
    view, _ = await gateway.broker.read(checked_id(job_id), caller.tenant)
    shown = job_object(view) | {"result": None, "result_url": await _result_url(gateway, view)}
    shown["callback"] = callback_object(await gateway.broker.callback_state(job_id, caller.tenant))
    if view.is_terminal and view.num_output_tokens:
        job = await gateway.whole(view.job)
        answer = Answer(job, await gateway.tokenizer_for(job))
        async for entry in gateway.broker.log(job_id, caller.tenant, up_to=view.next_number - 1):
            answer.add(entry)
        shown["result"] = answer.build(view.num_prompt_tokens, view.num_output_tokens)
    return json_response(shown)


@router.get("/v1/jobs/{job_id}/events")
async def stream_job(request: Request, caller: JobsReader, job_id: str) -> Response:
    """A job's stream, from its start or from any event on. Leaving it cancels nothing."""
    gateway = gateway_of(request)
    _, position = asked_position(request)
    view, _ = await gateway.broker.read(checked_id(job_id), caller.tenant)
    return sse.SseResponse(
        job_stream(gateway, view, position),
        headers={"x-job-id": job_id},
        on_gone=_nothing,
    )


@router.post("/v1/jobs/{job_id}/cancel")
async def cancel_job(request: Request, caller: JobsWriter, job_id: str) -> Response:
    """Ends a job, waiting or running; 409 where it has ended otherwise."""
    broker = gateway_of(request).broker
    await check_may_change(broker, caller, checked_id(job_id))
    status = await broker.cancel(job_id, caller.tenant)
    if status is not JobStatus.CANCELLED:
        raise _already_terminal(status)
    view, _ = await broker.read(job_id, caller.tenant)
    return json_response(job_object(view))


async def _result_url(gateway: Gateway, view: JobView) -> str | None:
    """Where a result that lies in the object store can be had without a key, for a while."""
    ttl_s = gateway.settings.result_url_s
    return await asyncio.to_thread(gateway.broker.payloads.url, view, ttl_s)


@router.patch("/v1/jobs/{job_id}")
async def change_job(request: Request, caller: JobsWriter, job_id: str) -> Response:
    """Moves a job to another lane or deadline, waiting or running; 409 where it has ended."""
    broker = gateway_of(request).broker
    change = parse_job_change(await read_object(request))
    await check_may_change(broker, caller, checked_id(job_id))
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
    return json_response(job_object(view))


def _already_terminal(status: JobStatus) -> ApiError:
    message = f"the job has ended before: {status}"
    return ApiError(409, "already_terminal", message, headers={"x-should-retry": "false"})


async def _nothing() -> None:
    """A job of its own goes on without readers."""
