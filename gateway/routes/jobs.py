"""POST and GET /v1/jobs; GET, PATCH, DELETE /v1/jobs/{id}; GET …/events; POST …/cancel, …/token;
POST /v1/quote: the cost and expected times of a job.
"""

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Literal

from fastapi import APIRouter, Body, Depends, Query, Request
from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse

from contract.api_keys import Scope
from contract.function_types import Quote, Submission, Verdict, Wanted
from contract.jobs import PUBLIC_STATUSES, Endpoint, Job, JobStatus
from gateway.files import ANSWER_BYTES
from gateway.follow.answer_models import EndpointPath, Page
from gateway.follow.fleet import FleetWatch
from gateway.follow.job_objects import (
    JobId,
    JobObject,
    JobState,
    JobToken,
    JobWithResult,
    NewJob,
    UnixSeconds,
    accepted_response,
    callback_object,
    checked_id,
    cost_of,
    has_result,
    job_object,
    member_object,
    place,
)
from gateway.follow.members import cancel_whole, delete_whole, tree_of
from gateway.follow.streams import ended_answer, job_stream
from gateway.follow.sync_call import AskedPosition, TimeLimit
from gateway.http import sse
from gateway.http.errors import (
    NO_RETRY,
    ApiError,
    UnknownJob,
    bad_request,
    invalid_value,
    rate_headers,
    to_api_error,
)
from gateway.http.handlers import answers
from gateway.prepare.admission import (
    Caller,
    Inference,
    JobCanceller,
    JobFollower,
    JobsReader,
    JobsSubmitter,
    JobsWriter,
    invalid_key,
)
from gateway.prepare.calls import check_goes_on, check_is_lane, check_lane, prepare_call
from gateway.prepare.job_bodies import AnyJob, JobChange, TokenBody, check_start, to_callback
from gateway.prepare.response_bodies import ResponseBody
from gateway.prepare.response_jobs import prepare_response
from gateway.prepare.unsupported import ignored_header
from gateway.routes.calls import EVENTS, IdempotencyKey, body_hash, check_may_change, submit_job
from gateway.routes.requests import GuardedRoute
from gateway.runners.submission import quote_first_calls
from gateway.settings import GatewaySettings
from gateway.state import AcceptingGateway, Gateway, ThisGateway

router = APIRouter(route_class=GuardedRoute, tags=["jobs"], responses=answers(401, 403, 429))

AskedJob = Annotated[AnyJob, Body(discriminator="endpoint")]

_MAX_FILTERS = 16  # as many as a job has metadata
_METADATA = re.compile(r"metadata\[(.{1,64})\]")
_PARAMETERS = "status lane model error_code created_after created_before tenant limit after"
_METADATA_PARAMETER = {
    "name": "metadata",
    "in": "query",
    "required": False,
    "schema": {"type": "object", "additionalProperties": {"type": "string"}},
    "description": "jobs with these values under these names: `metadata[name]=value`",
    "style": "deepObject",
    "explode": True,
}
METADATA_QUERY = {"parameters": [_METADATA_PARAMETER]}


Whose = Annotated[
    str, Query(alias="tenant", description="with the scope `admin` another tenant; not its outputs")
]


@router.post("/v1/jobs", status_code=202, response_model=NewJob, responses=answers(404, 409, 415))
async def create_job(
    request: Request,
    caller: JobsSubmitter,
    gateway: AcceptingGateway,
    asked: AskedJob,
    key: IdempotencyKey = "",
) -> Response:
    """Queues a call; 202 with the job."""
    if asked.token is not None:
        caller.check_scope(Scope.JOBS_READ)
    hashed = await body_hash(request, key, "/v1/jobs")
    job, submission = await prepare_job(
        gateway, asked, caller, idempotency_key=key, body_hash=hashed
    )
    shown, headers = await submit_job(gateway, job, submission, ignored_header(asked.body))
    if asked.token is not None:
        token = await _token(gateway, caller, shown.id, asked.token)
        shown = NewJob(**shown.model_dump(), token=token)
    return accepted_response(shown, headers)


@router.post("/v1/jobs/{job_id}/token", responses=answers(404, 415))
async def create_token(
    caller: JobsReader, gateway: ThisGateway, job_id: JobId, asked: TokenBody | None = None
) -> JobToken:
    """A token with which a browser reads, follows and cancels this job, and nothing else."""
    await gateway.broker.read(job_id, caller.tenant)
    return await _token(gateway, caller, job_id, asked or TokenBody())


async def _token(gateway: Gateway, caller: Caller, job_id: str, asked: TokenBody) -> JobToken:
    """Raises ApiError (401) if the caller's key has just ended."""
    ring = gateway.broker.key_ring
    made = await ring.job_token(caller.key_name, job_id, asked.lifetime_s)
    if made is None:
        raise invalid_key()
    return JobToken(job_id=job_id, value=made[0], expires_at=made[1])


@router.get("/v1/jobs/{job_id}", response_model=JobWithResult, responses=answers(404))
async def get_job(
    request: Request, caller: JobFollower, gateway: ThisGateway, job_id: JobId, whose: Whose = ""
) -> Response:
    """A job's state, and its result once it has ended; without it where it is longer than an answer
    may be and has a URL."""
    tenant = caller.tenant_of(whose, may_be_all=False)
    await gateway.broker.sweep()
    view, _ = await gateway.broker.read(job_id, tenant)
    prices = _prices(request, caller)
    tree = await tree_of(gateway.broker, view)
    members = [member_object(view.job, member, prices) for member in tree]
    wait = await gateway.broker.worker_wait(view.job, view.status)
    found = job_object(view, members, wait)
    cost = cost_of(view.job.model, found.usage, members, prices)
    shown = found.model_dump() | {"result": None, "result_url": None, "cost": cost}
    shown["callback"] = callback_object(await gateway.broker.callback_state(job_id, tenant))
    if tenant == caller.tenant:
        ttl_s = gateway.settings.result_url_s
        shown["result_url"] = await asyncio.to_thread(gateway.broker.payloads.url, view, ttl_s)
    if tenant == caller.tenant and has_result(view):
        shown["result"] = await ended_answer(gateway, view)
    answer, most = sse.json_response(shown), request.scope["state"].get(ANSWER_BYTES, math.inf)
    if shown["result_url"] and len(answer.body) > most:
        return sse.json_response(shown | {"result": None})
    return answer


def _prices(request: Request, caller: Caller) -> Mapping[str, float]:
    """Of a million output tokens by model, as far as this gateway knows and the caller may."""
    watch: FleetWatch | None = getattr(request.app.state, "fleet_watch", None)
    return watch.prices if watch is not None and caller.has(Scope.METRICS) else {}


@router.get(
    "/v1/jobs/{job_id}/events",
    response_class=StreamingResponse,
    responses={200: EVENTS, **answers(404)},
)
async def stream_job(
    request: Request,
    caller: JobFollower,
    gateway: ThisGateway,
    job_id: JobId,
    position: AskedPosition,
) -> Response:
    """Streams a job's events, from the start or after any event. A disconnect cancels nothing."""
    view, _ = await gateway.broker.read(job_id, caller.tenant)
    events = job_stream(gateway, view, position, TimeLimit.of(request, gateway.settings))
    return await sse.sse_response(request, events, headers={"x-job-id": job_id})


@router.post("/v1/jobs/{job_id}/cancel", responses=answers(404, 409))
async def cancel_job(
    caller: JobCanceller, gateway: ThisGateway, job_id: JobId, whose: Whose = ""
) -> JobObject:
    """Cancels a job, waiting or running; 409 if it has ended otherwise."""
    broker, tenant = gateway.broker, caller.tenant_of(whose, may_be_all=False)
    await check_may_change(broker, caller, job_id, tenant)
    view, _ = await broker.read(job_id, tenant)
    status = await cancel_whole(broker, view.job)
    if status is not JobStatus.CANCELLED:
        raise _already_terminal(status)
    view, _ = await broker.read(job_id, tenant)
    return job_object(view)


@router.patch("/v1/jobs/{job_id}", responses=answers(404, 409, 415))
async def change_job(
    caller: JobsWriter,
    gateway: ThisGateway,
    job_id: JobId,
    change: JobChange,
    whose: Whose = "",
) -> JobObject:
    """Changes a job's lane or deadline, waiting or running, or its start until a worker has claimed
    it; 409 if it is too late."""
    broker, tenant = gateway.broker, caller.tenant_of(whose, may_be_all=False)
    await check_may_change(broker, caller, job_id, tenant)
    if change.lane is not None:
        view, _ = await broker.read(job_id, tenant)
        caller.check_lane(change.lane)
        if (card := (await broker.known.models()).get(view.job.model)) is not None:
            check_lane(card, change.lane)
    check_start(change.start_at)
    found = await broker.reprioritise(
        job_id,
        tenant,
        lane=change.lane or "",
        deadline_s=change.deadline_s,
        start_at_s=change.start_at,
    )
    if found is Verdict.RUNNING:
        message = "start_at: a worker has claimed the job before"
        raise ApiError(409, "already_started", message, param="start_at", headers=NO_RETRY)
    if found is not Verdict.OK:
        raise _already_terminal(JobStatus(found))
    view, _ = await broker.read(job_id, tenant)
    return job_object(view, wait=await broker.worker_wait(view.job, view.status))


def _already_terminal(status: JobStatus) -> ApiError:
    message = f"the job has ended before: {status}"
    return ApiError(409, "already_terminal", message, headers=NO_RETRY)


async def prepare_job(
    gateway: Gateway, asked: AnyJob, caller: Caller, *, idempotency_key: str, body_hash: str
) -> tuple[Job, Submission]:
    """Raises ApiError. Parameters of the inner body are named below `body`."""
    settings = gateway.settings
    endpoint = Endpoint(asked.endpoint)
    job = caller.job(endpoint, asked.body, asked.lane or "")
    submission = caller.submission(
        deadline_s=asked.deadline_s or settings.job_deadline_s,
        start_at_s=check_start(asked.start_at),
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
            return await prepare_response(gateway, asked.body, job, submission)
        return await prepare_call(gateway, asked.body, job, submission)
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


_Time = Annotated[float, Query(ge=0, le=10**11, description="Unix seconds; 0: any")]


class JobList(Page):
    data: list[JobObject]


class DeletedJob(BaseModel):
    id: str
    object: Literal["job"] = "job"
    deleted: Literal[True] = True


def metadata_beside(parameters: str) -> Callable[[Request], Awaitable[dict[str, str]]]:
    """Reads the metadata filters of a query, which has only these parameters beside them."""

    async def metadata_of(request: Request) -> dict[str, str]:
        """Raises ApiError for an unknown or repeated parameter, and for more filters than a job has
        metadata."""
        seen = set[str]()
        metadata: dict[str, str] = {}
        for name, value in request.query_params.multi_items():
            if name in seen:
                raise invalid_value(name[:80], f"{name[:80]} appears twice")
            seen.add(name)
            if match := _METADATA.fullmatch(name):
                metadata[match[1]] = value
                if len(metadata) > _MAX_FILTERS:
                    raise invalid_value("metadata", f"metadata: at most {_MAX_FILTERS} filters")
            elif name not in parameters.split():
                raise bad_request("unknown_parameter", f"unknown parameter: {name[:80]}", name[:80])
        return metadata

    return metadata_of


@router.get("/v1/jobs", openapi_extra=METADATA_QUERY)
async def list_jobs(
    caller: JobsReader,
    gateway: ThisGateway,
    metadata: Annotated[dict[str, str], Depends(metadata_beside(_PARAMETERS))],
    status: Annotated[JobState | None, Query()] = None,
    lane: str = "",
    model: str = "",
    error_code: str = "",
    created_after: _Time = 0,
    created_before: _Time = 0,
    tenant: Annotated[
        str, Query(description="for the scope `admin`: another tenant, or `*` for all")
    ] = "",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str, Query(description="the `last_id` of the page before")] = "",
) -> JobList:
    """A page of the tenant's jobs, youngest first, without results."""
    broker = gateway.broker
    if lane:
        await check_is_lane(gateway, lane)
    wanted = Wanted(
        statuses=PUBLIC_STATUSES[status] if status else frozenset(),
        lanes=frozenset([lane] if lane else []),
        model=model,
        error_code=error_code,
        created_after_ms=round(created_after * 1000),
        created_before_ms=round(created_before * 1000),
        metadata=metadata,
    )
    of_tenant = caller.tenant_of(tenant, may_be_all=True)
    await broker.sweep()
    try:
        start = checked_id(after) if after else ""
        page = await broker.list_jobs(of_tenant, wanted, after=start, max_jobs=limit)
    except UnknownJob:
        message = "after is no job that is kept here: start at the first page"
        raise invalid_value("after", message) from None
    waiting = {view.job.model: view for view in page.views if view.status is JobStatus.QUEUED}
    waits = {m: await broker.worker_wait(view.job, view.status) for m, view in waiting.items()}
    jobs = [
        job_object(view, wait=waits[view.job.model] if view.status is JobStatus.QUEUED else None)
        for view in page.views
    ]
    return JobList(
        data=jobs,
        first_id=jobs[0].id if jobs else None,
        # If few jobs match, the search may have ended after the last match.
        last_id=page.position or (jobs[-1].id if jobs else None),
        has_more=bool(page.position),
    )


@router.delete("/v1/jobs/{job_id}", responses=answers(404, 409))
async def delete_job(caller: JobsWriter, gateway: ThisGateway, job_id: JobId) -> DeletedJob:
    """Deletes an ended job with its prompt, output and log; 409 if it has not ended."""
    await check_may_change(gateway.broker, caller, job_id)
    if await delete_whole(gateway.broker, job_id, caller.tenant) is not None:
        message = "the job has not ended: cancel it first"
        raise ApiError(409, "not_terminal", message, headers=NO_RETRY)
    return DeletedJob(id=job_id)


class Refusal(BaseModel):
    status: int
    code: str
    message: str
    retry_after_s: float | None


class QuoteObject(BaseModel):
    object: Literal["quote"] = "quote"
    endpoint: EndpointPath
    model: str
    lane: str
    prompt_tokens: int
    predicted_cached_tokens: int
    predicted_output_tokens: int
    position: int | None
    eta_s: float | None
    run_s: float | None
    finished_at: UnixSeconds | None
    is_admitted: bool
    refusal: Refusal | None


@router.post("/v1/quote", responses=answers(404, 415))
async def quote_job(
    caller: Inference,
    gateway: ThisGateway,
    asked: AskedJob,
    response: Response,
) -> QuoteObject:
    """Answers as `POST /v1/jobs` would for the same body."""
    job, submission = await prepare_job(gateway, asked, caller, idempotency_key="", body_hash="")
    quote = await gateway.broker.quote(job, submission)
    response.headers.update(rate_headers(quote.rates))
    if job.flow is not None and quote.refusal is None:
        quote = await quote_first_calls(gateway, job, submission)
    return _shown(job, quote)


def _shown(job: Job, quote: Quote) -> QuoteObject:
    wait_s, run_s = quote.position.eta_s, quote.service_s
    finished_at = None
    if wait_s is not None and run_s is not None:
        finished_at = round(time.time() + wait_s + run_s, 1)
    num_prompt = job.num_prompt_tokens
    return QuoteObject(
        endpoint=job.endpoint.value,
        model=job.named_model,
        lane=job.lane,
        prompt_tokens=num_prompt,
        predicted_cached_tokens=quote.num_cached_tokens,
        predicted_output_tokens=quote.cost_tokens - num_prompt,
        **place(quote.position),
        run_s=None if run_s is None else round(run_s, 1),
        finished_at=finished_at,
        is_admitted=quote.refusal is None,
        refusal=_refusal(quote),
    )


def _refusal(quote: Quote) -> Refusal | None:
    if quote.refusal is None:
        return None
    error = to_api_error(quote.refusal)
    return Refusal(
        status=error.status,
        code=error.code,
        message=error.message,
        retry_after_s=quote.refusal.retry_after_s,
    )
