"""A span for each request, except for probes."""

from typing import TYPE_CHECKING, Self

from starlette.types import Scope

from contract.telemetry.tracing import Tracing, parent_of, set_current
from gateway.http.limits import header

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_QUIET = ("/livez", "/readyz", "/metrics")  # polled every few seconds


class RequestSpan:
    """The span of one request. It lasts until the response, which may be a stream, has ended."""

    def __init__(self, span: "Span") -> None:
        self._span = span
        set_current(span)

    @classmethod
    def of(cls, tracing: Tracing, scope: Scope) -> Self | None:
        """Starts a span; None if tracing is off or the path is a probe's."""
        if tracing.tracer is None or scope["path"] in _QUIET:
            return None
        from opentelemetry.trace import SpanKind

        given = header(scope, b"traceparent") or b""
        method = scope["method"]
        attributes = {"http.request.method": method, "url.scheme": scope["scheme"]}
        parent = parent_of(given.decode("latin-1"))
        return cls(tracing.tracer.start_span(method, parent, SpanKind.SERVER, attributes))

    def note_status(self, status: int) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)

    def end(self, scope: Scope) -> None:
        set_current(None)
        if (route := getattr(scope.get("route"), "path", None)) is not None:
            self._span.update_name(f"{scope['method']} {route}")
            self._span.set_attribute("http.route", route)
        self._span.end()
