"""The gateway as an ASGI app. Starts while Redis is down, and needs no restart when it is back."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig

from contract import tasks
from gateway import errors
from gateway.auth import hosts_of
from gateway.broker import Broker
from gateway.drain import Drain
from gateway.embedded_metrics import EmbeddedMetrics
from gateway.limits import MAX_HEADER_BYTES, BodyLimit, HeadLimit, LastNet, RequestIds, TrustedHosts
from gateway.metrics import GatewayMetrics, RequestCounter
from gateway.routes import (
    callbacks,
    chat,
    completions,
    health,
    job_lists,
    jobs,
    metrics,
    models,
    objects,
    quotes,
)
from gateway.settings import GatewaySettings
from gateway.spans import RequestSpans
from gateway.streams import Gateway
from gateway.tally import Tally
from telemetry.tracing import Tracing

# FastAPI's own would record inputs that fail validation, and messages of exceptions.
_NO_TELEMETRY = TelemetryConfig(
    tracing=False, metrics=False, logs=False, operation_spans=False, auto_configure=False
)


def create_app(
    settings: GatewaySettings,
    broker: Broker | None = None,
    *,
    draw: Callable[[], float] = random.random,
) -> FastAPI:
    """The app. A broker that is handed in is left open at the end. `draw` gives random numbers
    from 0 to 1, for the jitter of Retry-After.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tracing.open()
        attending = asyncio.create_task(gateway.broker.attend())
        yield
        await tasks.end(attending)
        if broker is None:
            await gateway.broker.aclose()
        await asyncio.to_thread(tracing.close)

    counted = GatewayMetrics()
    tracing = Tracing("batchway-gateway")
    gateway = Gateway(settings, broker or Broker(settings), Drain(), counted)
    app = FastAPI(
        title="batchway",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry=_NO_TELEMETRY,
    )
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    app.state.settings = settings
    app.state.gateway = gateway
    app.state.key_ring = gateway.broker.key_ring
    app.state.calls_of_keys = Tally(settings.max_calls_per_key)
    jobs_routes = (chat, completions, callbacks, jobs, job_lists, quotes, objects)
    for module in (*jobs_routes, models, health, metrics):
        app.include_router(module.router)
    errors.install(app, draw)
    # The last added is the outermost.
    app.add_middleware(
        BodyLimit, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
    )
    app.add_middleware(TrustedHosts, hosts=hosts_of(settings))
    app.add_middleware(HeadLimit, max_bytes=MAX_HEADER_BYTES)
    app.add_middleware(LastNet)
    app.add_middleware(RequestCounter, metrics=counted)
    if settings.embedded_metrics:
        app.add_middleware(EmbeddedMetrics, metrics=counted)
    app.add_middleware(RequestSpans, tracing=tracing)
    app.add_middleware(RequestIds)
    return app


def _document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, made when it is first asked for."""
    if app.openapi_schema is None:
        from gateway.openapi import document  # functions start without it

        app.openapi_schema = document(app)
    return app.openapi_schema
