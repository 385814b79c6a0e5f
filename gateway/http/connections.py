"""Limits of one client: connections per address, and the time for a request's head and body.

uvicorn limits the length of a head. The kernel closes a connection whose client does not read
(listener.py).
"""

import asyncio
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

import msgspec
import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.arrivals import FAILED, WHOLE, Arrivals, network_of
from gateway.http.errors import ApiError, without_text
from gateway.http.limits import MAX_HEADER_BYTES, is_upload, plain_target
from gateway.http.uvicorn_compat import HttpProtocol
from gateway.turns import ConcurrencyCap

log = logging.getLogger("batchway.gateway")

_STATE_KEY = "connection"  # key in the ASGI state of a request
_LINGER_S = 1.0  # time for a refused client to read the refusal
_REST_S = 10.0  # time for a client to send the rest of a body that nobody reads
_REST_BYTES_PER_S = 100_000_000  # of all such bodies; beyond it clients are cut off
_SHORT_BYTES = 64 * 1024  # a body whose rest is read, so that the connection can be used again


class ConnectionConfig(uvicorn.Config):
    """uvicorn's settings and these limits. `idle_s`: seconds until the first byte of a request, if
    the connection has had one before, otherwise `first_s`, if that is less; `head_s`: then until
    the end of its head; `body_s`: then until the end of its body, of an upload `upload_s`.
    `max_per_address`: connections at a time; 0: unlimited, also in their rate."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        first_s: float,
        idle_s: float,
        head_s: float,
        body_s: float,
        upload_s: float,
        max_per_address: int,
        **options: Any,
    ) -> None:
        super().__init__(
            RequestGuard(app, body_s, upload_s),
            http=Connection,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=math.ceil(idle_s),
            **options,
        )
        self.first_s = min(first_s, idle_s)
        self.idle_s = idle_s
        self.head_s = head_s
        self.addresses = ConcurrencyCap(max_per_address)
        self.arrivals = Arrivals(max_per_address)
        self._num_dropped, self._dropped_at = 0.0, 0.0

    def can_drop(self, num_bytes: int) -> bool:
        """Whether clients whose answers are sent may send this much more now. Counts it."""
        now = asyncio.get_running_loop().time()
        freed = (now - self._dropped_at) * _REST_BYTES_PER_S
        self._num_dropped = max(0.0, self._num_dropped - freed) + num_bytes
        self._dropped_at = now
        return self._num_dropped <= _REST_BYTES_PER_S


class Connection(HttpProtocol):
    """uvicorn's protocol with a limit per address and a deadline for each request's head."""

    def __init__(
        self, config: ConnectionConfig, app_state: Mapping[str, Any], **options: Any
    ) -> None:
        super().__init__(config=config, app_state={**app_state, _STATE_KEY: self}, **options)
        self._bounds = config
        self._counted_as: str | None = None  # None: refused, or without an address
        self._is_refused = False
        self._is_dropping = False
        self._is_in_head = False
        self._has_had_request = False
        self._num_requests = 0  # requests that the application is handling
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        peer = transport.get_extra_info("peername")
        network = network_of(peer[0]) if isinstance(peer, tuple) else None
        if network is not None:
            if self._bounds.arrivals.take(network) < 0:
                self._refuse("too many new connections from one address; keep them open")
                return
            if not self._bounds.addresses.enter(network):
                cap = self._bounds.addresses.cap
                self._refuse(f"more than {cap} connections from one address")
                return
        self._counted_as = network
        super().connection_made(cast(asyncio.Transport, _EndedSoftly(transport, self)))
        self._close_after(self._bounds.first_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        if self._counted_as is not None:
            self._bounds.addresses.leave(self._counted_as)
            if self._is_in_head and not self._has_had_request:
                self._bounds.arrivals.take(self._counted_as, FAILED)
        if not self._is_refused:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._is_dropping:
            if not self._bounds.can_drop(len(data)):
                self._transport.abort()
            return
        if self.awaits_request:
            data = data.lstrip(b"\r\n")  # RFC 9112, section 2.2
            if not data:
                return
        if not self._num_requests and not self._is_in_head:
            self._is_in_head = True
            self._close_after(self._bounds.head_s)
        try:
            super().data_received(data)
        except Exception as exc:
            log.error("unexpected %s", without_text(exc))
            self._transport.abort()

    def request_begun(self) -> None:
        """The application has received the head of a request."""
        if self._counted_as is not None and not self._has_had_request:
            self._bounds.arrivals.take(self._counted_as, -WHOLE)
        self._has_had_request = True
        self._num_requests += 1
        self._cancel_deadline()

    def request_ended(self, *, drops_rest: bool) -> None:
        """The application has returned. The next request may have started already. `drops_rest`:
        what nobody has read of the body is dropped."""
        self._num_requests -= 1
        if self._num_requests:
            return
        self._is_in_head = False
        if self._is_dropping:
            return
        if drops_rest and self.awaits_body:
            self._drop_rest()
        else:
            self._close_after(self._bounds.idle_s)

    def end(self) -> None:
        """Closes the connection; first drops the rest of a body that is still arriving, because a
        client that is cut off while it sends may never read its answer."""
        if self.awaits_body and not self._is_dropping:
            self._drop_rest()
        else:
            self._transport.close()

    def _drop_rest(self) -> None:
        """Drops what arrives, and closes the connection when the client does, or after a while."""
        self._is_dropping = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._close_after(_REST_S)

    def _close_after(self, delay_s: float) -> None:
        self._cancel_deadline()
        if not self._transport.is_closing():
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(delay_s, self._transport.close)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, message: str) -> None:
        """Answers 429 and closes the connection a moment later. A client that is cut off while it
        sends never reads the answer."""
        self._is_refused = True
        body = msgspec.json.encode(ApiError(429, "too_many_connections", message).body())
        head = (
            "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\n"
            f"retry-after: 1\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self._transport.write(head.encode() + body)
        with suppress(OSError):  # the client has left
            self._transport.write_eof()
        self._close_after(_LINGER_S)


class _EndedSoftly:
    """A transport as uvicorn sees it, which closes it after an answer with `connection: close`."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport = transport
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self._connection.end()


class RequestGuard:
    """ASGI middleware: refuses requests whose end is ambiguous and limits the time of a body.

    `receive` raises ApiError (408) if the body is not complete in time. No exception of the
    application passes on.
    """

    def __init__(self, app: ASGIApp, body_s: float, upload_s: float) -> None:
        self._app = app
        self._body_s = body_s
        self._upload_s = upload_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = plain_target(scope)
        connection: Connection = scope["state"].pop(_STATE_KEY)
        connection.request_begun()
        drops_rest = _is_rest_dropped(scope)

        async def sent(message: Message) -> None:
            # Otherwise the client might send its next request, which would be dropped as well.
            if message["type"] == "http.response.start" and drops_rest and connection.awaits_body:
                headers = [each for each in message["headers"] if each[0] != b"connection"]
                message = {**message, "headers": [*headers, (b"connection", b"close")]}
            await send(message)

        try:
            if _is_ambiguous(scope):
                text = "transfer-encoding stands beside content-length, or in HTTP/1.0"
                error = ApiError(400, "bad_request", text, headers={"connection": "close"})
                await error.response(scope)(scope, receive, sent)
            else:
                body_s = self._upload_s if is_upload(scope) else self._body_s
                await self._app(scope, _InTime(receive, body_s).receive, sent)
        except Exception as exc:
            # uvicorn would answer 500, or close the connection in the middle of an answer
            log.error("unexpected %s", without_text(exc))
        finally:
            connection.request_ended(drops_rest=drops_rest)


class _InTime:
    """`receive` of one request. Its body must be complete `body_s` seconds after somebody began to
    read it: until then it may have waited for a turn."""

    def __init__(self, receive: Receive, body_s: float) -> None:
        self._receive = receive
        self._body_s = body_s
        self._ends_at: float | None = None
        self._is_complete = False

    async def receive(self) -> Message:
        """Raises ApiError (408) after the deadline."""
        if self._is_complete:
            return await self._receive()
        if self._ends_at is None:
            self._ends_at = asyncio.get_running_loop().time() + self._body_s
        try:
            async with asyncio.timeout_at(self._ends_at):
                message = await self._receive()
        except TimeoutError:
            text = f"the body did not arrive within {self._body_s:g} s"
            headers = {"connection": "close"}
            raise ApiError(408, "body_too_slow", text, headers=headers) from None
        self._is_complete = not message.get("more_body", False)
        return message


def _is_rest_dropped(scope: Scope) -> bool:
    """Whether what nobody has read of the body is dropped: it may be long, or never come, because
    its client waits for `100 Continue`."""
    headers = Headers(scope=scope)
    length = headers.get("content-length")
    if length is None:
        return "transfer-encoding" in headers
    return int(length) > _SHORT_BYTES or "expect" in headers


def _is_ambiguous(scope: Scope) -> bool:
    """Whether a proxy might see another end of this request than h11 does: Content-Length together
    with chunks, or chunks in HTTP/1.0 (RFC 9112, section 6.1)."""
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers and (
        "content-length" in headers or scope["http_version"] == "1.0"
    )
