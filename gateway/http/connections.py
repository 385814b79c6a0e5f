"""Connections that end when their client dawdles: uvicorn's own protocol waits for ever for the
first request, for a head or a body at a byte a second, for the rest of a body that was refused,
and for readers who take nothing.
"""

import asyncio
import ipaddress
from enum import Enum, auto
from typing import Any

import msgspec
import uvicorn
from uvicorn.server import ServerState

from gateway.http.concurrency_cap import ConcurrencyCap
from gateway.http.errors import ApiError
from gateway.http.strict_http import StrictProtocol

_LAST_WORDS_S = 1.0  # a client that is refused may read why
_IPV6_NETWORK_BITS = 64  # one household has all of these addresses


class ConnectionConfig(uvicorn.Config):
    """uvicorn's settings, and what is asked of clients. `max_per_address` 0: no cap."""

    def __init__(
        self,
        app: Any,
        *,
        idle_s: float,
        head_s: float,
        body_s: float,
        stall_s: float,
        max_per_address: int,
        **options: Any,
    ) -> None:
        super().__init__(app, http=PatientProtocol, **options)
        self.idle_s = idle_s
        self.head_s = head_s
        self.body_s = body_s
        self.stall_s = stall_s
        self.addresses = ConcurrencyCap(max_per_address)


class _Waits(Enum):
    """What a connection waits for from its client."""

    FOR_A_REQUEST = auto()
    FOR_A_HEAD = auto()  # its first bytes are there
    FOR_A_BODY = auto()  # the app has the head
    FOR_A_READER = auto()  # of what was written: the transport has enough of it
    FOR_NOTHING = auto()  # the app has the request


class PatientProtocol(StrictProtocol):
    """Ends each wait for the client."""

    def __init__(
        self,
        config: ConnectionConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._wait_s = {
            _Waits.FOR_A_REQUEST: config.idle_s,
            _Waits.FOR_A_HEAD: config.head_s,
            _Waits.FOR_A_BODY: config.body_s,
            _Waits.FOR_A_READER: config.stall_s,
        }
        self._addresses = config.addresses
        self._address: str | None = None  # counted under; None: not counted
        self._waits = _Waits.FOR_NOTHING
        self._end: asyncio.TimerHandle | None = None
        self._num_unread = 0  # bytes that the client had not taken when last looked at

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = network_of(self.client[0]) if self.client else None
        if address is not None and not self._addresses.can_enter(address):
            self._refuse(transport)
            return
        if address is not None:
            self._addresses.enter(address)
            self._address = address
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_until(None)
        if self._address is not None:
            self._addresses.leave(self._address)
            self._address = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_refused:
            self._look()

    def on_response_complete(self) -> None:
        self._waits = _Waits.FOR_NOTHING  # the next wait begins now, whatever came meanwhile
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._look()

    def _look(self) -> None:
        """Starts the clock of what the connection waits for, where that is something new."""
        waits = self._waiting()
        if waits is not self._waits:
            self._waits = waits
            self._wait_until(self._wait_s.get(waits))

    def _waiting(self) -> _Waits:
        if self.cycle is None or self.cycle.response_complete:
            return _Waits.FOR_A_HEAD if self._is_in_head else _Waits.FOR_A_REQUEST
        if self.flow.write_paused:
            return _Waits.FOR_A_READER
        return _Waits.FOR_A_BODY if self._lacks_body() else _Waits.FOR_NOTHING

    def _wait_until(self, delay_s: float | None) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None
        if delay_s is not None:
            self._num_unread = self.transport.get_write_buffer_size()
            self._end = self.loop.call_later(delay_s, self._on_time_up)

    def _on_time_up(self) -> None:
        """Ends the connection, except of one who still reads the last answer, however slowly. Who
        is late with a body is told so by the app.
        """
        self._end = None
        if self._waits is _Waits.FOR_A_BODY and not self._is_refused:
            if self._running is not None:
                self._running.give_up_body()
            return
        num_unread = self.transport.get_write_buffer_size()
        if 0 < num_unread < self._num_unread:
            self._wait_until(self._wait_s.get(self._waits))
        else:
            self.transport.abort()

    def _refuse(self, transport: asyncio.Transport) -> None:
        """Says why, and is gone as soon as the client has closed its side, or soon after."""
        self._is_refused = True
        message = f"more than {self._addresses.cap} connections from one address"
        body = msgspec.json.encode(ApiError(429, "too_many_connections", message).body())
        head = (
            "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        transport.write(head.encode() + body)
        if transport.can_write_eof():
            transport.write_eof()
        self._wait_until(_LAST_WORDS_S)


def network_of(address: str) -> str:
    """What an address is counted under: itself, or its network where a client has a whole one."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return str(ip.ipv4_mapped)
        return str(ipaddress.ip_network((ip, _IPV6_NETWORK_BITS), strict=False))
    return str(ip)
