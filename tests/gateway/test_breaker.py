"""What a gateway does and logs while Redis does not answer, or is full."""

import asyncio
import logging

import pytest

from contract.connection import connect
from contract.errors import BrokerFull, BrokerUnavailable, ErrorCode
from contract.keys import Keys
from gateway.redis.shards import Breaker
from infra.embedded_redis import EmbeddedRedis
from tests.gateway.conftest import gateway_client
from tests.gateway.fake_worker import MODEL, live_worker, says

BODY = {"model": MODEL, "prompt": "ab"}


def fail(breaker: Breaker, error: Exception) -> None:
    with pytest.raises(type(error)), breaker.guard():
        raise error


def test_an_outage_is_logged_at_its_begin_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """Not at each call between them."""
    times_s = [0.0]
    breaker = Breaker(0.5, lambda: times_s[-1])
    with caplog.at_level(logging.INFO):
        for second in range(100):
            times_s.append(float(second))
            fail(breaker, BrokerUnavailable("refused"))
        times_s.append(101.0)
        with breaker.guard():
            pass
        fail(breaker, BrokerUnavailable("refused"))
    absent, back = "no answer from Redis: refused", "Redis answers again after 101 s"
    assert caplog.messages == [absent, back, absent]


def test_a_full_redis_does_not_open_the_breaker() -> None:
    """Redis still answers: existing jobs can be read."""
    breaker = Breaker(60.0)
    fail(breaker, BrokerFull(ErrorCode.MEMORY_FULL, "full"))
    with breaker.guard():
        pass
    fail(breaker, BrokerUnavailable("down"))
    with pytest.raises(BrokerUnavailable, match="a moment ago"), breaker.guard():
        raise AssertionError("open")


@pytest.mark.anyio
async def test_a_full_memory_refuses_calls_while_running_ones_end() -> None:
    """503 with the reason, a stream that is read to its end, and new calls once there is memory."""
    keys = Keys("test")
    with EmbeddedRedis() as own_redis:
        client = connect(own_redis.url, keys)
        worker = await live_worker(client)
        async with gateway_client(own_redis.url) as http:
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
