"""Functions are called over one connection, each call with its own answer and its own patience."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from contract.connection import connect, new_connection
from contract.function_calls import FunctionCalls
from contract.redis_link import packed
from infra.embedded_redis import EmbeddedRedis
from tests.callbacks.test_tls import certificate
from tests.contract.relay import with_tls
from tests.fleet import until

pytestmark = pytest.mark.anyio

_LIBRARY = """#!lua name=echo
redis.register_function('echo', function(_, args) return args[1] end)
redis.register_function('fail', function(_, args) return redis.error_reply(args[1]) end)"""


@pytest.fixture
async def echo(redis_client: redis.asyncio.Redis) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of a server with a function that gives back its argument, and one that fails."""
    await redis_client.function_load(_LIBRARY, replace=True)
    yield redis_client
    await redis_client.function_delete("echo")


def says(text: str) -> bytes:
    return packed("FCALL", "echo", 0, text)


async def num_connections(client: redis.asyncio.Redis) -> int:
    return len(await client.client_list())


async def test_calls_at_the_same_time_get_their_own_answers(echo: redis.asyncio.Redis) -> None:
    """Those that go wrong too; all share one connection."""
    num_before = await num_connections(echo)
    for _ in range(3):
        calls = [echo.fcall("fail" if i % 5 == 0 else "echo", 0, f"E {i}") for i in range(20)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for i, answer in enumerate(answers):
            if i % 5 == 0:
                assert isinstance(answer, ResponseError)
                assert str(answer) == f"E {i}"
            else:
                assert answer == b"E %d" % i
    assert await num_connections(echo) == num_before + 1


async def test_a_call_is_given_up_alone(
    echo: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    """A later one on its connection still gets its answer, and then the connection is closed: calls
    to come are refused."""
    now_s = 0.0
    async with contextlib.aclosing(connect(redis_server.url)) as other:
        calls = FunctionCalls(new_connection(other), timeout_s=0.05, clock=lambda: now_s)
        await calls.open()
        await other.client_pause(60_000, all=False)
        early = asyncio.create_task(calls.call(says("early")))
        await asyncio.sleep(0)
        now_s = 0.04
        late = asyncio.create_task(calls.call(says("late")))
        await asyncio.sleep(0)
        now_s = 0.06
        with pytest.raises(TimeoutError):
            await early
        with pytest.raises(ConnectionError):
            await calls.call(says("too late"))
        num_before = await num_connections(echo)
        await other.client_unpause()
        assert await late == b"late"

        async def is_closed() -> bool:
            return await num_connections(echo) < num_before

        await until(is_closed)
        await calls.aclose()


async def test_a_client_goes_on_after_a_call_that_it_gave_up(
    echo: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    """On a connection of its own, where no old answer waits."""
    impatient = connect(redis_server.url, retries=0, command_timeout_s=0.1)
    async with contextlib.aclosing(impatient):
        assert await impatient.fcall("echo", 0, "warm") == b"warm"
        await echo.client_pause(60_000, all=False)
        with pytest.raises(TimeoutError):
            await impatient.fcall("echo", 0, "old")
        await echo.client_unpause()
        assert await impatient.fcall("echo", 0, "new") == b"new"


async def test_an_answer_that_nobody_waited_for_reaches_nobody(
    echo: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    """A call is cancelled while the server holds its answer back; the next call has its own, over
    the same connection."""
    num_before = await num_connections(echo)
    async with contextlib.aclosing(connect(redis_server.url)) as other:
        await echo.fcall("echo", 0, "warm")
        await other.client_pause(60_000, all=False)
        call = asyncio.ensure_future(echo.fcall("echo", 0, "old"))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await other.client_unpause()
    assert await echo.fcall("echo", 0, "new") == b"new"
    assert await num_connections(echo) == num_before + 1


async def test_a_connection_that_the_server_closed_is_made_anew(
    echo: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    """Also for calls that were waiting on it: they are made once more."""
    assert await echo.fcall("echo", 0, "1") == b"1"
    await echo.client_kill_filter(_type="normal", skipme=True)
    assert await echo.fcall("echo", 0, "2") == b"2"
    async with contextlib.aclosing(connect(redis_server.url)) as other:
        await other.client_pause(60_000, all=False)
        calls = [asyncio.ensure_future(echo.fcall("echo", 0, str(i))) for i in range(5)]
        await other.ping()
        await other.client_kill_filter(_type="normal", skipme=True)
        await other.client_unpause()
        assert await asyncio.gather(*calls) == [b"%d" % i for i in range(5)]


async def test_an_absent_server_fails_every_call(tmp_path: Path) -> None:
    """Those that ask for a connection at the same time share the attempt, and what comes of it."""
    async with contextlib.aclosing(connect(f"unix://{tmp_path}/none", retries=1)) as client:
        calls = [client.fcall("echo", 0, "x") for _ in range(5)]
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(answer, ConnectionError)


async def test_a_server_that_closes_as_soon_as_it_has_greeted_fails_the_call(
    tmp_path: Path,
) -> None:
    """Its end comes with its last word, before anybody listens for it."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = b""
        while b"SELECT" not in said and (data := await reader.read(1000)):
            said += data
            if b"PING" in data:
                writer.write(b"+PONG\r\n")
        writer.write(b"+OK\r\n")
        writer.close()

    pem = certificate(tmp_path / "server.pem", "localhost")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pem)
    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=tls)
    url = f"rediss://localhost:{server.sockets[0].getsockname()[1]}/1?ssl_ca_certs={pem}"
    client = connect(url, retries=0, connect_timeout_s=5.0, command_timeout_s=None)
    async with server, contextlib.aclosing(client):
        for _ in range(5):
            async with asyncio.timeout(20):
                with pytest.raises(ConnectionError):
                    await client.fcall("echo", 0, "x")


async def test_a_call_that_is_cancelled_as_its_connection_opens_harms_no_other(
    echo: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    async with contextlib.aclosing(connect(redis_server.url)) as client:
        first = asyncio.ensure_future(client.fcall("echo", 0, "first"))
        second = asyncio.ensure_future(client.fcall("echo", 0, "second"))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == b"second"
        with pytest.raises(asyncio.CancelledError):
            await first


async def test_calls_go_through_tls(
    echo: redis.asyncio.Redis, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    """Answers that come in many records too."""
    async with (
        with_tls(redis_server, tmp_path) as (relay, url),
        contextlib.aclosing(connect(url, connect_timeout_s=5.0)) as client,
    ):
        for text in ("short", "long" * 50_000):
            assert await client.fcall("echo", 0, text) == text.encode()
        assert relay.num_connections == 1
