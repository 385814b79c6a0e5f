"""POST and GET /v1/batches; GET and PATCH /v1/batches/{id}; POST /v1/batches/{id}/cancel."""

import re
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from contract.batches import MAX_OPEN, Batch, BatchesFull, BatchStatus, NewBatch, new_batch_id
from contract.jobs import Endpoint
from gateway.files import check_quota, store_of, tenant_quota
from gateway.follow.answer_models import EndpointPath, OutputDetails, Page
from gateway.http.errors import NO_RETRY, ApiError, invalid_value, not_found
from gateway.http.handlers import answers
from gateway.prepare.admission import JobsReader, JobsSubmitter, JobsWriter
from gateway.prepare.job_bodies import CallbackBody, StartAt, check_start, to_callback
from gateway.prepare.unsupported import Metadata, OwnModel
from gateway.routes.files import ExpiresAfter, known_file
from gateway.routes.requests import GuardedRoute
from gateway.state import AcceptingGateway, ThisGateway

router = APIRouter(route_class=GuardedRoute, tags=["batches"], responses=answers(401, 403, 429))

_BATCH_ID = re.compile(r"batch_([0-9]{1,4}-)?[0-9a-f]{32}")
_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_MAX_WINDOW_S = 30 * 86_400


class BatchBody(OwnModel):
    """POST /v1/batches."""

    input_file_id: str = Field(max_length=64, description="a file with the purpose `batch`")
    endpoint: EndpointPath = Field(description="that of all lines")
    completion_window: str = Field(
        pattern=r"^[1-9][0-9]{0,6}[smhd]$",
        description="`24h`, `90m`, `7d` …, up to 30 days; then what has not ended is expired",
    )
    start_at: StartAt = Field(
        None,
        description="of batchway: Unix seconds before which no line runs, from which the window "
        "counts; at most 30 days ahead",
    )
    metadata: Metadata | None = Field(None, description="names of up to 64 characters")
    output_expires_after: ExpiresAfter | None = Field(None, description="lifetime of the results")
    callback: CallbackBody | None = Field(None, description="of batchway: told of the batch's end")


class BatchChange(OwnModel):
    """PATCH /v1/batches/{id}."""

    start_at: float = Field(ge=0, le=10**11, description="Unix seconds, the past for now")


class BatchError(BaseModel):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class CachedTokens(BaseModel):
    cached_tokens: int


class BatchUsage(BaseModel):
    """Tokens of the requests that completed."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class BatchObject(BaseModel):
    """OpenAI's batch object, with `start_at`."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: EndpointPath
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    start_at: int | None
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchList(Page):
    data: list[BatchObject]


def batch_object(batch: Batch) -> BatchObject:
    errors = [BatchError(**msgspec.structs.asdict(error)) for error in batch.errors]
    metadata = batch.asked.metadata
    return BatchObject(
        id=batch.id,
        endpoint=batch.asked.endpoint.value,
        model=batch.model or None,
        errors=BatchErrors(data=errors) if errors else None,
        input_file_id=batch.asked.input_file_id,
        completion_window=batch.asked.completion_window,
        status=batch.status,
        output_file_id=batch.output_file_id,
        error_file_id=batch.error_file_id,
        created_at=batch.created_ms // 1000,
        start_at=_seconds(batch.start_ms),
        in_progress_at=_seconds(batch.in_progress_ms),
        expires_at=batch.expires_ms // 1000,
        finalizing_at=_seconds(batch.finalizing_ms),
        completed_at=_seconds(batch.completed_ms),
        failed_at=_seconds(batch.failed_ms),
        expired_at=_seconds(batch.expired_ms),
        cancelling_at=_seconds(batch.cancelling_ms),
        cancelled_at=_seconds(batch.cancelled_ms),
        request_counts=RequestCounts(
            total=batch.total, completed=batch.completed, failed=batch.failed
        ),
        usage=BatchUsage(
            input_tokens=batch.input_tokens,
            input_tokens_details=CachedTokens(cached_tokens=batch.cached_tokens),
            output_tokens=batch.output_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=batch.reasoning_tokens),
            total_tokens=batch.input_tokens + batch.output_tokens,
        ),
        metadata=None if metadata is None else dict(metadata),
    )


def _seconds(time_ms: int | None) -> int | None:
    return None if time_ms is None else time_ms // 1000


@router.post("/v1/batches", responses=answers(404, 415))
async def create_batch(
    caller: JobsSubmitter, gateway: AcceptingGateway, body: BatchBody
) -> BatchObject:
    """Queues the requests of a file, each as a job in the lane `batch`."""
    window_s, start_at_s = _window_s(body.completion_window), check_start(body.start_at)
    store_of(gateway)
    await _check_fed(gateway)
    caller.check_lane("batch")
    await check_quota(gateway, caller.tenant)  # the results are files
    file = await known_file(gateway, caller, body.input_file_id)
    if file.purpose != "batch":
        message = f"input_file_id: the file's purpose is {file.purpose!r}, not 'batch'"
        raise invalid_value("input_file_id", message)
    if start_at_s * 1000 >= file.expires_ms:
        raise invalid_value("start_at", "start_at: the file expires before")
    callback = to_callback(body.callback, caller.tenant, gateway.settings)
    if callback is not None and (
        callback.is_full or callback.notifies_start or callback.progress_tokens
    ):
        message = "callback: a batch has one event, its end, without its results"
        raise invalid_value("callback", message)
    lifetime = body.output_expires_after
    asked = NewBatch(
        endpoint=Endpoint(body.endpoint),
        input_file_id=file.id,
        completion_window=body.completion_window,
        terms=caller.terms,
        metadata=body.metadata,
        output_lifetime_s=lifetime.seconds if lifetime else gateway.settings.file_lifetime_s,
    )
    shard = await gateway.broker.shards.home(caller.tenant)
    batch_id = new_batch_id(shard.number)
    terms: Any = {"window_s": window_s, "start_at_s": start_at_s, "callback": callback}
    try:
        await shard.ask("batch", shard.batches.add, batch_id, asked, **terms)
    except BatchesFull:
        message = f"{MAX_OPEN} batches of this tenant have not ended, and no more may be open"
        raise tenant_quota(message) from None
    return await _shown(gateway, caller.tenant, batch_id)


def _window_s(window: str) -> int:
    """Raises ApiError."""
    seconds = int(window[:-1]) * _UNITS_S[window[-1]]
    if seconds > _MAX_WINDOW_S:
        days = _MAX_WINDOW_S // 86_400
        raise invalid_value("completion_window", f"completion_window may be at most {days} days")
    return seconds


async def _check_fed(gateway: ThisGateway) -> None:
    """Raises ApiError (503) if nobody would run the batch."""
    if gateway.settings.feeds_batches:
        return
    first = gateway.broker.shards.first
    if not await first.ask("batch", first.batches.are_fed):
        message = (
            "no gateway that runs batches was alive within the last hour: an operator must act"
        )
        raise ApiError(503, "no_feeder", message, headers=NO_RETRY)


@router.get("/v1/batches")
async def list_batches(
    caller: JobsReader,
    gateway: ThisGateway,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str, Query(description="the `last_id` of the page before")] = "",
) -> BatchList:
    """A page of the tenant's batches, youngest first."""
    shard = await gateway.broker.shards.home(caller.tenant)
    terms: dict[str, Any] = {"after": after, "max_batches": limit + 1}
    found = await shard.ask("batch", shard.batches.page, caller.tenant, **terms)
    if found is None:
        message = "after is no batch that is kept here: start at the first page"
        raise invalid_value("after", message)
    return BatchList.of([batch_object(batch) for batch in found], limit)


@router.get("/v1/batches/{batch_id}", responses=answers(404))
async def get_batch(caller: JobsReader, gateway: ThisGateway, batch_id: str) -> BatchObject:
    """A batch's state, counts and files."""
    return await _shown(gateway, caller.tenant, batch_id)


@router.patch("/v1/batches/{batch_id}", responses=answers(404, 409, 415))
async def move_batch(
    caller: JobsWriter, gateway: ThisGateway, batch_id: str, change: BatchChange
) -> BatchObject:
    """Has a batch start earlier or later, with a window of the same length; 409 if it runs."""
    await _shown(gateway, caller.tenant, batch_id)
    shard, start_at_s = await gateway.broker.shards.of(batch_id), check_start(change.start_at)
    moved = await shard.ask("batch", shard.batches.move, batch_id, caller.tenant, start_at_s)
    if moved is False:
        message = "start_at: the batch has started, or ended"
        raise ApiError(409, "already_started", message, param="start_at", headers=NO_RETRY)
    return await _shown(gateway, caller.tenant, batch_id)


@router.post("/v1/batches/{batch_id}/cancel", responses=answers(404, 409))
async def cancel_batch(caller: JobsWriter, gateway: ThisGateway, batch_id: str) -> BatchObject:
    """Ends a batch with what is finished; 409 if it is ending or has ended otherwise."""
    await _shown(gateway, caller.tenant, batch_id)
    shard = await gateway.broker.shards.of(batch_id)
    status = await shard.ask("batch", shard.batches.cancel, batch_id, caller.tenant)
    if status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
        message = f"the batch cannot be cancelled any more: it is {status}"
        raise ApiError(409, "already_terminal", message, headers=NO_RETRY)
    return await _shown(gateway, caller.tenant, batch_id)


async def _shown(gateway: ThisGateway, tenant: str, batch_id: str) -> BatchObject:
    """Raises ApiError (404)."""
    found = None
    if _BATCH_ID.fullmatch(batch_id):
        shard = await gateway.broker.shards.of(batch_id)
        found = await shard.ask("batch", shard.batches.find, batch_id, tenant)
    if found is None:
        raise not_found("this batch", "batch_not_found")
    return batch_object(found)
