"""GET /metrics: the whole fleet as Redis has it, and this gateway, for Prometheus."""

from collections.abc import Mapping

from fastapi import APIRouter, Request
from starlette.responses import Response

from contract.errors import BrokerUnavailable
from contract.fleet_snapshot import FleetSnapshot
from gateway.http.auth import MetricsReader
from gateway.http.routing import Route
from gateway.openai.sync_answers import gateway_of

router = APIRouter(route_class=Route)


@router.get("/metrics")
async def metrics(request: Request, _caller: MetricsReader) -> Response:
    """Counts of jobs are the same on every gateway: take their maximum, not their sum."""
    gateway = gateway_of(request)
    known = gateway.broker.known
    snapshots: Mapping[str, FleetSnapshot] | None
    try:
        snapshots = await known.snapshots()
    except BrokerUnavailable:
        snapshots = None
    from gateway.http.metrics_page import CONTENT_TYPE, metrics_page  # functions start without it

    content = metrics_page(gateway.metrics, snapshots, known.num_unreadable)
    return Response(content, media_type=CONTENT_TYPE)
