"""Operations on many jobs by filter: POST /v1/jobs/cancel, /v1/jobs/replay and
/v1/callbacks/dead/replay; GET /v1/operations; GET and POST …/cancel of one."""

import re
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Depends, Path
from pydantic import BaseModel, Field, model_validator

from contract import operation_parts
from contract.api_keys import Scope
from contract.function_types import TenantLimits, Wanted
from contract.jobs import PUBLIC_STATUSES
from contract.keys import in_partition
from contract.operations import (
    MAX_OPEN,
    Operation,
    OperationKind,
    OperationsFull,
    OperationState,
    new_operation_id,
)
from gateway.files import tenant_quota
from gateway.follow.job_objects import UnixSeconds
from gateway.http.errors import MISSING, NO_RETRY, ApiError, not_found, readable
from gateway.http.handlers import answers
from gateway.prepare.admission import ALL_TENANTS, Caller, JobsReader, JobsSubmitter, JobsWriter
from gateway.prepare.calls import check_is_lane
from gateway.prepare.unsupported import Metadata, OwnModel, refusal
from gateway.routes.requests import GuardedRoute
from gateway.runners.operations import work
from gateway.state import Gateway, ThisGateway

router = APIRouter(route_class=GuardedRoute, tags=["operations"], responses=answers(401, 403, 429))

_ID = re.compile(r"op-([0-9]{1,4}-)?[0-9a-f]{32}")
_Name = Annotated[str | None, Field(min_length=1, max_length=256)]
_Time = Annotated[float | None, Field(ge=0, le=10**11)]


class FilterBody(OwnModel):
    """Which jobs are meant: at least one filter, all must match."""

    lane: _Name = Field(None, description="only this lane")
    model: _Name = Field(None, description="only this model")
    error_code: _Name = Field(None, description="only jobs that failed with it")
    created_after: _Time = Field(None, description="Unix seconds")
    created_before: _Time = Field(None, description="Unix seconds")
    metadata: Metadata | None = Field(None, description="only jobs with these values")
    tenant: _Name = Field(None, description="with the scope `admin` another tenant, or `*` for all")

    @model_validator(mode="after")
    def _filters(self) -> Self:
        if all(value is None for _, value in self):
            raise refusal("give at least one filter: `tenant` means all of a tenant", None, MISSING)
        return self


class CancelBody(FilterBody):
    status: Literal["queued", "running"] | None = Field(None, description="default: both")


class ReplayBody(FilterBody):
    status: Literal["failed", "expired", "cancelled"] | None = Field(
        None, description="default: `failed`"
    )


class CallbacksBody(FilterBody):
    status: Literal["succeeded", "failed", "expired", "cancelled"] | None = Field(
        None, description="the end that is reported; default: all"
    )


class OperationObject(BaseModel):
    """`failed` counts jobs that cannot be replayed: their record is gone, or they are refused."""

    id: str
    object: Literal["operation"] = "operation"
    kind: OperationKind
    status: OperationState
    tenant: str = Field(description="whose jobs; `*`: all tenants'")
    matched: int
    done: int
    failed: int
    created_at: UnixSeconds
    finished_at: UnixSeconds | None


class OperationList(BaseModel):
    object: Literal["list"] = "list"
    data: list[OperationObject]


@router.post("/v1/jobs/cancel", status_code=202, responses=answers(415))
async def cancel_jobs(
    caller: JobsWriter, gateway: ThisGateway, asked: CancelBody
) -> OperationObject:
    """Cancels waiting and running jobs; 202 with an operation."""
    return await _begin(gateway, caller, OperationKind.CANCEL, asked, asked.status)


@router.post("/v1/jobs/replay", status_code=202, responses=answers(415))
async def replay_jobs(
    caller: JobsSubmitter, gateway: ThisGateway, asked: ReplayBody
) -> OperationObject:
    """Submits ended jobs again, each once, as new jobs; 202 with an operation."""
    status = asked.status or "failed"
    return await _begin(gateway, caller, OperationKind.REPLAY, asked, status)


@router.post("/v1/callbacks/dead/replay", status_code=202, responses=answers(415))
async def replay_callbacks(
    caller: JobsWriter, gateway: ThisGateway, asked: CallbacksBody
) -> OperationObject:
    """Delivers undelivered callbacks again, with the same ids; 202 with an operation."""
    return await _begin(gateway, caller, OperationKind.REPLAY_CALLBACKS, asked, asked.status)


async def _begin(
    gateway: Gateway, caller: Caller, kind: OperationKind, asked: FilterBody, status: str | None
) -> OperationObject:
    """Raises ApiError."""
    may_be_all = kind is not OperationKind.REPLAY_CALLBACKS  # no list of their tenants is kept
    tenant = caller.tenant_of(asked.tenant or "", may_be_all=may_be_all)
    if asked.lane is not None:
        await check_is_lane(gateway, asked.lane)
        caller.check_lane(asked.lane)
    wanted = Wanted(
        statuses=PUBLIC_STATUSES[status] if status else frozenset(),
        lanes=frozenset(caller.terms.lanes if asked.lane is None else [asked.lane]),
        model=asked.model or "",
        error_code=asked.error_code or "",
        created_after_ms=round((asked.created_after or 0) * 1000),
        created_before_ms=round((asked.created_before or 0) * 1000),
        metadata=asked.metadata or {},
    )
    limits = TenantLimits() if caller.has(Scope.ADMIN) else caller.limits
    terms: dict[str, Any] = {"owner": caller.tenant, "tenant": tenant, "limits": limits}
    shards, new_id = gateway.broker.shards, new_operation_id()
    try:
        with readable("operation"):
            operation_id = await operation_parts.add(shards, new_id, kind, wanted, **terms)
    except OperationsFull:
        message = f"{MAX_OPEN} operations of this tenant have not ended, and no more may be open"
        raise tenant_quota(message) from None
    return _shown(await _found(gateway, caller, operation_id))


async def operation_id_of(
    operation_id: Annotated[str, Path(json_schema_extra={"pattern": f"^{_ID.pattern}$"})],
) -> str:
    if not _ID.fullmatch(operation_id):
        raise _unknown()
    return operation_id


OperationId = Annotated[str, Depends(operation_id_of)]


@router.get("/v1/operations")
async def list_operations(caller: JobsReader, gateway: ThisGateway) -> OperationList:
    """The tenant's operations of the last week, at most 100, youngest first."""
    with readable("operation"):
        found = await operation_parts.of_owner(gateway.broker.shards, caller.tenant)
    return OperationList(data=[_shown(each) for each in found])


@router.get("/v1/operations/{operation_id}", responses=answers(404))
async def get_operation(
    caller: JobsReader, gateway: ThisGateway, operation_id: OperationId
) -> OperationObject:
    """An operation's state and counts."""
    found = await _found(gateway, caller, operation_id)
    if found.state is OperationState.RUNNING and not gateway.settings.feeds_batches:
        # A function on Lambda works only while it answers.
        for shard in await gateway.broker.shards.of_list(found.tenant):
            await work(gateway, shard, in_partition(operation_id, shard.number))
        found = await _found(gateway, caller, operation_id)
    return _shown(found)


@router.post("/v1/operations/{operation_id}/cancel", responses=answers(404, 409))
async def stop_operation(
    caller: JobsWriter, gateway: ThisGateway, operation_id: OperationId
) -> OperationObject:
    """Ends an operation where it is; 409 if it has ended otherwise."""
    await _found(gateway, caller, operation_id)
    with readable("operation"):
        state = await operation_parts.stop(gateway.broker.shards, operation_id)
    if state is not None and state is not OperationState.CANCELLED:
        message = f"the operation has ended before: {state}"
        raise ApiError(409, "already_terminal", message, headers=NO_RETRY)
    return _shown(await _found(gateway, caller, operation_id))


async def _found(gateway: Gateway, caller: Caller, operation_id: str) -> Operation:
    """Raises ApiError (404) also for another tenant's, but for an admin."""
    with readable("operation"):
        found = await operation_parts.find(gateway.broker.shards, operation_id)
    if found is None or (found.owner != caller.tenant and not caller.has(Scope.ADMIN)):
        raise _unknown()
    return found


def _unknown() -> ApiError:
    return not_found("this operation", "operation_not_found")


def _shown(found: Operation) -> OperationObject:
    return OperationObject(
        id=found.id,
        kind=found.kind,
        status=found.state,
        tenant=found.tenant or ALL_TENANTS,
        matched=found.matched,
        done=found.done,
        failed=found.failed,
        created_at=found.created_ms / 1000,
        finished_at=None if found.finished_ms is None else found.finished_ms / 1000,
    )
