"""GET /v1/callbacks/dead; GET /v1/callbacks/dead/{id}; POST /v1/callbacks/dead/{id}/replay."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel

from contract.callbacks import OutboxState
from contract.outbox import DeadLetter
from gateway.follow.job_objects import JobId, UnixSeconds
from gateway.http.errors import ApiError, not_found
from gateway.http.handlers import answers
from gateway.prepare.admission import JobsReader, JobsWriter
from gateway.routes.requests import GuardedRoute
from gateway.state import ThisGateway

router = APIRouter(route_class=GuardedRoute, tags=["callbacks"], responses=answers(401, 403, 429))


class DeadCallback(BaseModel):
    """A callback message that could not be delivered. Excludes the callback, whose URL may contain
    a secret."""

    id: str  # id of the job
    object: Literal["callback"] = "callback"
    state: str
    message_id: str
    type: str
    attempts: int
    last_error: str
    happened_at: UnixSeconds
    died_at: UnixSeconds


class DeadCallbacks(BaseModel):
    object: Literal["list"] = "list"
    data: list[DeadCallback]


class ReplayedCallback(BaseModel):
    id: str
    object: Literal["callback"] = "callback"
    state: str


@router.get("/v1/callbacks/dead")
async def list_dead_letters(
    caller: JobsReader,
    gateway: ThisGateway,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    before: Annotated[float | None, Query(ge=0, lt=2**40, description="Unix seconds")] = None,
) -> DeadCallbacks:
    """The tenant's undelivered callback messages, youngest first."""
    before_ms = None if before is None else round(before * 1000)
    shard = await gateway.broker.shards.home(caller.tenant)
    letters = await shard.call(shard.outbox.dead, caller.tenant, limit=limit, before_ms=before_ms)
    return DeadCallbacks(data=[_shown(letter) for letter in letters])


@router.get("/v1/callbacks/dead/{job_id}", responses=answers(404))
async def get_dead_letter(caller: JobsReader, gateway: ThisGateway, job_id: JobId) -> DeadCallback:
    """One job's undelivered callback message."""
    shard = await gateway.broker.shards.of(job_id)
    letters = await shard.call(shard.outbox.dead, caller.tenant, job_id=job_id)
    if not letters:
        raise _unknown()
    return _shown(letters[0])


@router.post("/v1/callbacks/dead/{job_id}/replay", status_code=202, responses=answers(404, 409))
async def replay_dead_letter(
    caller: JobsWriter, gateway: ThisGateway, job_id: JobId
) -> ReplayedCallback:
    """Delivers the message again, with the same id and a new count of attempts; 202."""
    shard = await gateway.broker.shards.of(job_id)
    if caller.terms.lanes:
        letters = await shard.call(shard.outbox.dead, caller.tenant, job_id=job_id)
        for letter in letters:  # one if the job has an undelivered message, else none
            caller.check_lane(letter.record.lane)
    state = await shard.call(shard.outbox.replay, job_id, caller.tenant)
    if state is None:
        raise _unknown()
    if state is OutboxState.DELIVERED:
        raise ApiError(409, "already_delivered", "the callback was delivered before")
    return ReplayedCallback(id=job_id, state=state)


def _unknown() -> ApiError:
    return not_found("this callback", "callback_not_found")


def _shown(letter: DeadLetter) -> DeadCallback:
    record = letter.record
    return DeadCallback(
        id=record.job_id,
        state=record.state,
        message_id=record.message_id,
        type=record.kind.event_type,
        attempts=record.attempt,
        last_error=record.note,
        happened_at=record.at_ms / 1000,
        died_at=letter.died_ms / 1000,
    )
