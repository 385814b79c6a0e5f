"""A subscription hears all that is said in its channels, and notices its end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError, NoPermissionError, TimeoutError

from contract.connection import connect, new_connection
from contract.subscription import Subscription
from infra.embedded_redis import EmbeddedRedis
from tests.contract.relay import Relay, with_tls
from tests.fleet import until

pytestmark = pytest.mark.anyio


class Ear:
    """What a subscription has heard, in order."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
        self.confirmed: asyncio.Queue[bytes] = asyncio.Queue()

    @contextlib.asynccontextmanager
    async def at(self, url: str, look_s: float = 60.0) -> AsyncIterator[Subscription]:
        """A subscription without a channel yet."""

        def hear(channel: bytes, data: bytes) -> None:
            self.heard.put_nowait((channel, data))

        async with contextlib.aclosing(connect(url, retries=0, connect_timeout_s=5.0)) as client:
            connection = new_connection(client)
            async with Subscription(
                connection, hear, self.confirmed.put_nowait, look_s
            ) as subscription:
                yield subscription


async def test_all_that_is_said_in_its_channels_is_heard_in_order(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    """From the confirmation on; nothing of another channel, or of one that it has left."""
    ear = Ear()
    async with ear.at(redis_server.url) as subscription:
        subscription.subscribe(b"one", b"two")
        assert [await ear.confirmed.get() for _ in range(2)] == [b"one", b"two"]
        said = [b"%d" % i * 1000 for i in range(200)]
        for data in said:
            await redis_client.publish("one", data)
            await redis_client.publish("three", data)
        assert [await ear.heard.get() for _ in said] == [(b"one", data) for data in said]
        subscription.unsubscribe(b"one")
        subscription.subscribe(b"three")
        await ear.confirmed.get()
        for channel in ("one", "three"):
            await redis_client.publish(channel, "last")
        assert await ear.heard.get() == (b"three", b"last")
        assert ear.heard.empty()


async def test_the_end_of_the_connection_is_told(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    """Afterwards it may be told to subscribe, and does nothing."""
    ear = Ear()
    async with ear.at(redis_server.url) as subscription:
        subscription.subscribe(b"one")
        await ear.confirmed.get()
        await redis_client.client_kill_filter(_type="pubsub")
        with pytest.raises(ConnectionError):
            await subscription.end()
        subscription.subscribe(b"two")
        assert await redis_client.pubsub_numsub("two") == [(b"two", 0)]


async def test_a_server_that_cannot_be_reached_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError):
        async with Ear().at(f"unix://{tmp_path}/none"):
            pass


async def test_a_connection_that_fell_silent_is_closed(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    """Nobody has closed it, and nothing is said: only a question that stays open tells."""
    ear = Ear()
    async with Relay(redis_server).running() as relay:
        url = f"redis://127.0.0.1:{relay.port}"
        async with ear.at(url, look_s=0.05) as subscription:
            subscription.subscribe(b"one")
            await ear.confirmed.get()
            relay.fall_silent()
            async with asyncio.timeout(20):
                with pytest.raises(TimeoutError):
                    await subscription.end()


async def test_a_connection_where_nothing_is_said_is_kept(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    """The server's answers to the looks are enough, with a channel or without one."""

    async def num_looks() -> int:
        stats = await redis_client.info("commandstats")
        return int(stats.get("cmdstat_ping", {"calls": 0})["calls"])

    ear = Ear()
    async with ear.at(redis_server.url, look_s=0.2) as subscription:
        for channel in (b"one", b"two"):
            num_enough = await num_looks() + 3

            async def has_looked(num_enough: int = num_enough) -> bool:
                return await num_looks() >= num_enough

            await until(has_looked)
            subscription.subscribe(channel)
            assert await ear.confirmed.get() == channel


async def test_a_user_without_the_right_to_a_channel_is_told_so(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    await redis_client.acl_setuser(
        "deaf", enabled=True, passwords=["+secret"], commands=["+@all"], reset=True
    )
    url = redis_server.url.replace("unix://", "unix://deaf:secret@")
    async with Ear().at(url) as subscription:
        subscription.subscribe(b"one")
        with pytest.raises(NoPermissionError):
            await subscription.end()
    await redis_client.acl_deluser("deaf")


async def test_a_subscription_goes_through_tls(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    ear = Ear()
    async with with_tls(redis_server, tmp_path) as (_, url), ear.at(url) as subscription:
        subscription.subscribe(b"one")
        await ear.confirmed.get()
        await redis_client.publish("one", "x" * 100_000)
        assert await ear.heard.get() == (b"one", b"x" * 100_000)
