"""A gateway with an object store, and OpenAI's own client of it."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis.asyncio
from openai import AsyncOpenAI

from infra.embedded_redis import EmbeddedRedis
from tests.gateway.conftest import gateway_url, idle_worker, make_settings, running_gateway, worker
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
    )
    with running_gateway(settings) as url:
        yield url


@pytest.fixture
async def client(base_url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        yield client
