"""Our Redis clients: each call gets its own reply, whatever happened to earlier calls."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError, TimeoutError

from contract.connection import connect, repeated
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.callbacks.test_tls import certificate
from tests.cluster import Node, partition_of_test
from tests.contract.relay import Relay, with_tls
from tests.fleet import until

pytestmark = pytest.mark.anyio

_LIBRARY = """#!lua name=echo
redis.register_function('echo', function(_, args) return args[1] end)"""


@pytest.fixture
async def echo(redis_client: redis.asyncio.Redis) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of a server with a function that returns its argument."""
    await redis_client.function_load(_LIBRARY, replace=True)
    yield redis_client
    await redis_client.function_delete("echo")


@contextlib.asynccontextmanager
async def paused(client: redis.asyncio.Redis) -> AsyncIterator[None]:
    """The server holds writes and functions back meanwhile."""
    await client.client_pause(60_000, all=False)
    try:
        yield
    finally:
        await client.client_unpause()


async def test_a_client_can_be_used_after_a_cancelled_call(
    echo: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    """The next call uses a new connection, without an old reply."""
    impatient = connect(redis_server.url, Keys("test", partition_of_test()), command_timeout_s=0.1)
    async with contextlib.aclosing(impatient):
        assert await impatient.fcall("echo", 0, "warm") == b"warm"
        async with paused(echo):
            with pytest.raises(TimeoutError):
                await impatient.fcall("echo", 0, "old")
        assert await impatient.fcall("echo", 0, "new") == b"new"


async def test_the_reply_of_a_cancelled_call_is_discarded(
    echo: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    """A call is cancelled while the server delays its reply: redis-py closes the connection, and
    the next call opens another."""
    async with connect(redis_server.url, Keys("test", partition_of_test())) as client:
        assert await client.fcall("echo", 0, "warm") == b"warm"
        number = str(await client.client_id())

        async def flags() -> str:
            """Of the call's connection, among those of other tests; "" if it is closed."""
            found = [each["flags"] for each in await echo.client_list() if each["id"] == number]
            return str(found[0]) if found else ""

        async def is_held_back() -> bool:
            return "b" in await flags()

        async def is_closed() -> bool:
            return not await flags()

        async with paused(echo):
            call = asyncio.ensure_future(client.fcall("echo", 0, "old"))
            await until(is_held_back)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        await until(is_closed)
        for text in ("new", "newer"):
            assert await client.fcall("echo", 0, text) == text.encode()


async def test_a_call_cancelled_at_any_point_harms_no_other(
    echo: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    """After any number of turns of the event loop: while a connection is opened, written to or
    read."""
    for num_turns in range(40):
        async with connect(redis_server.url, Keys("test", partition_of_test())) as client:
            call = asyncio.ensure_future(client.fcall("echo", 0, "old"))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            other = asyncio.ensure_future(client.fcall("echo", 0, "other"))
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert await other == b"other"
            for i in range(3):
                assert await client.fcall("echo", 0, str(i)) == str(i).encode()


async def test_only_idempotent_calls_are_repeated(
    redis_client: redis.asyncio.Redis, redis_node: EmbeddedRedis | Node, keys: Keys
) -> None:
    """The server executes the call, and its reply is lost."""
    number = keys.of("number")
    async with Relay(redis_node).running() as relay:
        client = connect(f"redis://127.0.0.1:{relay.port}", keys, connect_timeout_s=5.0)
        async with contextlib.aclosing(client):
            await client.ping()
            relay.lose_next_answer()
            with pytest.raises(ConnectionError):
                await client.incr(number)
            assert await redis_client.get(number) == b"1"
            await client.ping()
            relay.lose_next_answer()
            assert await repeated(lambda: client.incr(number)) == 3


async def test_a_server_that_closes_after_its_greeting_fails_the_call(
    tmp_path: Path,
) -> None:
    """The end of the connection arrives with the last reply, before the client waits for it."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received = b""
        while b"SELECT" not in received and (data := await reader.read(1000)):
            received += data
            if b"PING" in data:
                writer.write(b"+PONG\r\n")
        writer.write(b"+OK\r\n")
        writer.close()

    pem = certificate(tmp_path / "server.pem", "localhost")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pem)
    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=tls)
    url = f"rediss://localhost:{server.sockets[0].getsockname()[1]}/1?ssl_ca_certs={pem}"
    client = connect(
        url, Keys("test", partition_of_test()), connect_timeout_s=5.0, command_timeout_s=None
    )
    async with server, contextlib.aclosing(client):
        for _ in range(5):
            async with asyncio.timeout(20):
                with pytest.raises(ConnectionError):
                    await client.fcall("echo", 0, "x")


async def test_calls_work_over_tls(
    echo: redis.asyncio.Redis, redis_node: EmbeddedRedis | Node, tmp_path: Path
) -> None:
    """Also replies that span several TLS records."""
    async with (
        with_tls(redis_node, tmp_path) as (relay, url),
        connect(url, Keys("test", partition_of_test()), connect_timeout_s=5.0) as client,
    ):
        for text in ("short", "long" * 50_000):
            assert await client.fcall("echo", 0, text) == text.encode()
        assert relay.num_connections == 1
