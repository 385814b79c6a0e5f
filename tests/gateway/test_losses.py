"""What gets lost: hints, of which a follower misses nothing and reads only what none told; and in a
power cut the end of a log, or a whole job."""

import asyncio
import itertools
from typing import Any

import httpx
import pytest
import redis.asyncio

from batchway_client.events import Event
from contract.connection import connect
from contract.events import LogEntry
from contract.function_types import Verdict
from contract.functions import Functions
from contract.keys import Keys
from gateway.redis import broker
from gateway.redis.broker import Broker
from gateway.redis.hints import Hints
from gateway.settings import GatewaySettings
from infra.embedded_redis import EmbeddedRedis
from tests.contract.some_calls import make_submission
from tests.gateway.conftest import gateway_client, make_settings
from tests.gateway.fake_worker import MODEL, FakeWorker, job_of_one, says, until_followers
from tests.streams import events_of, whole_stream

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab"}


async def _num_reads(client: redis.asyncio.Redis) -> int:
    stats = await client.info("commandstats")
    return int(stats.get("cmdstat_fcall_ro", {"calls": 0})["calls"])


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_follower_with_all_hints_does_not_read_the_log(
    redis_server: EmbeddedRedis,
    idle_worker: FakeWorker,
    monkeypatch: pytest.MonkeyPatch,
    is_late: bool,
) -> None:
    """A new job is followed by hints alone, from its first event to its end. A late follower, which
    subscribed after the worker had published, reads the log."""
    monkeypatch.setattr(broker, "SAFE_LOOK_S", 3600.0)
    settings = make_settings(redis_server.url, poll_s=3600.0)
    gateway = Broker(settings, clock=lambda: float(is_late))
    job = job_of_one()
    await idle_worker.functions.submit(job, make_submission())
    num_reads = await _num_reads(idle_worker.client)
    claimed = await idle_worker.claim()
    if is_late:
        await idle_worker.run(claimed, says("a", "b"))
    events = aiter(gateway.events(job, submitted_s=0.0))
    first = asyncio.ensure_future(anext(events))
    if not is_late:
        await until_followers(idle_worker.client, Keys("test"), job, 1)
        await idle_worker.run(claimed, says("a", "b"))

    *said, end = [await first, *[item async for item in events]]

    assert isinstance(end, LogEntry)
    entries = [*itertools.chain.from_iterable(each for each in said if isinstance(each, list)), end]
    assert [entry.number for entry in entries] == [1, 2, 3]
    assert (await _num_reads(idle_worker.client) == num_reads) == (not is_late)
    await gateway.aclose()


async def test_lost_hints_cost_a_poll_and_no_token(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """The subscription is cut before each event; the log has them all."""
    call = asyncio.create_task(http.post("/v1/completions", json=BODY | {"stream": True}))
    claimed = await idle_worker.claim()
    for number, event in enumerate(says("a", "b", "c")(claimed.job), 1):
        await idle_worker.client.client_kill_filter(_type="pubsub")
        await idle_worker.say(claimed, number, event)
    await idle_worker.finish(claimed, 4)
    events = whole_stream((await call).text)
    assert [event.data["choices"][0]["text"] for event in events] == ["a", "b", "c"]


async def test_hints_arrive_without_waiting_for_a_poll(
    redis_server: EmbeddedRedis, idle_worker: FakeWorker
) -> None:
    """The call ends although polls are an hour apart."""
    async with gateway_client(redis_server.url, poll_s=3600.0) as http:
        call = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await idle_worker.run(await idle_worker.claim(), says("a", "b"))
        assert (await call).json()["choices"][0]["text"] == "ab"


async def test_a_broken_subscription_is_restored_once(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis, functions: Functions
) -> None:
    """A follower that arrives at that moment does not open a second connection."""
    client = connect(redis_server.url, Keys("test"), command_timeout_s=None)
    hints = Hints(client, max_bytes=1000)
    async with hints.listen("first of one", "a"):
        await redis_client.client_kill_filter(_type="pubsub")
        async with hints.listen("second", "a") as mailbox:
            async with asyncio.timeout(20):
                await mailbox.is_subscribed.wait()
            assert await redis_client.pubsub_numsub("first of one") == [(b"first of one", 1)]
    await hints.aclose()


@pytest.mark.parametrize(
    "message",
    [
        *(b"x", b"\n", b"a\n", b"a 3", b"a 3\nab", b"a 9\n1 00000000", b"a -9\n1 00000000 x"),
        *(b"a 99999999999999999999\n1", b"a 2 3\nxy", b"a 4\nabcd", b"b 1\nxa 1\nx", b"b 1\nx\xff"),
        b"1 0123abcd \x92\xa6tokens\x90",  # of an earlier version
    ],
)
async def test_a_message_that_no_worker_writes_makes_followers_read_the_log(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis, message: bytes
) -> None:
    hints = Hints(connect(redis_server.url, Keys("test"), command_timeout_s=None), max_bytes=1000)
    async with hints.listen("channel", "a") as mailbox:
        await mailbox.is_subscribed.wait()
        await redis_client.publish("channel", message)
        assert await mailbox.take(20.0) == []
    await hints.aclose()


async def test_a_slow_reader_gets_every_byte(
    idle_worker: FakeWorker, redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What exceeds all buffers stays in the log until it is read."""
    monkeypatch.setattr(GatewaySettings, "max_buffer_bytes", 10_000)
    job = {"endpoint": "/v1/completions", "body": BODY | {"max_tokens": 500}}
    async with gateway_client(redis_server.url) as http:
        job_id = (await http.post("/v1/jobs", json=job)).json()["id"]
        async with http.stream("GET", f"/v1/jobs/{job_id}/events") as stream:
            # 400 events of 1 kB, none of them read yet: far over the 10 kB of hints.
            await idle_worker.run(await idle_worker.claim(), says(*"x" * 400))
            ids = [event.id async for event in events_of(stream) if event.id]
    assert [int(id_.partition(".")[0]) for id_ in ids] == list(range(1, 402))


async def lose_event(worker: FakeWorker, job_id: str, number: int) -> None:
    """Restores the log's end and its records to an earlier state, as a power cut does."""
    client, keys = worker.client, worker.keys
    log = keys.of("log", job_id)
    kept: Any = await client.xrange(log, "-", f"{number - 1}-0")
    async with client.pipeline(transaction=True) as transaction:
        transaction.delete(log)
        for entry_id, fields in kept:
            transaction.xadd(log, fields, id=entry_id)
        transaction.hdel(keys.of("run", worker.incarnation), job_id)
        last_hash = kept[-1][1][b"s"].split(b" ")[1]
        transaction.hset(keys.of("job", job_id), mapping={"next": number, "hash": last_hash})
        await transaction.execute()


@pytest.mark.parametrize("again", ["b", "B"])
async def test_events_of_two_logs_are_never_joined(
    idle_worker: FakeWorker, http: httpx.AsyncClient, again: str
) -> None:
    """If a log lost its end and the same event is written again, readers notice nothing. If
    another is, the stream resets and starts again; a synchronous stream ends in an error."""
    call = asyncio.create_task(http.post("/v1/completions", json=BODY | {"stream": True}))
    claimed = await idle_worker.claim()
    job_id = claimed.job.id
    first, second, third = says("a", "b", "c")(claimed.job)
    rewritten = says("a", again, "c")(claimed.job)[1]
    async with http.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        stream = events_of(answer)
        await idle_worker.say(claimed, 1, first)
        await idle_worker.say(claimed, 2, second)
        while text_of(await anext(stream)) != "b":
            pass
        await lose_event(idle_worker, job_id, 2)
        assert await idle_worker.say(claimed, 2, rewritten) == (Verdict.OK, 3)
        assert await idle_worker.say(claimed, 3, third) == (Verdict.OK, 4)
        await idle_worker.finish(claimed, 4)
        rest = [event async for event in stream]
    texts = [text for event in rest if (text := text_of(event))]
    assert texts == (["c"] if again == "b" else ["a", "B", "c"])
    assert ("stream_reset" in [event.type for event in rest]) == (again == "B")
    assert ('"code":"stream_reset"' in (await call).text) == (again == "B")


def text_of(event: Event) -> str:
    return str(event.data["choices"][0]["text"]) if event.type == "message" else ""


async def lose_job(worker: FakeWorker, job_id: str) -> None:
    await worker.client.delete(worker.keys.of("job", job_id), worker.keys.of("log", job_id))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_whose_job_is_lost_is_told_to_retry(
    idle_worker: FakeWorker, http: httpx.AsyncClient, stream: bool
) -> None:
    """ "This job does not exist" would tell it nothing, because it asked for no job."""
    call = asyncio.create_task(http.post("/v1/completions", json=BODY | {"stream": stream}))
    claimed = await idle_worker.claim()
    await lose_job(idle_worker, claimed.job.id)
    answer = await call
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "job_lost")
    assert answer.headers["x-dropped-reason"] == "broker_unavailable"
    assert 1 <= int(answer.headers["retry-after"]) <= 2
    again = asyncio.create_task(http.post("/v1/completions", json=BODY | {"stream": stream}))
    await idle_worker.run(await idle_worker.claim(), says("a"))
    assert (await again).status_code == 200


async def test_a_stream_whose_job_is_lost_midway_ends_in_an_error(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """The status line has been sent, so the last event is the error."""
    async with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
        stream = events_of(answer)
        claimed = await idle_worker.claim()
        await idle_worker.say(claimed, 1, says("a")(claimed.job)[0])
        assert text_of(await anext(stream)) == "a"
        await lose_job(idle_worker, claimed.job.id)
        assert [event.data["error"]["code"] async for event in stream] == ["job_lost"]
