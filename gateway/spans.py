"""A span for each request but the quiet ones: the head of a trace, or part of a caller's."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.limits import header
from telemetry.tracing import Tracing, parent_of, set_current

_QUIET = ("/livez", "/readyz", "/metrics")  # asked every few seconds, by machines


class RequestSpans:
    """Outside of the routes; lasts as long as the answer, a stream included."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tracer = self._tracing.tracer
        if tracer is None or scope["type"] != "http" or scope["path"] in _QUIET:
            await self._app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind, StatusCode

        given = header(scope, b"traceparent") or b""
        method = scope["method"]
        span = tracer.start_span(
            method, parent_of(given.decode("latin-1")), SpanKind.SERVER,
            {"http.request.method": method, "url.scheme": scope["scheme"]},
        )  # fmt: skip
        set_current(span)

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    span.set_status(StatusCode.ERROR)
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            set_current(None)
            if (route := getattr(scope.get("route"), "path", None)) is not None:
                span.update_name(f"{method} {route}")
                span.set_attribute("http.route", route)
            span.end()
