"""GET /metrics: the metrics of the fleet, read from Redis, and of this gateway, for Prometheus."""

from collections.abc import Mapping

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from contract.errors import BrokerUnavailable
from contract.fleet_snapshot import FleetSnapshot
from gateway.http.handlers import answers
from gateway.http.metrics import GatewayMetrics, Labels
from gateway.prepare.auth import MetricsReader
from gateway.state import ThisGateway

router = APIRouter(tags=["health"])


@router.get("/metrics", response_class=PlainTextResponse, responses=answers(401, 403, 429))
async def metrics(_caller: MetricsReader, gateway: ThisGateway) -> Response:
    """Counts of jobs are equal on every gateway: take their maximum, not their sum."""
    known = gateway.broker.known
    snapshots: Mapping[str, FleetSnapshot] | None
    try:
        snapshots = await known.snapshots()
        failures = await known.failures()
    except BrokerUnavailable:
        snapshots, failures = None, {}
    failed: dict[Labels, int] = {(model, failure.reason): 1 for model, failure in failures.items()}
    return _page(gateway.metrics, snapshots, known.num_unreadable, failed)


def _page(
    metrics: GatewayMetrics,
    snapshots: Mapping[str, FleetSnapshot] | None,
    num_unreadable: int,
    failed: Mapping[Labels, int],
) -> Response:
    """This gateway's counts, and the fleet's by model. `snapshots` is None while Redis is down.
    prometheus_client is imported here, so that Lambda functions start faster."""
    from contract.telemetry.families import (
        CONTENT_TYPE,
        counted_families,
        fleet_families,
        gateway_families,
        page,
    )
    from contract.telemetry.metrics import Source

    now: dict[str, Mapping[Labels, int]] = {
        "broker_up": {(): int(snapshots is not None)},
        "unreadable_models": {(): num_unreadable},
        "failed_models": failed,
    }
    families = [*gateway_families({**metrics.counts(), **now})]
    if snapshots is not None:
        totals = {model: snapshot.totals for model, snapshot in snapshots.items()}
        families += counted_families(totals, Source.JOBS, Source.ENGINES)
        families += fleet_families(snapshots)
    return Response(page(families), media_type=CONTENT_TYPE)
