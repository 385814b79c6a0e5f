"""A subscription hears all that is said in its channels, and notices its end."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError, NoPermissionError, TimeoutError

from contract.connection import Listener, connect
from infra.embedded_redis import EmbeddedRedis
from tests.contract.relay import Relay, with_tls

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def subscribed(url: str, *channels: str, look_s: float = 60.0) -> AsyncIterator[Listener]:
    """Confirmed by the server."""
    client = connect(url, connect_timeout_s=5.0)
    async with contextlib.aclosing(client), client.pubsub() as pubsub:
        await pubsub.subscribe(*channels)
        listener = Listener(pubsub, look_s)
        for channel in channels:
            message = await listener.next()
            assert (message["type"], message["channel"]) == ("subscribe", channel.encode())
        yield listener


async def heard_for_ever(listener: Listener) -> None:
    while True:
        await listener.next()


async def test_all_that_is_said_in_its_channels_is_heard_in_order(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    """From the confirmation on; nothing of another channel."""
    async with subscribed(redis_server.url, "one", "two") as listener:
        said = [b"%d" % i * 1000 for i in range(200)]
        for data in said:
            await redis_client.publish("one", data)
            await redis_client.publish("three", data)
        heard = [await listener.next() for _ in said]
        assert [(m["type"], m["channel"], m["data"]) for m in heard] == [
            ("message", b"one", data) for data in said
        ]


async def test_nothing_is_lost_where_waiting_is_interrupted(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    """Between any two turns of the loop."""
    said = [b"%d" % i * 10_000 for i in range(200)]
    async with subscribed(redis_server.url, "one") as listener:

        async def say() -> None:
            for data in said:
                await redis_client.publish("one", data)

        saying, heard = asyncio.create_task(say()), []
        for num_turns in itertools.cycle(range(5)):
            waiting = asyncio.ensure_future(listener.next())
            for _ in range(num_turns):
                await asyncio.sleep(0)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                heard.append((await waiting)["data"])
            if len(heard) == len(said):
                break
        await saying
    assert heard == said


async def test_the_end_of_the_connection_is_told(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    async with subscribed(redis_server.url, "one") as listener:
        await redis_client.client_kill_filter(_type="pubsub")
        with pytest.raises(ConnectionError):
            await listener.next()


async def test_a_server_that_cannot_be_reached_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError):
        async with subscribed(f"unix://{tmp_path}/none", "one"):
            pass


async def test_a_connection_that_fell_silent_is_closed(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    """Nobody has closed it, and nothing is said: only a question that stays open tells."""
    async with Relay(redis_server).running() as relay:
        url = f"redis://127.0.0.1:{relay.port}"
        async with subscribed(url, "one", look_s=0.05) as listener:
            relay.fall_silent()
            async with asyncio.timeout(20):
                with pytest.raises(TimeoutError):
                    await heard_for_ever(listener)


async def test_a_connection_where_nothing_is_said_is_kept(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    """The server's answers to the questions are enough, with a channel or without one."""
    client = connect(redis_server.url)
    async with contextlib.aclosing(client), client.pubsub() as pubsub:
        await pubsub.connect()
        listener = Listener(pubsub, look_s=0.05)
        for _ in range(3):
            assert (await listener.next())["type"] == "pong"
        await pubsub.subscribe("one")
        kinds = [(await listener.next())["type"] for _ in range(4)]
        assert kinds == ["subscribe", "pong", "pong", "pong"]


async def test_a_user_without_the_right_to_a_channel_is_told_so(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    await redis_client.acl_setuser(
        "deaf", enabled=True, passwords=["+secret"], commands=["+@all"], reset=True
    )
    url = redis_server.url.replace("unix://", "unix://deaf:secret@")
    with pytest.raises(NoPermissionError):
        async with subscribed(url, "one"):
            pass
    await redis_client.acl_deluser("deaf")


async def test_a_subscription_goes_through_tls(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    async with with_tls(redis_server, tmp_path) as (_, url), subscribed(url, "one") as listener:
        await redis_client.publish("one", "x" * 100_000)
        assert (await listener.next())["data"] == b"x" * 100_000
