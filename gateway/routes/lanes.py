"""What operators do with a fleet: POST /v1/lanes/pause and /v1/lanes/resume; GET /v1/lanes/paused;
POST /v1/workers/{id}/drain."""

from typing import Annotated, Literal, Self

from fastapi import APIRouter
from pydantic import BaseModel, Field, model_validator

from contract.api_keys import Scope
from contract.pauses import Pause, PausedBy, PausedByOperator, PauseLine, TooManyPauses
from gateway.files import tenant_quota
from gateway.follow.job_objects import UnixSeconds
from gateway.http.errors import MISSING, ApiError, no_such_model, not_found
from gateway.http.handlers import answers
from gateway.prepare.admission import Admin, Caller, JobsReader, JobsWriter
from gateway.prepare.calls import check_is_lane
from gateway.prepare.unsupported import OwnModel, refusal
from gateway.routes.requests import GuardedRoute
from gateway.state import Gateway, ThisGateway

router = APIRouter(route_class=GuardedRoute, tags=["lanes"], responses=answers(401, 403, 429))

Name = Annotated[str | None, Field(min_length=1, max_length=256, pattern=r"^[^\s*]+$")]


class PauseBody(OwnModel):
    """What to pause or to resume: at least one of these."""

    lane: Name = Field(None, description="only this lane")
    tenant: Name = Field(
        None, description="only this tenant; without the scope `admin` always the key's own"
    )
    model: Name = Field(None, description="only this model")

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if self.lane is None and self.tenant is None and self.model is None:
            raise refusal("give a lane, a tenant or a model", "lane", MISSING)
        return self


class PauseObject(BaseModel):
    """Null: all. `by`: `operator` or `tenant`, who may both end a tenant's pause."""

    object: Literal["pause"] = "pause"
    lane: str | None
    tenant: str | None
    model: str | None
    since: UnixSeconds
    by: PausedBy


class PauseList(BaseModel):
    object: Literal["list"] = "list"
    data: list[PauseObject]


class Resumed(BaseModel):
    object: Literal["pause"] = "pause"
    lane: str | None
    tenant: str | None
    model: str | None
    resumed: Literal[True] = True


class DrainedWorker(BaseModel):
    id: str
    object: Literal["worker"] = "worker"
    state: Literal["draining"] = "draining"


class NoFields(OwnModel):
    """An empty object."""


@router.post("/v1/lanes/pause", responses=answers(404, 415))
async def pause_lane(caller: JobsWriter, gateway: ThisGateway, asked: PauseBody) -> PauseObject:
    """Refuses new jobs with `lane_paused` and keeps the waiting ones in order; running ones go
    on."""
    line, by = _line(caller, asked)
    await _check_names(gateway, line)
    try:
        begun = await gateway.broker.shards.each(lambda shard: shard.pauses.pause(line, by))
    except TooManyPauses:
        raise tenant_quota("tenants may have no more pauses: resume one first") from None
    return _shown(begun[0])


@router.post("/v1/lanes/resume", responses=answers(404, 415))
async def resume_lane(caller: JobsWriter, gateway: ThisGateway, asked: PauseBody) -> Resumed:
    """Ends the pause of the same names; 404 if there is none."""
    line, by = _line(caller, asked)
    try:
        ended = await gateway.broker.shards.each(lambda shard: shard.pauses.resume(line, by))
    except PausedByOperator:
        message = "an operator has paused this: a key with the scope 'admin' can resume it"
        raise ApiError(403, "missing_scope", message) from None
    if not any(ended):
        raise not_found("this pause", "pause_not_found")
    lane, tenant, model = _names(line)
    return Resumed(lane=lane, tenant=tenant, model=model)


@router.get("/v1/lanes/paused")
async def list_pauses(caller: JobsReader, gateway: ThisGateway) -> PauseList:
    """What is paused, the oldest first: all for `admin`, else what holds the tenant's jobs."""
    first = gateway.broker.shards.first
    found = await first.call(first.pauses.all)
    is_admin = caller.has(Scope.ADMIN)
    own = [each for each in found if is_admin or each.line.tenant in ("", caller.tenant)]
    return PauseList(data=[_shown(each) for each in own])


@router.post("/v1/workers/{worker_id}/drain", responses=answers(404, 415))
async def drain_worker(
    _caller: Admin, gateway: ThisGateway, worker_id: str, _body: NoFields
) -> DrainedWorker:
    """Orders a worker to take no more jobs, to give back those that do not end in time, and to
    exit."""
    ordered = await gateway.broker.shards.each(lambda shard: shard.functions.drain([worker_id]))
    if not any(is_there for [is_there] in ordered):
        raise not_found(f"the worker {worker_id[:64]!r}", "worker_not_found")
    return DrainedWorker(id=worker_id)


def _line(caller: Caller, asked: PauseBody) -> tuple[PauseLine, PausedBy]:
    """What is meant, and by whom. Raises ApiError without the right to it."""
    line = PauseLine(asked.model or "", asked.lane or "", asked.tenant or "")
    if caller.has(Scope.ADMIN):
        return line, "operator"
    if line.tenant not in ("", caller.tenant):
        caller.check_scope(Scope.ADMIN)
    if caller.terms.lanes:
        caller.check_lane(line.lane)
    return PauseLine(line.model, line.lane, caller.tenant), "tenant"


async def _check_names(gateway: Gateway, line: PauseLine) -> None:
    """Raises ApiError for a lane or a model that does not exist: nothing would be paused."""
    if line.lane:
        await check_is_lane(gateway, line.lane)
    cards = await gateway.broker.known.models()
    if line.model and line.model not in cards:
        raise no_such_model(line.model, cards)


def _names(line: PauseLine) -> tuple[str | None, str | None, str | None]:
    return line.lane or None, line.tenant or None, line.model or None


def _shown(pause: Pause) -> PauseObject:
    lane, tenant, model = _names(pause.line)
    since = pause.since_ms / 1000
    return PauseObject(lane=lane, tenant=tenant, model=model, since=since, by=pause.by)
