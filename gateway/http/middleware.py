"""What every request meets before its route and after it: an id, a span, a count, what is refused
by its head, a limit of its body, and an answer to whatever goes wrong.

One ASGI layer for all of it. Pure ASGI, so that a disconnect reaches the routes and a stream is
passed on unbuffered; and one, since a layer costs its calls with every message of a stream.
"""

import logging
import re
import secrets
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contract.telemetry.tracing import Tracing
from gateway.http import sse
from gateway.http.errors import answer_of, internal_error
from gateway.http.limits import Body, Limits, header
from gateway.http.metrics import OTHER, GatewayMetrics
from gateway.http.spans import RequestSpan

log = logging.getLogger("batchway.gateway")

_STREAM = (b"content-type", sse.MEDIA_TYPE.encode())
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class Middleware:
    """Around the routes. `draw` gives random numbers from 0 to 1, for the jitter of Retry-After."""

    def __init__(
        self,
        routes: ASGIApp,
        limits: Limits,
        metrics: GatewayMetrics,
        tracing: Tracing,
        draw: Callable[[], float],
    ) -> None:
        self._routes = routes
        self._limits = limits
        self._metrics = metrics
        self._tracing = tracing
        self._draw = draw

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        span = RequestSpan.of(self._tracing, scope)
        answer = _Answer(scope, send, request_id, self._metrics, span)
        body = Body(receive, self._limits)
        try:
            self._limits.check_head(scope)
            await body.check_announced(scope)
            await self._routes(scope, body.receive, answer.send)
        except ClientDisconnect:
            return  # gone before its request was whole: nobody to answer, and no fault of ours
        except Exception as exc:
            response = None if answer.has_begun else answer_of(exc, self._draw)
            if response is None:
                log.error("unexpected %s request_id=%s", _where(exc), request_id.decode())
                response = internal_error().response()
            if not answer.has_begun:
                await response(scope, receive, answer.send)
        finally:
            answer.end()


class _Answer:
    """The answer to one request, as it passes by: given its id, counted, noted in the span."""

    def __init__(
        self,
        scope: Scope,
        send: Send,
        request_id: bytes,
        metrics: GatewayMetrics,
        span: RequestSpan | None,
    ) -> None:
        self.has_begun = False
        self._scope = scope
        self._send = send
        self._request_id = request_id
        self._metrics = metrics
        self._span = span
        self._is_stream = False

    def send(self, message: Message) -> Awaitable[None]:
        """Not a coroutine of its own: only the first message is anything to us."""
        return self._send(message) if self.has_begun else self._begin(message)

    async def _begin(self, message: Message) -> None:
        """Where the server does not take the head, the answer has not begun: another may."""
        headers = [*message["headers"], (b"x-request-id", self._request_id)]
        await self._send({**message, "headers": headers})
        self.has_begun = True
        route = getattr(self._scope.get("route"), "path", OTHER)
        self._metrics.note_request(route, self._scope["method"], message["status"])
        if _STREAM in headers:
            self._is_stream = True
            self._metrics.note_stream(1)
        if self._span is not None:
            self._span.note_status(message["status"])

    def end(self) -> None:
        if self._is_stream:
            self._metrics.note_stream(-1)
        if self._span is not None:
            self._span.end(self._scope)


def _request_id(scope: Scope) -> bytes:
    """The caller's own where it brings one that is fit for a log, else a new one."""
    given = header(scope, b"x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return f"req-{secrets.token_hex(16)}".encode()


def _where(exc: BaseException) -> str:
    """Type and place of an error, without its message, which may hold a prompt."""
    trace = exc.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return type(exc).__name__
    code = trace.tb_frame.f_code
    return f"{type(exc).__name__} in {code.co_name} ({code.co_filename}:{trace.tb_lineno})"
