"""The listening socket. Imports no server, because `batchway up` binds it before it starts
processes."""

import ipaddress
import socket

from gateway.settings import GatewaySettings

_BACKLOG = 512


class UnsafeBinding(ValueError):
    """The gateway would listen beyond loopback without an API key."""


def bind(
    settings: GatewaySettings, host: str, port: int, *, has_keys: bool = False
) -> socket.socket:
    """Binds a listening socket; port 0 chooses a free one. `has_keys`: Redis has API keys. Raises
    UnsafeBinding, OSError."""
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
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
