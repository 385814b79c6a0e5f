"""The gateway as a FastAPI app. It can start without Redis and serves as soon as Redis answers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from starlette.middleware.cors import CORSMiddleware

from contract.connection import end_tasks
from contract.errors import BatchwayError
from contract.telemetry.tracing import Tracing
from gateway.follow.fleet import FleetWatch
from gateway.http.errors import SYSTEM_RANDOM
from gateway.http.handlers import add_handlers
from gateway.http.limits import HeadGuard
from gateway.http.metrics import EmbeddedMetrics
from gateway.http.middleware import RequestObserver
from gateway.memory import keep_trimmed
from gateway.prepare.revocation import RevocationGuard
from gateway.redis.broker import Broker
from gateway.redis.shards import GatewayShard
from gateway.routes import (
    batches,
    calls,
    chats,
    dead_letters,
    files,
    health,
    jobs,
    lanes,
    models,
    objects,
    operations,
    pages,
    responses,
    tokenize,
    uploads,
)
from gateway.routes.requests import GuardedRoute
from gateway.runners.batches.feeder import Feeder
from gateway.runners.operations import run_operations
from gateway.settings import GatewaySettings
from gateway.state import Gateway
from gateway.turns import ConcurrencyCap, take_turns

_DESCRIPTION = (
    "OpenAI's shapes wherever OpenAI has one, and durable jobs. Once an API key exists, every "
    "`/v1` route wants it. `docs/api.md` says more of each field, event and error code."
)
# FastAPI's telemetry would record invalid inputs and messages of exceptions.
_NO_TELEMETRY = TelemetryConfig(
    tracing=False, metrics=False, logs=False, operation_spans=False, auto_configure=False
)
_MODULES = (
    *(calls, chats, responses, dead_letters, jobs, operations, lanes, objects),
    *(files, uploads, batches, models, tokenize, health),
)
_ROUTES = [route for module in _MODULES for route in module.router.routes]
if not all(isinstance(route, GuardedRoute) for route in (*_ROUTES, *pages.router.routes)):
    raise TypeError("a router has another route_class, which reads before it asks who calls")


def create_app(
    settings: GatewaySettings, *, draw: Callable[[], float] = SYSTEM_RANDOM.random
) -> FastAPI:
    """Creates the app. `draw` returns random numbers from 0 to 1, for the jitter of Retry-After."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tracing.open()
        take_turns(gateway.turns)  # also for tasks started here
        ending = AsyncExitStack()
        duties = [
            asyncio.create_task(gateway.broker.report_attendance()),
            asyncio.create_task(keep_trimmed()),
        ]
        starting = asyncio.create_task(_start_in_partitions(gateway, duties))
        if settings.console:
            duties.append(asyncio.create_task(watch.run()))
        if settings.models:
            # Only here, because it needs YAML, which a gateway without flows need not have.
            from gateway.runners.flows.service import FlowService

            flows = FlowService(gateway)
            ending.push_async_callback(flows.aclose)
            duties.append(asyncio.create_task(flows.serve()))
        yield
        await end_tasks(starting)  # first, as it may begin another one while it is cancelled
        await end_tasks(*duties)
        await ending.aclose()
        await gateway.bodies.aclose()
        await gateway.grammars.aclose()
        await gateway.step_templates.aclose()
        await gateway.broker.aclose()
        await asyncio.to_thread(tracing.close)

    tracing = Tracing("batchway-gateway")
    gateway = Gateway(settings, Broker(settings))
    watch = FleetWatch(gateway)
    app = FastAPI(
        title="batchway",
        description=_DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
        telemetry=_NO_TELEMETRY,
    )
    app.state.settings = settings
    app.state.gateway = gateway
    app.state.key_ring = gateway.broker.key_ring
    app.state.calls_of_keys = ConcurrencyCap(settings.max_calls_per_key)
    app.state.calls_of_tokens = ConcurrencyCap(settings.max_calls_per_token)
    # include_router would build each route again, at the first request, which takes 0.2 s.
    app.routes.extend(_ROUTES)
    if settings.console:
        app.state.fleet_watch = watch
        app.routes.extend(pages.router.routes)
    add_handlers(app, draw, sorted({route.path for route in _ROUTES if "{" not in route.path}))
    # The middleware that is added last is the outermost.
    app.add_middleware(RevocationGuard, key_ring=gateway.broker.key_ring)
    app.add_middleware(HeadGuard, settings=settings)
    app.add_middleware(RequestObserver, metrics=gateway.metrics, tracing=tracing)
    if settings.embedded_metrics:
        app.add_middleware(EmbeddedMetrics, metrics=gateway.metrics)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=("*",),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=("*",),  # holds because credentials, which are cookies, never do
        )
    return app


async def _start_in_partitions(gateway: Gateway, duties: list[asyncio.Task[None]]) -> None:
    """Adds what runs in each partition without a caller, operations and batches, to `duties`, once
    Redis has told the partitions."""
    shards = list[GatewayShard]()
    while not shards:
        try:
            shards = await gateway.broker.shards.all()
        except BatchwayError:  # the breaker logs it
            await asyncio.sleep(gateway.settings.poll_s)
    for shard in shards:
        duties.append(asyncio.create_task(run_operations(gateway, shard)))
        if gateway.broker.payloads.store is not None:
            duties.append(asyncio.create_task(Feeder(gateway, shard).run()))
