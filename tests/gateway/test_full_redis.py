"""Redis has no memory for more jobs: callers get an error, and running jobs end normally."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from contract.connection import connect
from contract.errors import BrokerFull, BrokerUnavailable, ErrorCode
from contract.functions import Functions
from contract.keys import Keys
from contract.library import ensure_library
from gateway.redis.shards import Breaker
from infra.embedded_redis import EmbeddedRedis
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model, says

pytestmark = pytest.mark.anyio

BODY = {"model": MODEL, "prompt": "ab"}


@pytest.fixture
def own_redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


async def test_a_full_memory_refuses_calls_while_running_ones_end(own_redis: EmbeddedRedis) -> None:
    """503 with the reason, a stream that is read to its end, and new calls once there is memory."""
    client = connect(own_redis.url, Keys("test"))
    await ensure_library(client)
    keys = Keys("test")
    await publish_model(client, keys)
    worker = FakeWorker(Functions(client, keys))
    await worker.beat()
    with running_gateway(make_settings(own_redis.url)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            stream = asyncio.create_task(http.post("/v1/completions", json=BODY | {"stream": True}))
            claimed = await worker.claim()
            used = (await client.info("memory"))["used_memory"]
            await client.config_set("maxmemory", used // 2)
            await client.delete(keys.of("memory"))  # a reading that may be a second old

            refused = await http.post("/v1/completions", json=BODY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "memory_full")
            assert refused.headers["x-dropped-reason"] == "broker_unavailable"
            assert int(refused.headers["retry-after"]) >= 1
            job = await http.post("/v1/jobs", json={"endpoint": "/v1/completions", "body": BODY})
            assert job.json()["error"]["code"] == "memory_full"
            await worker.run(claimed, says("all", "of it"))
            assert "[DONE]" in (await stream).text
            assert (await http.get("/readyz")).status_code == 200

            await client.config_set("maxmemory", 0)
            await client.delete(keys.of("memory"))
            call = asyncio.create_task(http.post("/v1/completions", json=BODY))
            await worker.run(await worker.claim())
            assert (await call).status_code == 200
    await client.aclose()


def test_a_full_redis_does_not_open_the_breaker() -> None:
    """Redis still answers: existing jobs can be read."""
    breaker = Breaker(60.0)
    with pytest.raises(BrokerFull), breaker.guard():
        raise BrokerFull(ErrorCode.MEMORY_FULL, "full")
    with breaker.guard():
        pass
    with pytest.raises(BrokerUnavailable), breaker.guard():
        raise BrokerUnavailable("down")
    with pytest.raises(BrokerUnavailable, match="a moment ago"), breaker.guard():
        raise AssertionError("open")
