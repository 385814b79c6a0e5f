"""GET /v1/callbacks/dead; GET /v1/callbacks/dead/{id}; POST /v1/callbacks/dead/{id}/replay."""

from typing import Annotated, Any, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, ValidationError
from starlette.responses import Response

from contract.callbacks import OutboxState
from contract.outbox import DeadLetter
from gateway.http.auth import JobsReader, JobsWriter
from gateway.http.errors import ApiError, invalid_value, not_found
from gateway.http.routing import Route
from gateway.jobs.job_objects import checked_id
from gateway.openai.sync_answers import gateway_of, json_response

router = APIRouter(route_class=Route)


class _Asked(BaseModel):
    """The query of a page."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    before: Annotated[float | None, Field(ge=0, lt=2**40)] = None

    @classmethod
    def by(cls, request: Request) -> Self:
        """Raises ApiError."""
        try:
            return cls.model_validate(dict(request.query_params))
        except ValidationError as exc:
            first = exc.errors(include_input=False, include_url=False)[0]
            raise invalid_value(str(first["loc"][-1]), first["msg"]) from None


@router.get("/v1/callbacks/dead")
async def list_dead_letters(request: Request, caller: JobsReader) -> Response:
    """The caller's messages that were given up, the youngest first."""
    asked = _Asked.by(request)
    before_ms = None if asked.before is None else round(asked.before * 1000)
    broker = gateway_of(request).broker
    letters = await broker.ask_outbox(
        lambda outbox: outbox.dead(caller.tenant, limit=asked.limit, before_ms=before_ms)
    )
    return json_response({"object": "list", "data": [_shown(letter) for letter in letters]})


@router.get("/v1/callbacks/dead/{job_id}")
async def get_dead_letter(request: Request, caller: JobsReader, job_id: str) -> Response:
    """The message of one job that was given up."""
    broker = gateway_of(request).broker
    job_id = checked_id(job_id)
    letters = await broker.ask_outbox(lambda outbox: outbox.dead(caller.tenant, job_id=job_id))
    if not letters:
        raise _unknown()
    return json_response(_shown(letters[0]))


@router.post("/v1/callbacks/dead/{job_id}/replay")
async def replay_dead_letter(request: Request, caller: JobsWriter, job_id: str) -> Response:
    """Delivers it again, from the first attempt on, with the same id; 202."""
    broker = gateway_of(request).broker
    job_id = checked_id(job_id)
    if caller.terms.lanes:
        letters = await broker.ask_outbox(lambda outbox: outbox.dead(caller.tenant, job_id=job_id))
        for letter in letters:  # one, or none: then there is nothing to replay
            caller.check_lane(letter.record.lane)
    state = await broker.ask_outbox(lambda outbox: outbox.replay(job_id, caller.tenant))
    if state is None:
        raise _unknown()
    if state is OutboxState.DELIVERED:
        raise ApiError(409, "already_delivered", "the callback was delivered before")
    return json_response({"id": job_id, "object": "callback", "state": state}, status=202)


def _unknown() -> ApiError:
    return not_found("this callback", "callback_not_found")


def _shown(letter: DeadLetter) -> dict[str, Any]:
    """Never the callback itself: a URL may hold a secret."""
    record = letter.record
    return {
        "id": record.job_id,
        "object": "callback",
        "state": record.state,
        "message_id": record.message_id,
        "type": record.kind.event_type,
        "attempts": record.attempt,
        "last_error": record.note,
        "happened_at": record.at_ms / 1000,
        "died_at": letter.died_ms / 1000,
    }
