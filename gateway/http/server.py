"""Runs the gateway under uvicorn: reports where it listens, and drains when told to stop."""

import asyncio
import contextlib
import gc
import logging
import resource
import socket
from collections.abc import Callable
from dataclasses import replace

import uvicorn

from gateway.http.app import create_app
from gateway.http.connections import ConnectionConfig
from gateway.http.listener import bind, is_loopback
from gateway.jobs.streams import Gateway
from gateway.settings import GatewaySettings

_MAX_FILES = 65_536  # connections, mostly
_LAST_WORDS_S = 5.0  # for streams to say that they end, after the drain


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
    config = ConnectionConfig(
        app,
        idle_s=settings.idle_timeout_s,
        head_s=settings.head_timeout_s,
        body_s=settings.body_timeout_s,
        stall_s=settings.stall_timeout_s,
        max_per_address=settings.max_connections_per_address,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(settings.drain_s + settings.poll_s + _LAST_WORDS_S),
    )
    # Its lines hold query strings, and any handler in the process would switch it on again.
    logging.getLogger("uvicorn.access").disabled = True
    return GatewayServer(config, app.state.gateway)


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
    allow_many_files()
    server = build_server(settings)
    gc.collect()
    gc.freeze()  # what is there now stays: no call waits while it is searched for garbage
    asyncio.run(server.serve(sockets=[listener]))


def allow_many_files() -> None:
    """Lifts this process's limit of open files as far as it may: many systems begin with 1,024,
    which slow clients alone would fill.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
