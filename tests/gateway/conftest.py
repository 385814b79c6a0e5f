"""A real gateway on a loopback port, and a fake worker that the tests drive."""

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Set
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from copy import deepcopy
from functools import cache, partial
from typing import Any

import httpx
import pytest
import redis.asyncio
from fastapi.routing import APIRoute

from contract.api_keys import ApiKeys, KeyTerms
from contract.connection import end_tasks
from contract.functions import Functions
from contract.keys import Keys
from gateway.app import create_app
from gateway.http.listener import bind
from gateway.server import build_server
from gateway.settings import GatewaySettings
from infra.embedded_redis import EmbeddedRedis
from tests.fleet import until
from tests.gateway.fake_worker import FakeWorker, live_worker, publish_model
from tests.gateway.vector_worker import CARDS, publish_vector_model, vector_worker


def make_settings(redis_url: str, **overrides: object) -> GatewaySettings:
    """Settings with short times."""
    fields: dict[str, object] = {
        "redis_url": redis_url,
        "namespace": "test",
        "poll_s": 0.05,
        "heartbeat_s": 0.2,
        "drain_s": 0.0,
        "cold_start_s": 0.5,
        "console": False,  # which looks at Redis also while nobody calls
    }
    return GatewaySettings(**(fields | overrides))  # type: ignore[arg-type]


_app = partial(create_app, GatewaySettings(redis_url="redis://127.0.0.1:1"))


def operations() -> list[tuple[str, str]]:
    """Method and path of every route of the OpenAPI document, which need not be made for them."""
    routes = (route for route in _app().routes if isinstance(route, APIRoute))
    listed = (route for route in routes if route.include_in_schema)
    return sorted((method, route.path_format) for route in listed for method in route.methods or ())


@cache
def _document() -> dict[str, Any]:
    return _app().openapi()


def openapi_document() -> dict[str, Any]:
    """A copy of the gateway's OpenAPI document, which takes a second to make."""
    return deepcopy(_document())


@contextmanager
def running_gateway(settings: GatewaySettings, *, port: int = 0) -> Iterator[str]:
    """Runs a gateway in its own thread; yields its base URL. `port`: 0 for a free one."""
    listener = bind(settings, "127.0.0.1", port)
    server = build_server(settings)
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()


@contextmanager
def gateway_process(redis_url: str, **environ: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A gateway that can be killed, and its URL."""
    command = [sys.executable, "-m", "infra", "gateway", "--port=0", "--namespace=test"]
    with subprocess.Popen(
        command,
        env=os.environ | {"REDIS_URL": redis_url} | environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        found = (re.search(r"listening on (\S+) port (\d+)", line) for line in process.stderr)
        try:
            host, port = next(each.groups() for each in found if each)
            yield process, f"http://{host}:{port}"
        finally:
            process.kill()


@asynccontextmanager
async def gateway_client(
    redis_url: str, headers: dict[str, str] | None = None, **settings: object
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway of its own with these settings."""
    with running_gateway(make_settings(redis_url, **settings)) as url:
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=20) as client:
            yield client


Gateways = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def gateways(redis_server: EmbeddedRedis) -> Gateways:
    """Runs a gateway with the settings that a test gives, and yields its client."""
    return partial(gateway_client, redis_server.url)


Bearer = Callable[..., Awaitable[dict[str, str]]]


@pytest.fixture
def bearer(redis_client: redis.asyncio.Redis, keys: Keys) -> Bearer:
    """Makes a key of a tenant; returns the header that has it."""

    async def created(tenant: str = "acme", **terms: Any) -> dict[str, str]:
        key, _ = await ApiKeys(redis_client, keys).create(KeyTerms(tenant=tenant, **terms))
        return {"authorization": f"Bearer {key}"}

    return created


async def answered(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], **more: object
) -> dict[str, Any]:
    """The answer, with status 200, to a body with more fields."""
    answer = await http.post(path, json=body | more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def error_of(answer: httpx.Response) -> tuple[int, str | None, str]:
    """Status, parameter and code of a refusal, which has OpenAI's format."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["param"], error["code"]


async def until_listed(
    http: httpx.AsyncClient, wanted: Set[str], unwanted: Set[str] = frozenset()
) -> None:
    """Returns once the list of models, which may be a second old, is as wanted."""

    async def is_so() -> bool:
        listed = {model["id"] for model in (await http.get("/v1/models")).json()["data"]}
        return wanted <= listed and not unwanted & listed

    await until(is_so, 20)


@pytest.fixture(scope="session")
def gateway_url(redis_server: EmbeddedRedis) -> Iterator[str]:
    with running_gateway(make_settings(redis_server.url)) as url:
        yield url


@pytest.fixture(scope="module")
def console_url(redis_server: EmbeddedRedis) -> Iterator[str]:
    """The URL of a gateway with pages."""
    with running_gateway(make_settings(redis_server.url, console=True)) as url:
        yield url


@pytest.fixture
async def idle_worker(redis_client: redis.asyncio.Redis) -> FakeWorker:
    """A live worker of a published model, driven by the test."""
    return await live_worker(redis_client)


@pytest.fixture
async def worker(idle_worker: FakeWorker) -> AsyncIterator[FakeWorker]:
    """A worker that runs each job by its script."""
    task = asyncio.create_task(idle_worker.serve())
    yield idle_worker
    await end_tasks(task)


Serving = Callable[[str], Awaitable[FakeWorker]]


@pytest.fixture
async def serving(
    redis_client: redis.asyncio.Redis, functions: Functions, keys: Keys, http: httpx.AsyncClient
) -> AsyncIterator[Serving]:
    """Publishes the prefill-only models, and starts a worker of one of them."""
    await publish_model(redis_client, keys)  # later tests ask for it, and the gateway remembers
    for name in CARDS:
        await publish_vector_model(redis_client, keys, name)
    await until_listed(http, {*CARDS})
    tasks = []

    async def start(model: str) -> FakeWorker:
        worker = vector_worker(functions, model)
        await worker.beat()
        tasks.append(asyncio.create_task(worker.serve()))
        return worker

    yield start
    await end_tasks(*tasks)


@pytest.fixture
async def http(
    gateway_url: str, redis_client: redis.asyncio.Redis
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway on an empty Redis, so that no key of another test is required."""
    async with httpx.AsyncClient(base_url=gateway_url, timeout=20) as client:
        yield client
