"""The outermost middleware: plain targets, request id, tracing, counting, and the response to
unhandled errors.

Pure ASGI, so that disconnects reach the routes and streams are not buffered.
"""

import inspect
import logging
import re
import secrets
from typing import TYPE_CHECKING, Self

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contract.telemetry.tracing import Tracing, current, parent_of
from gateway.http.errors import is_message_call, without_text
from gateway.http.limits import plain_target
from gateway.http.metrics import OTHER, GatewayMetrics
from gateway.http.sse import STREAM_HEADER

if TYPE_CHECKING:
    from opentelemetry.trace import Span


_QUIET = ("/livez", "/readyz", "/metrics")  # polled every few seconds

log = logging.getLogger("batchway.gateway")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestSpan:
    """The span of one request. It lasts until the response, which may be a stream, has ended."""

    def __init__(self, span: "Span") -> None:
        self._span = span
        current.set(span)

    @classmethod
    def of(cls, tracing: Tracing, scope: Scope) -> Self | None:
        """Starts a span; None if tracing is off or the path is a probe's."""
        if tracing.tracer is None or scope["path"] in _QUIET:
            return None
        from opentelemetry.trace import SpanKind

        method = scope["method"]
        attributes = {"http.request.method": method, "url.scheme": scope["scheme"]}
        parent = parent_of(Headers(scope=scope).get("traceparent", ""))
        return cls(tracing.tracer.start_span(method, parent, SpanKind.SERVER, attributes))

    def note_status(self, status: int) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)

    def end(self, scope: Scope) -> None:
        current.set(None)
        if (route := getattr(scope.get("route"), "path", None)) is not None:
            self._span.update_name(f"{scope['method']} {route}")
            self._span.set_attribute("http.route", route)
        self._span.end()


class RequestObserver:
    """Gives each request an id, traces it and counts its response.

    Calls the app's handler of `Exception` for unhandled errors. Starlette would raise them again,
    and the server would log their messages, which may contain a prompt.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, tracing: Tracing) -> None:
        self._app = app
        self._metrics = metrics
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = plain_target(scope)
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        span = RequestSpan.of(self._tracing, scope)
        has_begun = is_stream = False

        async def observed(message: Message) -> None:
            nonlocal has_begun, is_stream
            if has_begun:
                await send(message)
                return
            headers = [*message["headers"], (b"x-request-id", request_id)]
            if is_message_call(scope):
                headers.append((b"request-id", request_id))  # where Anthropic's clients read it
            await send({**message, "headers": headers})
            has_begun = True  # not earlier: if the server refuses this head, another may be sent
            route = getattr(scope.get("route"), "path", OTHER)
            self._metrics.note_request(route, scope["method"], message["status"])
            if STREAM_HEADER in headers:
                is_stream = True
                self._metrics.note_stream(1)
            if span is not None:
                span.note_status(message["status"])

        try:
            await self._app(scope, receive, observed)
        except Exception as exc:
            log.error("unexpected %s request_id=%s", without_text(exc), request_id.decode())
            if not has_begun:
                handlers = scope["app"].exception_handlers
                handler = handlers.get(500) or handlers[Exception]
                answer = handler(Request(scope, receive), exc)
                response = await answer if inspect.isawaitable(answer) else answer
                await response(scope, receive, observed)
        finally:
            if is_stream:
                self._metrics.note_stream(-1)
            if span is not None:
                span.end(scope)


def _request_id(scope: Scope) -> bytes:
    """The caller's request id if it is fit for a log, else a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    if _REQUEST_ID.fullmatch(given):
        return given.encode()
    return f"req-{secrets.token_hex(16)}".encode()
