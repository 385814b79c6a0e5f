"""A worker's own page of metrics, `/metrics` on a port of its own. Counts, and no content.

It asks for no key, so it listens on loopback alone. It ends with the worker.
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
    """The page's address cannot be listened on."""


class _Counted(Collector):
    """What this worker has counted, as it is when the page is asked for."""

    def __init__(self, model: str, meter: Meter) -> None:
        self._model = model
        self._meter = meter

    def collect(self) -> Iterable[Metric]:
        # A copy, because the server reads it in a thread of its own.
        fields = {self._model: dict(self._meter.counts.fields)}
        return counted_families(fields, Source.ENGINES)


async def serve_metrics(settings: WorkerSettings, meter: Meter) -> None:
    """Serves until cancelled, where the settings name a port. Raises MetricsUnservable."""
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
