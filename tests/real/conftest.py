"""A Redis and a gateway of their own: those of other tests are emptied between tests."""

import asyncio
from collections.abc import Iterator

import pytest

from contract.connection import connect
from contract.keys import Keys
from contract.library import ensure_library
from infra.embedded_redis import EmbeddedRedis
from tests.gateway.conftest import make_settings, running_gateway


@pytest.fixture(scope="session")
def real_redis() -> Iterator[str]:
    async def prepare(url: str) -> None:
        client = connect(url, Keys("test"))
        await ensure_library(client)
        await client.aclose()

    with EmbeddedRedis() as server:
        asyncio.run(prepare(server.url))
        yield server.url


@pytest.fixture(scope="session")
def real_gateway(real_redis: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    store = str(tmp_path_factory.mktemp("objects"))
    settings = make_settings(real_redis, object_store=store, cold_start_s=60.0)
    with running_gateway(settings) as url:
        yield url
