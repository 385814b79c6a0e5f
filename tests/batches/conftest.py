"""A gateway with an object store, and OpenAI's own client of it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis.asyncio
from openai import AsyncOpenAI

from contract.api_keys import ApiKeys, KeyTerms
from contract.connection import end_tasks
from contract.keys import Keys
from gateway.settings import GatewaySettings
from infra.embedded_redis import EmbeddedRedis
from tests.gateway.conftest import gateway_url, idle_worker, make_settings, running_gateway, worker
from tests.gateway.fake_worker import FakeWorker
from tests.payloads.conftest import s3_bucket, s3_setting

__all__ = ["gateway_url", "idle_worker", "s3_bucket", "s3_setting", "worker"]


@pytest.fixture(params=["directory"])
def store_setting(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    is_s3 = request.param == "s3"
    return str(request.getfixturevalue("s3_setting")) if is_s3 else str(tmp_path / "objects")


@pytest.fixture
def base_url(
    store_setting: str, redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis
) -> Iterator[str]:
    """Of a gateway on an empty Redis and an empty store, with small limits."""
    settings = make_settings(
        redis_server.url,
        object_store=store_setting,
        max_body_bytes=262_144,
        max_file_bytes=3_000_000,
        max_tenant_file_bytes=4_000_000,
        declared_models=("late",),
        callback_allow=["127.0.0.1"],
    )
    with running_gateway(settings) as url:
        yield url


def client_of(url: str, key: str = "none") -> AsyncOpenAI:
    """OpenAI's client, which repeats no call."""
    return AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


@asynccontextmanager
async def gateway_client(settings: GatewaySettings) -> AsyncIterator[AsyncOpenAI]:
    """Runs a gateway; yields a client of it."""
    with running_gateway(settings) as url:
        async with client_of(url) as client:
            yield client


@asynccontextmanager
async def serving(worker: FakeWorker) -> AsyncIterator[None]:
    """Runs each job by the worker's script."""
    task = asyncio.create_task(worker.serve())
    try:
        yield
    finally:
        await end_tasks(task)


@pytest.fixture
async def client(base_url: str) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(base_url) as client:
        yield client


@pytest.fixture
async def tenants(
    base_url: str, redis_client: redis.asyncio.Redis, keys: Keys
) -> AsyncIterator[tuple[AsyncOpenAI, AsyncOpenAI]]:
    """Clients of two tenants."""
    api_keys = ApiKeys(redis_client, keys)
    issued = [(await api_keys.create(KeyTerms(tenant=tenant)))[0] for tenant in ("one", "two")]
    async with client_of(base_url, issued[0]) as one, client_of(base_url, issued[1]) as two:
        yield one, two
