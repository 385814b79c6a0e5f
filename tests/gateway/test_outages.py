"""Redis goes away, hints get lost, readers are slow: callers hear of it quickly or not at all."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.connection import connect
from contract.errors import BrokerUnavailable
from contract.functions import Functions
from contract.jobs import Endpoint, Job, SamplingParams
from contract.keys import Keys
from contract.library import ensure_library
from contract.tasks import end
from gateway.breaker import Breaker
from gateway.broker import Broker
from gateway.hints import Hints
from infra.embedded_redis import EmbeddedRedis
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model, says

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab"}


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A server that may be killed; its file survives, to the last write."""
    with EmbeddedRedis(tmp_path, fsync="always") as server:
        yield server


async def live_worker(client: redis.asyncio.Redis) -> FakeWorker:
    await ensure_library(client)
    keys = Keys("test")
    await publish_model(client, keys)
    worker = FakeWorker(Functions(client, keys))
    await worker.beat()
    return worker


async def ready_as(http: httpx.AsyncClient, status: int) -> httpx.Response:
    """Waits for an answer of /readyz; what it says may be a second old."""
    while True:
        answer = await http.get("/readyz")
        if answer.status_code == status:
            return answer
        await asyncio.sleep(0.05)


async def test_a_gateway_outlives_its_redis(own_redis: EmbeddedRedis) -> None:
    """503 at once while it is away, 200 soon after it is back, no restart."""
    with running_gateway(make_settings(own_redis.url)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            client = connect(own_redis.url)
            worker = await live_worker(client)
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
            await end(serving)
            await client.aclose()


@pytest.fixture
async def dead_redis() -> AsyncIterator[tuple[str, list[int]]]:
    """The URL of a server that hangs up on everybody, and a list that counts who came."""
    came: list[int] = []

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(len(came))
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", came


async def test_nobody_asks_a_redis_that_failed_a_moment_ago(
    dead_redis: tuple[str, list[int]],
) -> None:
    """While the breaker is open callers are answered without a packet to Redis: 503, at once."""
    redis_url, came = dead_redis
    with running_gateway(make_settings(redis_url, breaker_open_s=3600.0)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            assert (await http.post("/v1/completions", json=BODY)).status_code == 503
            num_tries = len(came)
            assert num_tries > 0
            answers = await asyncio.gather(
                *(http.post("/v1/completions", json=BODY) for _ in range(20))
            )
            assert {answer.status_code for answer in answers} == {503}
            assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
            assert len(came) == num_tries


async def test_hundreds_of_calls_at_a_time_wait_their_turn(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis, keys: Keys
) -> None:
    """More than a client has connections: none is refused, and the breaker stays closed."""
    await publish_model(redis_client, keys)
    broker = Broker(make_settings(redis_server.url))
    counts = await asyncio.gather(*(broker.known.num_live_workers(str(i)) for i in range(700)))
    assert counts == [0] * 700
    assert len(await broker.known.models()) == 1
    await broker.aclose()


async def test_a_redis_that_evicts_keys_is_refused_until_it_does_not(
    own_redis: EmbeddedRedis,
) -> None:
    """The gateway was there first: /readyz and calls say what to set; then it serves."""
    client = connect(own_redis.url)
    worker = await live_worker(client)
    await client.config_set("maxmemory-policy", "allkeys-lru")
    with running_gateway(make_settings(own_redis.url)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            ready = await http.get("/readyz")
            assert (ready.status_code, ready.json()["missing"]) == (503, "redis")
            assert "set it to noeviction" in ready.json()["reason"]
            refused = await http.post("/v1/completions", json=BODY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "broker_unfit")
            assert refused.headers["x-dropped-reason"] == "broker_unavailable"

            await client.config_set("maxmemory-policy", "noeviction")
            call = asyncio.create_task(http.post("/v1/completions", json=BODY))
            await worker.run(await worker.claim())
            assert (await call).status_code == 200
    await client.aclose()


async def test_a_stream_rides_out_a_restart_of_redis(own_redis: EmbeddedRedis) -> None:
    """What was said before and after arrives once, in order."""
    with running_gateway(make_settings(own_redis.url)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            client = connect(own_redis.url)
            worker = await live_worker(client)
            one, two = says("before", "after")(job_of_one())
            body = BODY | {"stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                claimed = await worker.claim()
                await worker.say(claimed, 1, one)
                lines = answer.aiter_lines()
                while '"text":"before"' not in await anext(lines):
                    pass
                own_redis.kill()
                own_redis.start()
                await worker.say(claimed, 2, two)
                await worker.finish(claimed, 3)
                rest = [line async for line in lines if line.startswith("data")]
            assert ['"text":"after"' in line for line in rest] == [True, False]
            await client.aclose()


def job_of_one() -> Job:
    params = SamplingParams(max_tokens=64, seed=1)
    return Job(
        id="x",
        tenant="t",
        model=MODEL,
        lane="standard",
        endpoint=Endpoint.COMPLETIONS,
        prompt_ids=(1,),
        params=params,
        created_s=0,
    )


async def test_lost_hints_cost_a_poll_and_no_token(
    idle_worker: FakeWorker, http: httpx.AsyncClient, redis_client: redis.asyncio.Redis
) -> None:
    """The subscription is cut before every event; the log has them all."""
    call = asyncio.create_task(http.post("/v1/completions", json=BODY | {"stream": True}))
    claimed = await idle_worker.claim()
    for number, event in enumerate(says("a", "b", "c")(claimed.job), 1):
        await redis_client.client_kill_filter(_type="pubsub")
        await idle_worker.say(claimed, number, event)
    await idle_worker.finish(claimed, 4)
    text = (await call).text
    assert [f'"text":"{letter}"' in text for letter in "abc"] == [True] * 3
    assert text.count('"text"') == 3


async def test_hints_arrive_without_waiting_for_a_poll(
    redis_server: EmbeddedRedis, functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """With polls an hour apart the whole call still ends."""
    with running_gateway(make_settings(redis_server.url, poll_s=3600.0, drain_s=0.0)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            worker = await live_worker(redis_client)
            call = asyncio.create_task(http.post("/v1/completions", json=BODY))
            await worker.run(await worker.claim(), says("a", "b"))
            assert (await call).json()["choices"][0]["text"] == "ab"


async def test_a_broken_subscription_is_made_anew_once(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis, functions: Functions
) -> None:
    """Whoever begins to listen in the same moment makes no second connection beside it."""
    client = connect(redis_server.url, retries=0, command_timeout_s=None)
    hints = Hints(client, max_bytes=1000, idle_channel="idle of one")
    async with hints.listen("first"):
        await redis_client.client_kill_filter(_type="pubsub")
        async with hints.listen("second") as mailbox:
            async with asyncio.timeout(20):
                await mailbox.is_subscribed.wait()
            assert await redis_client.pubsub_numsub("idle of one") == [(b"idle of one", 1)]
    await hints.aclose()


async def test_a_full_mailbox_forgets_and_says_so(
    redis_server: EmbeddedRedis, functions: Functions, keys: Keys, idle_worker: FakeWorker
) -> None:
    """Its memory is bounded; the owner reads the log instead."""
    client = connect(redis_server.url, retries=0, command_timeout_s=None)
    hints = Hints(client, max_bytes=40, idle_channel="idle")
    async with hints.listen("ch") as mailbox:
        assert await mailbox.take(0.001) is None
        entry: Any = object()
        mailbox.put(entry, 30)
        assert await mailbox.take(0.001) == [entry]
        mailbox.put(entry, 30)
        mailbox.put(entry, 30)
        assert await mailbox.take(0.001) == []
    await hints.aclose()


async def test_a_slow_reader_gets_every_byte(
    idle_worker: FakeWorker, redis_server: EmbeddedRedis
) -> None:
    """More than all buffers hold waits in the log until it is read."""
    settings = make_settings(redis_server.url, max_buffer_bytes=10_000)
    text = "x" * 400
    with running_gateway(settings) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            body = BODY | {"max_tokens": 500}
            answer = await http.post("/v1/jobs", json={"endpoint": "/v1/completions", "body": body})
            job_id = answer.json()["id"]
            async with http.stream("GET", f"/v1/jobs/{job_id}/events") as stream:
                claimed = await idle_worker.claim()
                # 400 events of 1 kB, none of them read yet: far over the 10 kB of hints.
                events = says(*[text[0]] * 400)(claimed.job)
                for number, event in enumerate(events, 1):
                    await idle_worker.say(claimed, number, event)
                await idle_worker.finish(claimed, 401)
                ids = [line async for line in stream.aiter_lines() if line.startswith("id: ")]
    assert [int(line[4:].partition(".")[0]) for line in ids] == list(range(1, 402))


async def test_a_drain_ends_streams_with_an_error_and_leaves_the_job(
    idle_worker: FakeWorker, redis_server: EmbeddedRedis
) -> None:
    """A caller is told; the job goes on, to be picked up at another gateway."""
    with running_gateway(make_settings(redis_server.url)) as url:
        client = httpx.AsyncClient(base_url=url, timeout=20)
        call = asyncio.create_task(client.post("/v1/completions", json=BODY | {"stream": True}))
        claimed = await idle_worker.claim()
        await idle_worker.say(claimed, 1, says("a")(claimed.job)[0])
        await asyncio.sleep(0.1)
    assert '"code":"draining"' in (await call).text
    assert await idle_worker.beat(claimed) == []
    await client.aclose()


def test_an_open_breaker_refuses_and_lets_one_try() -> None:
    """Open for its time, then one probe at a time; a success closes it."""
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
