"""GET /metrics: the whole fleet as Redis has it, and this gateway, for Prometheus."""

from collections.abc import Mapping

from fastapi import APIRouter, Request
from starlette.responses import Response

from contract.errors import BrokerUnavailable
from contract.glance import Glance
from gateway.auth import MetricsReader
from gateway.calls import gateway_of
from gateway.routing import Route

router = APIRouter(route_class=Route)


@router.get("/metrics")
async def metrics(request: Request, _caller: MetricsReader) -> Response:
    """Counts of jobs are the same on every gateway: take their maximum, not their sum."""
    gateway = gateway_of(request)
    known = gateway.broker.known
    glances: Mapping[str, Glance] | None
    try:
        glances = await known.glances()
    except BrokerUnavailable:
        glances = None
    from gateway.metrics_page import CONTENT_TYPE, metrics_page  # functions start without it

    content = metrics_page(gateway.metrics, glances, known.num_unreadable)
    return Response(content, media_type=CONTENT_TYPE)
