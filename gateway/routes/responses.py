"""POST /v1/responses; GET, DELETE /v1/responses/{id}; POST …/cancel; GET …/input_items; POST
/v1/responses/input_tokens."""

import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from contract.api_keys import MIN_RETENTION_S, Scope
from contract.errors import BatchwayError
from contract.function_types import Submission
from contract.jobs import Endpoint, Job
from contract.response_events import ResponseRecord, decode_record, response_id
from gateway.follow.answer_models import (
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseObject,
)
from gateway.follow.members import cancel_whole, delete_whole
from gateway.follow.stored_responses import job_of_response, read_response, shown_response
from gateway.follow.streams import response_stream, whole_response
from gateway.follow.sync_call import SyncCall, TimeLimit
from gateway.http import sse
from gateway.http.bodies import unless_gone
from gateway.http.errors import UnknownJob, bad_request, invalid_value
from gateway.http.handlers import answers
from gateway.prepare.admission import Caller, Inference, JobsReader, JobsWriter
from gateway.prepare.next_turn import then_warmed
from gateway.prepare.response_bodies import InputTokensBody, ResponseBody
from gateway.prepare.response_jobs import prepare_response, to_messages
from gateway.prepare.unsupported import ignored_header
from gateway.routes.calls import (
    EVENTS,
    IdempotencyKey,
    answer_whole,
    begin,
    body_hash,
    check_may_change,
    ends_with_caller,
)
from gateway.routes.requests import GuardedRoute
from gateway.state import AcceptingGateway, Gateway, ThisGateway

log = logging.getLogger("batchway.gateway")

router = APIRouter(
    route_class=GuardedRoute, tags=["responses"], responses=answers(401, 403, 404, 429)
)

ResponseIdPath = Annotated[str, Path(json_schema_extra={"pattern": r"^resp_\d{1,4}-[0-9a-f]{32}$"})]


async def _prepared(
    request: Request, gateway: Gateway, caller: Caller, body: ResponseBody, key: str
) -> tuple[Job, Submission]:
    """Prepares a call. One in the background is a job like others; any other ends with its caller,
    unless the caller may come back with its Idempotency-Key. Raises ApiError."""
    settings = gateway.settings
    key = key if body.is_stored else ""  # a caller cannot return to a response that is not stored
    is_attended = not body.is_stored or ends_with_caller(body, key)
    submission = caller.submission(
        deadline_s=settings.job_deadline_s if body.background else settings.sync_deadline_s,
        retention_s=caller.job_retention_s(settings) if body.is_stored else MIN_RETENTION_S,
        attendance_s=settings.attendance_s if is_attended and not body.background else 0.0,
        needs_worker=not body.background,
        idempotency_key=key,
        body_hash=await body_hash(request, key, Endpoint.RESPONSES),
    )
    job = caller.job(Endpoint.RESPONSES, body)
    return await prepare_response(gateway, body, job, submission)


async def _stream(call: SyncCall, record: ResponseRecord) -> Response:
    async def events() -> AsyncGenerator[bytes, None]:
        stream = response_stream(
            call.gateway, call.job, record, after=-1, time_limit=call.time_limit, call=call
        )
        async with contextlib.aclosing(stream):
            async for part in stream:
                yield part
        await _forget_unstored(call, record)

    async def on_gone() -> None:
        await call.on_gone()
        await _forget_unstored(call, record)

    headers = call.headers | call.timing.headers()
    return await sse.sse_response(call.request, events(), headers=headers, on_gone=on_gone)


async def _forget_unstored(call: SyncCall, record: ResponseRecord) -> None:
    """Deletes a response with `store: false`. If that fails, its short retention ends it."""
    if record.is_stored:
        return
    job, broker = call.job, call.gateway.broker
    try:
        if await delete_whole(broker, job.id, job.tenant) is not None:
            await cancel_whole(broker, job)
            await delete_whole(broker, job.id, job.tenant)
    except UnknownJob:
        pass  # a client that leaves at the last event: forgotten already
    except BatchwayError as exc:
        log.warning("not forgotten yet (%s) job_id=%s", type(exc).__name__, job.id)


async def response_id_of(response_id: ResponseIdPath) -> str:
    """Raises ApiError for a malformed id, as for an unknown one."""
    job_of_response(response_id)
    return response_id


ResponseId = Annotated[str, Depends(response_id_of)]
Include = Annotated[
    list[str] | None, Query(alias="include", description="no effect: all there is is shown")
]


@router.post(
    "/v1/responses",
    response_model=ResponseObject,
    responses={200: EVENTS, **answers(409, 415, 504)},
)
async def create_response(
    request: Request,
    caller: Inference,
    gateway: AcceptingGateway,
    body: ResponseBody,
    key: IdempotencyKey = "",
) -> Response:
    """Answers items, whole, as a stream, or in the background."""
    if body.background:
        caller.check_scope(Scope.JOBS_WRITE)
    call = SyncCall(request, gateway, TimeLimit.of(request, gateway.settings))
    work = _prepared(request, gateway, caller, body, key)
    await begin(call, caller, *await unless_gone(request.receive, work))
    call.headers |= ignored_header(body)
    record = decode_record(await gateway.broker.payloads.response(call.job))
    if body.background and not body.stream:
        shown = await shown_response(gateway, response_id(call.job), caller.tenant)
        return sse.json_response(shown, headers=call.headers | call.timing.headers())
    with call.named_errors():
        if body.stream:
            answer = await _stream(call, record)
        else:
            try:
                answer = await answer_whole(call, whole_response(call, record))
            finally:
                await _forget_unstored(call, record)
        return then_warmed(answer, call, lambda: body.chat(to_messages(record.items)))


@router.post("/v1/responses/input_tokens", responses=answers(415))
async def count_input_tokens(
    request: Request,
    caller: Inference,
    gateway: ThisGateway,
    body: InputTokensBody,
) -> InputTokens:
    """The tokens that the model would be given, without a call of it."""
    job, _ = await _prepared(request, gateway, caller, body, "")
    return InputTokens(input_tokens=job.num_prompt_tokens)


@router.get("/v1/responses/{response_id}", response_model=ResponseObject, responses={200: EVENTS})
async def get_response(
    request: Request,
    caller: JobsReader,
    gateway: ThisGateway,
    response_id: ResponseId,
    stream: bool = False,
    starting_after: Annotated[
        int | None, Query(ge=0, lt=2**31, description="the sequence number after which to go on")
    ] = None,
    include: Include = None,
    include_obfuscation: Annotated[bool | None, Query(description="no effect")] = None,
) -> Response:
    """A response, or the stream of its events from any sequence number on, also after its end."""
    await gateway.broker.sweep()
    if not stream and starting_after is not None:
        raise invalid_value("starting_after", "starting_after is for stream=true")
    if not stream:
        return sse.json_response(await shown_response(gateway, response_id, caller.tenant))
    view, record = await read_response(gateway, response_id, caller.tenant)
    after = -1 if starting_after is None else starting_after
    time_limit = TimeLimit.of(request, gateway.settings)
    events = response_stream(gateway, view.job, record, after=after, time_limit=time_limit)
    headers = {"x-job-id": view.job.id}
    return await sse.sse_response(request, events, headers=headers)


@router.delete("/v1/responses/{response_id}")
async def delete_response(
    caller: JobsWriter, gateway: ThisGateway, response_id: ResponseId
) -> DeletedResponse:
    """Deletes a response, and ends it first if it runs. Responses that follow it keep its items."""
    view, _ = await read_response(gateway, response_id, caller.tenant)
    await check_may_change(gateway.broker, caller, view.job.id)
    if not view.is_terminal:
        await cancel_whole(gateway.broker, view.job)
    await delete_whole(gateway.broker, view.job.id, caller.tenant)
    return DeletedResponse(id=response_id)


@router.post(
    "/v1/responses/{response_id}/cancel", response_model=ResponseObject, responses=answers(409)
)
async def cancel_response(
    caller: JobsWriter, gateway: ThisGateway, response_id: ResponseId
) -> Response:
    """Ends a response in the background; one that has ended stays as it is."""
    view, record = await read_response(gateway, response_id, caller.tenant)
    if not record.is_background:
        message = "only a response with background: true can be cancelled: leave the others"
        raise bad_request("not_in_background", message)
    await check_may_change(gateway.broker, caller, view.job.id)
    if not view.is_terminal:
        await cancel_whole(gateway.broker, view.job)
    return sse.json_response(await shown_response(gateway, response_id, caller.tenant))


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    caller: JobsReader,
    gateway: ThisGateway,
    response_id: ResponseId,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str | None, Query(max_length=256, description="an item's id")] = None,
    include: Include = None,
) -> ItemList:
    """The items that the model was given, also those of earlier responses."""
    _, record = await read_response(gateway, response_id, caller.tenant)
    return ItemList.ordered(record.items, order, after, limit)
