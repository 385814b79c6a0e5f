"""Hints get lost or arrive alone: a follower misses nothing, and reads only what no hint told."""

import asyncio
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.connection import connect
from contract.events import LogEntry
from contract.functions import Functions
from contract.keys import Keys
from gateway.redis import broker
from gateway.redis.broker import Broker
from gateway.redis.hints import Hints
from gateway.settings import GatewaySettings
from infra.embedded_redis import EmbeddedRedis
from tests.contract.some_calls import make_submission
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import (
    MODEL,
    FakeWorker,
    job_of_one,
    live_worker,
    says,
    until_followers,
)
from tests.streams import events_of

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab"}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings with which a follower that cannot have missed a hint never polls."""
    monkeypatch.setattr(broker, "SAFE_LOOK_S", 3600.0)


async def test_a_follower_with_hints_does_not_read_the_log(
    patient: None,
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    functions: Functions,
    idle_worker: FakeWorker,
) -> None:
    """A new job is followed by hints alone, from its first event to its end."""
    gateway = Broker(make_settings(redis_server.url, poll_s=3600.0), clock=lambda: 0.0)
    job = job_of_one()
    await functions.submit(job, make_submission())
    num_reads = await _num_reads(redis_client)
    events = aiter(gateway.events(job.id, job.tenant, submitted_s=0.0))
    first = asyncio.ensure_future(anext(events))
    claimed = await idle_worker.claim()
    await until_followers(redis_client, Keys("test"), job.id, 1)

    await idle_worker.run(claimed, says("a", "b"))
    items = [await first, *[item async for item in events]]

    assert [item.number for item in items if isinstance(item, LogEntry)] == [1, 2, 3]
    assert await _num_reads(redis_client) == num_reads
    await gateway.aclose()


async def test_a_late_follower_reads_the_log(
    patient: None, redis_server: EmbeddedRedis, functions: Functions, idle_worker: FakeWorker
) -> None:
    """The worker published before the subscription, so the follower reads the log."""
    gateway = Broker(make_settings(redis_server.url, poll_s=3600.0), clock=lambda: 1.0)
    job = job_of_one()
    await functions.submit(job, make_submission())
    await idle_worker.run(await idle_worker.claim(), says("a", "b"))

    items = [item async for item in gateway.events(job.id, job.tenant, submitted_s=0.0)]

    assert [item.number for item in items if isinstance(item, LogEntry)] == [1, 2, 3]
    await gateway.aclose()


async def _num_reads(client: redis.asyncio.Redis) -> int:
    stats = await client.info("commandstats")
    return int(stats.get("cmdstat_fcall_ro", {"calls": 0})["calls"])


async def test_lost_hints_cost_a_poll_and_no_token(
    idle_worker: FakeWorker, http: httpx.AsyncClient, redis_client: redis.asyncio.Redis
) -> None:
    """The subscription is cut before each event; the log has them all."""
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
    """The call ends although polls are an hour apart."""
    with running_gateway(make_settings(redis_server.url, poll_s=3600.0, drain_s=0.0)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            worker = await live_worker(redis_client)
            call = asyncio.create_task(http.post("/v1/completions", json=BODY))
            await worker.run(await worker.claim(), says("a", "b"))
            assert (await call).json()["choices"][0]["text"] == "ab"


async def test_a_broken_subscription_is_restored_once(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis, functions: Functions
) -> None:
    """A follower that arrives at that moment does not open a second connection."""
    client = connect(redis_server.url, Keys("test"), command_timeout_s=None)
    hints = Hints(client, max_bytes=1000)
    async with hints.listen("first of one"):
        await redis_client.client_kill_filter(_type="pubsub")
        async with hints.listen("second") as mailbox:
            async with asyncio.timeout(20):
                await mailbox.is_subscribed.wait()
            assert await redis_client.pubsub_numsub("first of one") == [(b"first of one", 1)]
    await hints.aclose()


async def test_a_full_mailbox_drops_hints_and_reports_a_gap(
    redis_server: EmbeddedRedis, functions: Functions, keys: Keys, idle_worker: FakeWorker
) -> None:
    """Its memory is limited; the owner reads the log instead."""
    client = connect(redis_server.url, Keys("test"), command_timeout_s=None)
    hints = Hints(client, max_bytes=40)
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
    idle_worker: FakeWorker, redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What exceeds all buffers stays in the log until it is read."""
    monkeypatch.setattr(GatewaySettings, "max_buffer_bytes", 10_000)
    settings = make_settings(redis_server.url)
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
                ids = [event.id async for event in events_of(stream) if event.id]
    assert [int(id_.partition(".")[0]) for id_ in ids] == list(range(1, 402))
