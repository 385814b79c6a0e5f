"""GET /livez, /readyz and /health, which need no key and reveal nothing confidential; GET /metrics:
the metrics of the fleet, read from Redis, and of this gateway, for Prometheus."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import PlainTextResponse, Response

from contract.errors import BrokerUnavailable, CommandDenied
from gateway.follow.fleet import families
from gateway.http.handlers import answers
from gateway.http.sse import json_response
from gateway.prepare.admission import MetricsReader
from gateway.routes.requests import GuardedRoute, open_to_all
from gateway.state import Gateway, ThisGateway

router = APIRouter(route_class=GuardedRoute, tags=["health"], responses=answers())


class Alive(BaseModel):
    status: Literal["alive"] = "alive"


class Ready(BaseModel):
    status: Literal["ready"]
    workers: dict[str, int]


class NotReady(BaseModel):
    status: Literal["unavailable", "draining"]
    missing: Literal["redis", "models", "model", "workers", "draining"]
    reason: str | None = None


_NOT_READY = "No capacity now"


@router.get("/livez")
@open_to_all
async def livez() -> Alive:
    """200 while the process can answer."""
    return Alive()


@router.get(
    "/readyz",
    response_model=Ready,
    responses={503: {"model": NotReady, "description": _NOT_READY}},
)
@open_to_all
async def readyz(gateway: ThisGateway, model: str = "") -> Response:
    """200 if at least one model, or the one that is asked for, has a live worker, else 503 with the
    reason."""
    return await _readiness(gateway, model)


@router.get(
    "/health", response_class=Response, responses={503: {"model": None, "description": _NOT_READY}}
)
@router.get("/ping", response_class=Response, include_in_schema=False)
@router.post("/ping", response_class=Response, include_in_schema=False)
@open_to_all
async def health(gateway: ThisGateway) -> Response:
    """The status of /readyz without a body; vLLM's load generator asks for it."""
    return Response(status_code=(await _readiness(gateway)).status_code)


async def _readiness(gateway: Gateway, asked: str = "") -> Response:
    if gateway.drain.has_begun:
        return _not_ready("draining")
    try:
        known = gateway.broker.known
        served = [card.name for card in (await known.models()).values() if card.flow is None]
        models = dict.fromkeys([*served, *known.declared])
        num_workers = {name: await known.num_live_workers(name) for name in models}
        failures = await known.failures()
    except CommandDenied:
        reason = "Redis denies this gateway a command that it needs: its log says which"
        return _not_ready("redis", reason)
    except BrokerUnavailable as exc:
        return _not_ready("redis", str(exc))
    if asked:
        if (failure := failures.get(asked)) is not None:
            return _not_ready("workers", failure.reason)
        if asked not in num_workers:
            return _not_ready("model")
        num_workers = {asked: num_workers[asked]}
    if not any(num_workers.values()):
        return _not_ready("workers" if models else "models")
    return json_response({"status": "ready", "workers": num_workers})


def _not_ready(missing: str, reason: str | None = None) -> Response:
    body = {"status": "draining" if missing == "draining" else "unavailable", "missing": missing}
    if reason is not None:
        body["reason"] = reason
    return json_response(body, status=503)


@router.get("/metrics", response_class=PlainTextResponse, responses=answers(401, 403, 429))
async def metrics(_caller: MetricsReader, gateway: ThisGateway) -> Response:
    """Counts of jobs are equal on every gateway: take their maximum, not their sum."""
    found, _ = await families(gateway)
    from contract.telemetry.families import CONTENT_TYPE, page

    return Response(page(found), media_type=CONTENT_TYPE)
