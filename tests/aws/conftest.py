"""The gateway as Lambda runs it, against a real Redis; and an emulated AWS on loopback."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.aws.handler import ExecutionEnvironment
from gateway.settings import GatewaySettings
from infra.embedded_redis import EmbeddedRedis
from tests.aws.lambda_events import KEY
from tests.gateway import conftest as gateway_conftest

idle_worker = gateway_conftest.idle_worker
worker = gateway_conftest.worker

Invoke = Callable[..., Any]  # an event, and the context of the invocation


class Clock:
    """Unix time that a test sets."""

    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
async def invoke(redis_server: EmbeddedRedis) -> AsyncIterator[Invoke]:
    """Invokes ApiFunction. Its event loop stops between invocations, as on Lambda."""
    async with running_function(
        gateway_conftest.make_settings(redis_server.url, api_key=KEY)
    ) as invoke:
        yield invoke


@asynccontextmanager
async def running_function(settings: GatewaySettings) -> AsyncIterator[Invoke]:
    """Runs ApiFunction in its own thread."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(max_workers=1) as thread:
        function = await loop.run_in_executor(thread, ExecutionEnvironment, settings)

        def invoke(event: dict[str, Any], context: Any = None) -> Any:
            return loop.run_in_executor(thread, function, event, context)

        try:
            yield invoke
        finally:
            await loop.run_in_executor(thread, function.close)


@pytest.fixture(scope="session")
def aws_url() -> Iterator[str]:
    """The URL of moto's server, which emulates AWS."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def aws_environ(aws_url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Variables that point every AWS client to that server; also set for this process."""
    environ = {
        "AWS_REGION": "eu-central-1",
        "AWS_DEFAULT_REGION": "eu-central-1",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_SESSION_TOKEN": "testing",
        "AWS_ENDPOINT_URL": aws_url,
        "AWS_ENDPOINT_URL_SECRETS_MANAGER": aws_url,
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return environ
