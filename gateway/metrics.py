"""What one gateway counts of itself. What happens to jobs is counted in Redis, for all gateways."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import Metric as Family
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contract.jobs import Job
from telemetry.metrics import METRICS

MAX_TENANTS = 50  # that have a label of their own; all later ones share one
OTHER = "other"
_METHODS = frozenset({"GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS", "PUT"})


class GatewayMetrics:
    """One for each app, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._admission = self._counter("admission_total")
        self._tenant_admission = self._counter("tenant_admission_total")
        self._requests = self._counter("http_requests_total")
        self._resumed = self._counter("resumed_streams_total")
        metric = METRICS["open_streams"]
        self._streams = Gauge(metric.full_name, metric.help, registry=self._registry)
        self._tenants: set[str] = set()

    def note_acceptance(self, job: Job, *, is_new: bool) -> None:
        """A job was queued, or found: the same call was accepted before."""
        self._note(job, "accepted" if is_new else "known", "")

    def note_refusal(self, job: Job, reason: str) -> None:
        self._note(job, "refused", reason)

    def note_resumed(self) -> None:
        """A stream goes on from where an earlier one broke off."""
        self._resumed.inc()

    def note_request(self, route: str, method: str, status: int) -> None:
        self._requests.labels(route, method if method in _METHODS else OTHER, str(status)).inc()

    def note_stream(self, sign: int) -> None:
        """A stream has begun (1), or ended (-1)."""
        self._streams.inc(sign)

    def families(self) -> Iterable[Family]:
        return self._registry.collect()

    def _note(self, job: Job, outcome: str, reason: str) -> None:
        self._admission.labels(job.model, job.lane, outcome, reason).inc()
        if len(self._tenants) < MAX_TENANTS:
            self._tenants.add(job.tenant)
        tenant = job.tenant if job.tenant in self._tenants else OTHER
        self._tenant_admission.labels(tenant, outcome).inc()

    def _counter(self, name: str) -> Counter:
        metric = METRICS[name]
        return Counter(metric.full_name, metric.help, metric.all_labels, registry=self._registry)


class RequestCounter:
    """Counts answers by route, never by path: a path may hold an id."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_stream = False

        async def watched_send(message: Message) -> None:
            nonlocal is_stream
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", OTHER)
                self._metrics.note_request(route, scope["method"], message["status"])
                kinds = [value for name, value in message["headers"] if name == b"content-type"]
                if any(kind.startswith(b"text/event-stream") for kind in kinds):
                    is_stream = True
                    self._metrics.note_stream(1)
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            if is_stream:
                self._metrics.note_stream(-1)
