"""GET /metrics: the whole fleet as Redis has it, and this gateway, for Prometheus."""

from collections.abc import Mapping

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from contract.errors import BrokerUnavailable
from contract.fleet_snapshot import FleetSnapshot
from gateway.http.auth import MetricsReader
from gateway.http.handlers import answers
from gateway.jobs.streams import ThisGateway

router = APIRouter(tags=["health"])


@router.get("/metrics", response_class=PlainTextResponse, responses=answers(401, 403, 429))
async def metrics(_caller: MetricsReader, gateway: ThisGateway) -> Response:
    """Counts of jobs are the same on every gateway: take their maximum, not their sum."""
    known = gateway.broker.known
    snapshots: Mapping[str, FleetSnapshot] | None
    try:
        snapshots = await known.snapshots()
    except BrokerUnavailable:
        snapshots = None
    from gateway.http.metrics_page import CONTENT_TYPE, metrics_page  # functions start without it

    content = metrics_page(gateway.metrics, snapshots, known.num_unreadable)
    return Response(content, media_type=CONTENT_TYPE)
