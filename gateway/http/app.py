"""The gateway as an ASGI app. Starts while Redis is down, and needs no restart when it is back."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from starlette.types import ASGIApp, Receive, Scope, Send

from contract import tasks
from contract.telemetry.tracing import Tracing
from gateway.http import health, metrics_route
from gateway.http.concurrency_cap import ConcurrencyCap
from gateway.http.drain import Drain
from gateway.http.embedded_metrics import EmbeddedMetrics
from gateway.http.limits import Limits
from gateway.http.metrics import GatewayMetrics
from gateway.http.middleware import Middleware
from gateway.http.routing import Routes
from gateway.jobs import dead_letters, job_lists, job_routes, objects, quotes
from gateway.jobs.streams import Gateway
from gateway.openai import chat, completions, models
from gateway.redis.broker import Broker
from gateway.settings import GatewaySettings

# FastAPI's own would record inputs that fail validation, and messages of exceptions.
_NO_TELEMETRY = TelemetryConfig(
    tracing=False, metrics=False, logs=False, operation_spans=False, auto_configure=False
)


class App(FastAPI):
    """FastAPI, for what describes and opens the app; requests go by the `front`."""

    front: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        await self.front(scope, receive, send)


def create_app(
    settings: GatewaySettings,
    broker: Broker | None = None,
    *,
    draw: Callable[[], float] = random.random,
) -> App:
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
    app = App(
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
    app.state.calls_of_keys = ConcurrencyCap(settings.max_calls_per_key)
    jobs_routes = (chat, completions, dead_letters, job_routes, job_lists, quotes, objects)
    for module in (*jobs_routes, models, health, metrics_route):
        app.router.routes.extend(module.router.routes)
    front = Middleware(Routes(app.router), Limits(settings), counted, tracing, draw)
    app.front = EmbeddedMetrics(front, metrics=counted) if settings.embedded_metrics else front
    return app


def _document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, made when it is first asked for."""
    if app.openapi_schema is None:
        from gateway.http.openapi import document  # functions start without it

        app.openapi_schema = document(app)
    return app.openapi_schema
