"""The page of `GET /metrics`. Loaded when it is first asked for, with Prometheus' client."""

from collections.abc import Mapping

from contract.glance import Glance
from gateway.metrics import GatewayMetrics, Labels
from telemetry.families import counted_families, fleet_families, gateway_families
from telemetry.metrics import Source
from telemetry.text import CONTENT_TYPE as CONTENT_TYPE
from telemetry.text import page


def metrics_page(
    metrics: GatewayMetrics, glances: Mapping[str, Glance] | None, num_unreadable: int
) -> bytes:
    """What the gateway counted of itself, and the fleet by model; None where Redis is away."""
    now: dict[str, Mapping[Labels, int]] = {
        "broker_up": {(): int(glances is not None)},
        "unreadable_models": {(): num_unreadable},
    }
    families = [*gateway_families({**metrics.counts(), **now})]
    if glances is not None:
        totals = {model: glance.totals for model, glance in glances.items()}
        families += counted_families(totals, Source.JOBS, Source.ENGINES)
        families += fleet_families(glances)
    return page(families)
