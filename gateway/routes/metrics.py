"""GET /metrics: the whole fleet as Redis has it, and this gateway, for Prometheus."""

from collections.abc import Mapping

from fastapi import APIRouter, Request
from prometheus_client.core import GaugeMetricFamily
from starlette.responses import Response

from contract.errors import BrokerUnavailable
from contract.glance import Glance
from gateway.auth import MetricsReader
from gateway.calls import gateway_of
from telemetry.families import counted_families, fleet_families
from telemetry.metrics import METRICS, Source
from telemetry.text import CONTENT_TYPE, page

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request, _caller: MetricsReader) -> Response:
    """Counts of jobs are the same on every gateway: take their maximum, not their sum."""
    gateway = gateway_of(request)
    glances: Mapping[str, Glance] | None
    try:
        glances = await gateway.broker.known.glances()
    except BrokerUnavailable:
        glances = None
    families = [*gateway.metrics.families(), _broker_up(glances is not None)]
    if glances is not None:
        totals = {model: glance.totals for model, glance in glances.items()}
        families += counted_families(totals, Source.JOBS, Source.ENGINES)
        families += fleet_families(glances)
    return Response(page(families), media_type=CONTENT_TYPE)


def _broker_up(is_up: bool) -> GaugeMetricFamily:
    metric = METRICS["broker_up"]
    return GaugeMetricFamily(metric.full_name, metric.help, value=int(is_up))
