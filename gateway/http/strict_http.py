"""Bytes of a connection to requests: uvicorn's protocol on httptools, made stricter, and bounded in
what it holds.

Leaves to connections.py who may connect, and how long a client is waited for.
"""

import asyncio
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway.http.exchanges import Exchange
from gateway.http.limits import MAX_HEADER_BYTES

_MAX_PIPELINED = 32  # requests behind the one that is answered: each takes memory before its turn
_INVALID = "Invalid HTTP request received."


class _BadRequest(Exception):
    """What the parser lets pass and we do not."""


class StrictProtocol(HttpToolsProtocol):
    """Refuses what two readers could take differently. What it takes in without telling anything
    of it, be it a head or what comes behind a body, may be as long as a head.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._is_refused = False
        self._is_in_head = False
        self._is_offer = False  # of another protocol, in the head that was read last
        self._num_untold = 0  # bytes taken in since the parser told of any
        self._running: Exchange | None = None

    def shutdown(self) -> None:
        """What runs is the last; of what waits behind it nothing is begun."""
        if self._running is not None:
            self._running.keep_alive = False
        super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True  # uvicorn tells the last request alone
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._num_untold += len(data)
        try:
            self._feed(data)
            if self._num_untold > MAX_HEADER_BYTES:
                raise _BadRequest
        except (httptools.HttpParserError, _BadRequest):
            self._refuse_request()

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as exc:
                # Nobody has to accept an offer, and we never do. The parser takes what follows for
                # the other protocol's: it is given the head once more, without the offer.
                data = self._head_without_offer() + data[exc.args[0] :]
                self.parser = httptools.HttpRequestParser(self)

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)
        kept = (b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade")
        return b"".join((line, *kept, b"\r\n"))

    def _refuse_request(self) -> None:
        """Of what comes nothing more is read. What was asked properly before is answered first."""
        self._is_refused = True
        if self.cycle is None or self.cycle.response_complete:
            self.send_400_response(_INVALID)
        elif self._lacks_body():
            self.cycle.disconnected = True  # what the app would still say came behind the refusal
            self.cycle.message_event.set()
            self.send_400_response(_INVALID)
        else:
            self.cycle.keep_alive = False

    def _lacks_body(self) -> bool:
        """Whether what the app was given last is not whole, and not answered so far."""
        cycle = self.cycle
        return cycle is self._running and cycle.more_body and not cycle.response_started

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self._is_in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # else behind a body: nothing is expected there
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._num_untold = 0
        version, method = self.parser.get_http_version(), self.parser.get_method()
        self._check_head(version, method)
        self._is_offer = self.parser.should_upgrade()
        if self._is_offer:
            return
        raw_path, _, query = self.url.partition(b"?")
        self.scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme or "http",
            "method": method.decode("ascii"),
            "root_path": "",
            "path": unquote(raw_path.decode("ascii")),
            "raw_path": raw_path,
            "query_string": query,
            "headers": self.headers,
            "state": self.app_state.copy(),
        }
        before = self.cycle
        self.cycle = self._exchange()
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        elif len(self.pipeline) < _MAX_PIPELINED:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))
        else:
            self.cycle = before
            raise _BadRequest

    def _check_head(self, version: str, method: bytes) -> None:
        """What the parser leaves to its user, or takes."""
        num_hosts = 0
        for name, value in self.headers:
            num_hosts += name == b"host"
            if name == b"transfer-encoding" and (value.lower() != b"chunked" or version == "1.0"):
                raise _BadRequest
        if version not in ("1.0", "1.1") or method == b"CONNECT":
            raise _BadRequest
        if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
            raise _BadRequest

    def _exchange(self) -> Exchange:
        is_recent = self.scope["http_version"] == "1.1"
        expected = dict(self.headers).get(b"expect", b"").lower()
        return Exchange(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=is_recent and expected == b"100-continue",
            keep_alive=is_recent and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        assert isinstance(cycle, Exchange)
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Without uvicorn's clock for the next request, which would run on beside that one."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())

    def on_body(self, body: bytes) -> None:
        self._num_untold = 0
        if self.cycle.response_complete:
            return
        self.cycle.body += body
        if len(self.cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._num_untold = 0
        if self._is_offer or self.cycle.response_complete:
            return
        self.cycle.more_body = False
        self.cycle.message_event.set()
