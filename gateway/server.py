"""Runs the gateway under uvicorn, and drains it on SIGTERM or SIGINT."""

import asyncio
import contextlib
import gc
import logging
import resource
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from gateway.app import create_app
from gateway.http.connections import ConnectionConfig
from gateway.http.listener import bind, is_loopback
from gateway.http.uvicorn_compat import StoppingServer
from gateway.memory import give_back_memory
from gateway.settings import GatewaySettings

_MAX_FILES = 65_536  # mostly connections
_SWITCH_S = 0.0005  # Python's 5 ms would pass at each event while a thread tokenises
_FAREWELL_S = 5.0  # after the drain, for streams to send their last event


def build_server(settings: GatewaySettings) -> StoppingServer:
    """A server that is not started yet; `await server.serve(sockets=[…])` runs it."""
    app = create_app(settings)
    config = ConnectionConfig(
        app,
        first_s=settings.first_timeout_s,
        idle_s=settings.idle_timeout_s,
        head_s=settings.head_timeout_s,
        body_s=settings.body_timeout_s,
        upload_s=settings.upload_timeout_s,
        max_per_address=settings.max_connections_per_address,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(settings.drain_s + settings.poll_s + _FAREWELL_S),
    )
    # Its lines contain query strings. Whatever `access_log` says, uvicorn writes them if the root
    # logger has a handler.
    logging.getLogger("uvicorn.access").disabled = True
    drain = app.state.gateway.drain
    return StoppingServer(config, lambda: drain.begin(settings.drain_s), config.arrivals.admits)


def serve(
    settings: GatewaySettings,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    listeners: Sequence[socket.socket] = (),
    on_bound: Callable[..., None] | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM, then drains. `on_bound` gets the address, and the ports of
    further listeners, before the first request is accepted; clients can connect from then on.

    Beyond loopback, every call needs a key, even after the last key has been deleted. If
    `listeners` are given, `host` and `port` are ignored, and the caller has checked that a key
    exists.

    Raises UnsafeBinding, OSError.
    """
    listeners = list(listeners) or [bind(settings, host, port)]
    host, ports = listeners[0].getsockname()[0], [each.getsockname()[1] for each in listeners]
    if not is_loopback(host):
        settings = replace(settings, require_key=True)
    if on_bound is not None:
        on_bound(host, *ports)
    sys.setswitchinterval(_SWITCH_S)
    allow_many_files()
    give_back_memory()
    server = build_server(settings)
    # The modules' 100,000 permanent objects would make a collection take as long as a step.
    gc.collect()
    gc.freeze()
    asyncio.run(server.serve(sockets=listeners))


def allow_many_files() -> None:
    """Raises this process's limit of open files. The default is often 1,024, which slow clients
    could use up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS allows less than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
