"""Serves a worker's metrics at `/metrics`: counts, no content.

Requests need no key, so the server listens on loopback only.
"""

import asyncio
import logging
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.registry import Collector

from contract.telemetry.families import counted_families
from contract.telemetry.metrics import Source
from workers.settings import WorkerSettings
from workers.supervisor.meter import Meter

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"


class MetricsUnservable(Exception):
    """The server cannot listen on its port."""


class _Counted(Collector):
    """Collects this worker's counts for each request."""

    def __init__(self, model: str, meter: Meter) -> None:
        self._model = model
        self._meter = meter

    def collect(self) -> Iterable[Metric]:
        # A copy, because the server runs in another thread.
        fields = {self._model: dict(self._meter.counts.fields)}
        return counted_families(fields, Source.ENGINES)


async def serve_metrics(settings: WorkerSettings, meter: Meter) -> None:
    """Serves until cancelled, if the settings name a port. Raises MetricsUnservable."""
    port = settings.metrics_port
    if port is None:
        await asyncio.Event().wait()
        return
    registry = CollectorRegistry()
    registry.register(_Counted(settings.served_model_name, meter))
    try:
        server, _ = start_http_server(port, _HOST, registry)
    except OSError as exc:
        raise MetricsUnservable(f"no metrics on {_HOST} port {port}: {exc.strerror}") from exc
    log.info("metrics on %s port %d", _HOST, port)
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
