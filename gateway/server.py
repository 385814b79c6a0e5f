"""Runs the gateway under uvicorn: binds, reports where, and drains when told to stop."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable
from dataclasses import replace

import uvicorn

from gateway.app import create_app
from gateway.limits import MAX_HEADER_BYTES
from gateway.settings import GatewaySettings
from gateway.streams import Gateway

_BACKLOG = 512
_LAST_WORDS_S = 5.0  # for streams to say that they end, after the drain


class UnsafeBinding(ValueError):
    """The address would let strangers in."""


class GatewayServer(uvicorn.Server):
    """uvicorn, which tells the streams when it is about to stop."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gateway.drain.begin(self._gateway.settings.drain_s)
        await super().shutdown(sockets)


def build_server(settings: GatewaySettings) -> GatewayServer:
    """A server that has not started; `await server.serve(sockets=[…])` runs it."""
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        http="h11",  # bounds headers by bytes
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=int(settings.drain_s + settings.poll_s + _LAST_WORDS_S),
    )
    # Its lines hold query strings, and any handler in the process would switch it on again.
    logging.getLogger("uvicorn.access").disabled = True
    return GatewayServer(config, app.state.gateway)


def bind(
    settings: GatewaySettings, host: str, port: int, *, has_keys: bool = False
) -> socket.socket:
    """A listening socket; port 0 takes a free one. `has_keys`: Redis is known to hold some.

    Raises UnsafeBinding, OSError.
    """
    if settings.api_key is None and not has_keys and not is_loopback(host):
        raise UnsafeBinding(
            f"refusing to listen on {host} without an API key: make one with `batchway keys "
            "create`, set BATCHWAY_API_KEY, or bind to 127.0.0.1"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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


def serve(
    settings: GatewaySettings,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    listener: socket.socket | None = None,
    on_bound: Callable[[str, int], None] | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM, then drains. `on_bound` hears the address, before the first
    request is taken; connections wait from then on. Beyond loopback nobody is served without a
    key, also where the last one is forgotten; a `listener` was bound by whoever made sure of one.

    Raises UnsafeBinding, OSError.
    """
    if listener is None:
        listener = bind(settings, host, port)
    if not is_loopback(str(listener.getsockname()[0])):
        settings = replace(settings, require_key=True)
    if on_bound is not None:
        on_bound(*listener.getsockname()[:2])
    asyncio.run(build_server(settings).serve(sockets=[listener]))
