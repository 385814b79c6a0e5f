"""Redis fails, hints get lost, readers are slow: what callers notice."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.connection import connect, end_tasks
from contract.errors import BrokerUnavailable
from contract.keys import Keys
from gateway.redis.broker import Broker
from gateway.redis.hints import Idle
from gateway.redis.shards import Breaker
from infra.embedded_redis import EmbeddedRedis
from tests.contract.some_calls import make_submission
from tests.gateway.conftest import gateway_client, make_settings, running_gateway
from tests.gateway.fake_worker import (
    MODEL,
    FakeWorker,
    job_of_one,
    live_worker,
    publish_model,
    says,
    until_followers,
)
from tests.streams import events_of

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab"}


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A server that may be killed; its file survives to the last write."""
    with EmbeddedRedis(tmp_path, fsync="always") as server:
        yield server


@pytest.fixture
async def redis_user(own_redis: EmbeddedRedis) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of it."""
    client = connect(own_redis.url, Keys("test"))
    yield client
    await client.aclose()


async def ready_as(http: httpx.AsyncClient, status: int) -> httpx.Response:
    """Waits for an answer of /readyz, which may be a second old."""
    while True:
        answer = await http.get("/readyz")
        if answer.status_code == status:
            return answer
        await asyncio.sleep(0.05)


async def test_a_gateway_outlives_its_redis(
    own_redis: EmbeddedRedis, redis_user: redis.asyncio.Redis
) -> None:
    """503 at once while it is down, 200 soon after it is up, without a restart."""
    async with gateway_client(own_redis.url) as http:
        worker = await live_worker(redis_user)
        call = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await worker.run(await worker.claim())
        assert (await call).status_code == 200

        own_redis.kill()
        answer = await http.post("/v1/completions", json=BODY)
        if answer.status_code != 503:  # a cached catalogue may carry one call to submit
            answer = await http.post("/v1/completions", json=BODY)
        started_s = time.monotonic()
        answer = await http.post("/v1/completions", json=BODY)
        took_s = time.monotonic() - started_s
        assert answer.status_code == 503
        assert answer.headers["x-dropped-reason"] == "broker_unavailable"
        assert int(answer.headers["retry-after"]) >= 1
        assert took_s < 0.5
        assert (await http.get("/livez")).status_code == 200
        assert (await ready_as(http, 503)).json()["missing"] == "redis"

        own_redis.start()
        await worker.beat()
        serving = asyncio.create_task(worker.serve())
        await ready_as(http, 200)
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        await end_tasks(serving)


@pytest.fixture
async def dead_redis() -> AsyncIterator[tuple[str, list[int]]]:
    """The URL of a server that closes every connection, and a list of them."""
    came: list[int] = []

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(len(came))
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", came


async def test_an_open_breaker_sends_nothing_to_redis(
    dead_redis: tuple[str, list[int]],
) -> None:
    """While the breaker is open, callers get 503 at once and no packet is sent to Redis."""
    redis_url, came = dead_redis
    async with gateway_client(redis_url, breaker_open_s=3600.0) as http:
        assert (await http.post("/v1/completions", json=BODY)).status_code == 503
        num_tries = 0
        while num_tries < len(came):  # calls that began before may still be tried again
            num_tries = len(came)
            await asyncio.sleep(0.5)
        assert num_tries > 0
        answers = await asyncio.gather(
            *(http.post("/v1/completions", json=BODY) for _ in range(20))
        )
        assert {answer.status_code for answer in answers} == {503}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
        assert len(came) == num_tries


async def test_hundreds_of_calls_share_few_connections(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis, keys: Keys
) -> None:
    """More calls than connections: none is rejected, the breaker stays closed, and a gateway that
    has just started reads the library once, not once for each connection."""
    await publish_model(redis_client, keys)
    await redis_client.config_resetstat()
    broker = Broker(make_settings(redis_server.url))
    counts = await asyncio.gather(*(broker.known.num_live_workers(str(i)) for i in range(700)))
    assert counts == [0] * 700
    stats: dict[str, dict[str, int]] = await redis_client.info("commandstats")
    assert stats["cmdstat_function|list"]["calls"] == 1
    assert len(await broker.known.models()) == 1
    await broker.aclose()


async def test_calls_that_wait_for_the_first_one_fail_with_it(
    dead_redis: tuple[str, list[int]],
) -> None:
    """A gateway starts beside a dead Redis: a hundred calls try as often as one does."""
    redis_url, came = dead_redis
    num_tries = []
    for num_calls in (1, 100):
        before = len(came)
        broker = Broker(make_settings(redis_url, breaker_open_s=3600.0))
        calls = (broker.known.num_live_workers("m") for _ in range(num_calls))
        failed = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in failed] == [BrokerUnavailable] * num_calls
        await broker.aclose()
        num_tries.append(len(came) - before)
    assert num_tries[0] == num_tries[1] > 0


async def test_a_gateway_serves_once_redis_evicts_no_keys(
    own_redis: EmbeddedRedis, redis_user: redis.asyncio.Redis
) -> None:
    """The gateway runs already: /readyz and calls say what to set; then it serves."""
    worker = await live_worker(redis_user)
    await redis_user.config_set("maxmemory-policy", "allkeys-lru")
    async with gateway_client(own_redis.url) as http:
        ready = await http.get("/readyz")
        assert (ready.status_code, ready.json()["missing"]) == (503, "redis")
        assert "set it to noeviction" in ready.json()["reason"]
        refused = await http.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "broker_unfit")
        assert refused.headers["x-dropped-reason"] == "broker_unavailable"

        await redis_user.config_set("maxmemory-policy", "noeviction")
        call = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await worker.run(await worker.claim())
        assert (await call).status_code == 200


async def test_a_stream_survives_a_restart_of_redis(
    own_redis: EmbeddedRedis, redis_user: redis.asyncio.Redis
) -> None:
    """Each event before and after arrives once, in order."""
    async with gateway_client(own_redis.url) as http:
        worker = await live_worker(redis_user)
        one, two = says("before", "after")(job_of_one())
        async with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
            claimed = await worker.claim()
            await worker.say(claimed, 1, one)
            events = events_of(answer)
            assert (await anext(events)).data["choices"][0]["text"] == "before"
            own_redis.kill()
            own_redis.start()
            await worker.say(claimed, 2, two)
            await worker.finish(claimed, 3)
            rest = [event.data async for event in events]
    assert [chunk["choices"][0]["text"] for chunk in rest] == ["after"]


async def test_the_grace_of_an_outage_counts_from_the_last_message(
    own_redis: EmbeddedRedis, redis_user: redis.asyncio.Redis
) -> None:
    """A stream that received only hints for longer than the grace tolerates a restart too."""
    now_s = 0.0
    settings = make_settings(own_redis.url, poll_s=0.5, outage_grace_s=5.0)
    broker = Broker(settings, clock=lambda: now_s)
    worker = await live_worker(redis_user)
    job = job_of_one()
    await worker.functions.submit(job, make_submission())
    one, two, three = says("a", "b", "c")(job)
    claimed = await worker.claim()
    events = aiter(broker.events(job, submitted_s=now_s))
    entry = asyncio.ensure_future(anext(events))
    await until_followers(redis_user, Keys("test"), job, 1)
    await worker.say(claimed, 1, one)
    assert isinstance(await entry, list)
    now_s += 100
    await worker.say(claimed, 2, two)
    assert isinstance(await anext(events), list)

    own_redis.kill()
    assert await anext(events) == Idle(None)

    own_redis.start()
    await worker.say(claimed, 3, three)
    while not isinstance(news := await anext(events), list):
        pass
    assert [entry.number for entry in news] == [3]
    await broker.aclose()


async def test_a_drain_ends_streams_with_an_error_and_leaves_the_job(
    idle_worker: FakeWorker, redis_server: EmbeddedRedis
) -> None:
    """The caller gets an error; the job runs on and can be followed at another gateway."""
    with running_gateway(make_settings(redis_server.url)) as url:
        client = httpx.AsyncClient(base_url=url, timeout=20)
        body = BODY | {"stream": True}
        request = client.build_request("POST", "/v1/completions", json=body)
        call = asyncio.create_task(client.send(request, stream=True))
        claimed = await idle_worker.claim()
        await idle_worker.say(claimed, 1, says("a")(claimed.job)[0])
        events = events_of(await call)
        assert (await anext(events)).data["choices"][0]["text"] == "a"
    assert "draining" in [event.data.get("error", {}).get("code") async for event in events]
    assert await idle_worker.beat(claimed) == []
    await client.aclose()


def test_an_open_breaker_rejects_calls_and_then_lets_one_try() -> None:
    """Open for its time, then one call at a time; a success closes it."""
    now_s = 0.0
    breaker = Breaker(1.0, lambda: now_s)

    def fail() -> None:
        with breaker.guard():
            raise BrokerUnavailable("down")

    def probe() -> None:
        with breaker.guard(), pytest.raises(BrokerUnavailable), breaker.guard():
            raise AssertionError("two probes at once")

    with pytest.raises(BrokerUnavailable, match="down"):
        fail()
    with pytest.raises(BrokerUnavailable, match="a moment ago"):
        fail()
    now_s = 1.1
    probe()
    with breaker.guard():
        pass
