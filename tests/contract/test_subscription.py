"""A subscription receives every message of its channels, and notices the end of its connection."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError, NoPermissionError, TimeoutError

from contract.connection import Listener, connect
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.cluster import Node, partition_of_test
from tests.contract.relay import Relay, with_tls

pytestmark = pytest.mark.anyio


Received = asyncio.Queue[tuple[str, Any]]  # the type of a message and its data


async def listen_for_ever(listener: Listener) -> NoReturn:
    while True:
        await listener.listen()


@contextlib.asynccontextmanager
async def listening(
    url: str, *channels: str, look_s: float = 60.0
) -> AsyncIterator[tuple[Received, Listener, asyncio.Task[NoReturn]]]:
    """Messages received after the server's confirmation; the subscription, and its task."""
    received: Received = asyncio.Queue()
    client = connect(url, Keys("test", partition_of_test()), connect_timeout_s=5.0)
    async with contextlib.aclosing(client), client.pubsub() as pubsub:
        await pubsub.connect()
        listener = Listener(
            pubsub, lambda message: received.put_nowait((message["type"], message["data"])), look_s
        )
        if channels:
            await pubsub.subscribe(*channels)
        task = asyncio.create_task(listen_for_ever(listener))
        try:
            for number, _ in enumerate(channels, 1):
                while (got := await next_of(received, task)) != ("subscribe", number):
                    assert got[0] == "pong"
            yield received, listener, task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def next_of(received: Received, task: asyncio.Task[NoReturn]) -> tuple[str, Any]:
    """The next message. Raises the exception that ended the task."""
    getting = asyncio.ensure_future(received.get())
    await asyncio.wait([getting, task], return_when=asyncio.FIRST_COMPLETED)
    if getting.done():
        return getting.result()
    getting.cancel()
    return await task


async def data_of(received: Received, num: int) -> list[bytes]:
    """This many messages, without the replies to PINGs."""
    found: list[bytes] = []
    while len(found) < num:
        kind, data = await received.get()
        found += [data] if kind == "message" else []
    return found


async def test_a_listener_receives_all_messages_in_order(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    """From the confirmation on, and no message of another channel."""
    async with listening(redis_server.url, "one", "two") as (received, _, _):
        sent = [b"%d" % i * 1000 for i in range(200)]
        for data in sent:
            await redis_client.publish("one", data)
            await redis_client.publish("three", data)
        assert await data_of(received, len(sent)) == sent


async def test_an_interrupted_listener_loses_nothing(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    """In any turn of the event loop."""
    # A channel of its own: what another test has sent may still be on its way between servers.
    sent = [b"%d" % i * 10_000 for i in range(200)]
    async with listening(redis_server.url, "interrupted") as (received, listener, _):
        saying = asyncio.gather(*(redis_client.publish("interrupted", data) for data in sent))
        while not saying.done():
            listener.interrupt()
            await asyncio.sleep(0)
        assert sorted(await data_of(received, len(sent))) == sorted(sent)


async def test_the_end_of_the_connection_is_reported(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    async with listening(redis_server.url, "one") as (_, _, task):
        await redis_client.client_kill_filter(_type="pubsub")
        with pytest.raises(ConnectionError):
            await task


async def test_an_unreachable_server_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError):
        async with listening(f"unix://{tmp_path}/none", "one"):
            pass


async def test_a_silent_connection_is_closed(
    redis_client: redis.asyncio.Redis, redis_node: EmbeddedRedis | Node
) -> None:
    """The connection is open and no message arrives: only an unanswered PING shows that it is
    dead."""
    async with Relay(redis_node).running() as relay:
        url = f"redis://127.0.0.1:{relay.port}"
        async with listening(url, "one", look_s=0.2) as (_, listener, task):
            relay.fall_silent()
            async with asyncio.timeout(20):
                while not task.done():  # interrupts put nothing off
                    listener.interrupt()
                    await asyncio.sleep(0)
            assert isinstance(task.exception(), TimeoutError)


@pytest.mark.parametrize("channels", [(), ("one",)])
async def test_an_idle_connection_is_kept(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis, channels: tuple[str, ...]
) -> None:
    """The replies to PINGs suffice, with a channel or without one."""
    async with listening(redis_server.url, *channels, look_s=0.2) as (received, _, task):
        for _ in range(3):
            assert (await next_of(received, task))[0] == "pong"


async def test_a_redis_user_without_a_channel_gets_an_error(
    redis_client: redis.asyncio.Redis, redis_node: EmbeddedRedis | Node
) -> None:
    await redis_client.acl_setuser(
        "without-channels", enabled=True, passwords=["+secret"], commands=["+@all"], reset=True
    )
    url = redis_node.url.replace("unix://", "unix://without-channels:secret@")
    with pytest.raises(NoPermissionError):
        async with listening(url, "one"):
            pass
    await redis_client.acl_deluser("without-channels")


async def test_a_subscription_works_over_tls(
    redis_client: redis.asyncio.Redis, redis_node: EmbeddedRedis | Node, tmp_path: Path
) -> None:
    tls = with_tls(redis_node, tmp_path)
    async with tls as (_, url), listening(url, "one") as (received, _, _):
        await redis_client.publish("one", "x" * 100_000)
        assert await data_of(received, 1) == [b"x" * 100_000]
