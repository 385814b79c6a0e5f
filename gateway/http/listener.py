"""The listening socket. Imports no server, because `batchway up` binds it before it starts
processes."""

import ipaddress
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

from gateway.settings import GatewaySettings

_BACKLOG = 512
_NUM_AT_ONCE = 16  # connections; then the loop goes on with others' requests
_RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: no answer, and nothing stays in the kernel


class UnsafeBinding(ValueError):
    """The gateway would listen beyond loopback without an API key."""


def bind(
    settings: GatewaySettings,
    host: str,
    port: int,
    *,
    has_keys: bool = False,
    is_shared: bool = False,
) -> socket.socket:
    """Binds a listening socket; port 0 chooses a free one. `has_keys`: Redis has API keys.
    `is_shared`: other processes have the port, too, and Linux gives a part of the connections to
    each that listens; this one only keeps it until it is served. Raises UnsafeBinding, OSError."""
    if settings.api_key is None and not has_keys and not is_loopback(host):
        raise UnsafeBinding(
            f"refusing to listen on {host} without an API key: make one with `batchway keys "
            "create`, set BATCHWAY_API_KEY, or bind to 127.0.0.1"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets with an explicit protocol. Without it, the second
    # write of a response can wait 40 ms for a delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            # The kernel closes a connection whose client reads nothing for this long. Accepted
            # sockets inherit the option (tcp(7)).
            stall_ms = int(settings.stall_timeout_s * 1000)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        if not is_shared:
            listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


class AdmittingListener(socket.socket):
    """A copy of a listening socket that resets at once the connections whose address `admits` does
    not. asyncio would first make a transport, a protocol and a task for each."""

    def __init__(self, listener: socket.socket, admits: Callable[[Any], bool]) -> None:
        kind = listener.family, listener.type, listener.proto
        super().__init__(*kind, fileno=os.dup(listener.fileno()))
        self._admits = admits
        self._num_accepted = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """asyncio calls it until it raises BlockingIOError, and again in the next round."""
        while self._num_accepted < _NUM_AT_ONCE:
            self._num_accepted += 1
            connection, address = super().accept()
            if self._admits(address):
                return connection, address
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            connection.close()
        self._num_accepted = 0
        raise BlockingIOError


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
