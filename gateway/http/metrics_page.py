"""The page of `GET /metrics`. Loaded when it is first asked for, with Prometheus' client."""

from collections.abc import Mapping

from contract.fleet_snapshot import FleetSnapshot
from contract.telemetry.families import CONTENT_TYPE as CONTENT_TYPE
from contract.telemetry.families import counted_families, fleet_families, gateway_families, page
from contract.telemetry.metrics import Source
from gateway.http.metrics import GatewayMetrics, Labels


def metrics_page(
    metrics: GatewayMetrics, snapshots: Mapping[str, FleetSnapshot] | None, num_unreadable: int
) -> bytes:
    """What the gateway counted of itself, and the fleet by model; None where Redis is away."""
    now: dict[str, Mapping[Labels, int]] = {
        "broker_up": {(): int(snapshots is not None)},
        "unreadable_models": {(): num_unreadable},
    }
    families = [*gateway_families({**metrics.counts(), **now})]
    if snapshots is not None:
        totals = {model: snapshot.totals for model, snapshot in snapshots.items()}
        families += counted_families(totals, Source.JOBS, Source.ENGINES)
        families += fleet_families(snapshots)
    return page(families)
