"""GET /livez, /readyz, /health: no key asked for, nothing told that is worth one."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from contract.errors import BrokerUnavailable, BrokerUnfit, CommandDenied
from gateway.http.routing import Route
from gateway.jobs.streams import Gateway
from gateway.openai.sync_answers import gateway_of, json_response

router = APIRouter(route_class=Route)


@router.get("/livez")
async def livez(_: Request) -> Response:
    """200 while the process answers."""
    return json_response({"status": "alive"})


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """200 where at least one model has a live worker; else 503 with what is missing."""
    return await _readiness(gateway_of(request))


@router.get("/health")
async def health(request: Request) -> Response:
    """The status of /readyz without a body, as load generators for vLLM ask for it."""
    return Response(status_code=(await _readiness(gateway_of(request))).status_code)


async def _readiness(gateway: Gateway) -> Response:
    if gateway.drain.has_begun:
        return _not_ready("draining")
    try:
        models = await gateway.broker.known.models()
        num_workers = {name: await gateway.broker.known.num_live_workers(name) for name in models}
    except (BrokerUnavailable, CommandDenied) as exc:
        return _not_ready("redis", _reason(exc))
    if not any(num_workers.values()):
        return _not_ready("workers" if models else "models")
    return json_response({"status": "ready", "workers": num_workers})


def _reason(exc: BrokerUnavailable | CommandDenied) -> str | None:
    """What an operator must mend, if anything. What Redis denies is said in the log alone."""
    if isinstance(exc, CommandDenied):
        return "Redis denies this gateway a command that it needs: its log says which"
    return str(exc) if isinstance(exc, BrokerUnfit) else None


def _not_ready(missing: str, reason: str | None = None) -> Response:
    body = {"status": "draining" if missing == "draining" else "unavailable", "missing": missing}
    if reason is not None:
        body["reason"] = reason
    return json_response(body, status=503)
