"""What a client of ours writes to Redis is what redis-py would write."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection

from contract.connection import connect
from infra.embedded_redis import EmbeddedRedis

pytestmark = pytest.mark.anyio

COMMANDS = (
    ("SET", "key", b"\x00\r\n\xff"),
    ("CONFIG GET", "maxmemory"),
    ("SET", "größe", "naïve 文"),
    ("ZADD", "set", -7, 1.5, ""),
    ("FCALL", "f", 1, *range(2000)),
    (b"CLIENT SETNAME", "name"),
)


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("redis://localhost", Connection),
        ("rediss://localhost", SSLConnection),
        ("unix:///tmp/socket", UnixDomainSocketConnection),
    ],
)
def test_commands_are_packed_as_redis_py_packs_them(url: str, kind: type[Connection]) -> None:
    """Text, bytes, numbers, names of two words, over every kind of connection."""
    pool: Any = connect(url).connection_pool
    connection = pool.make_connection()
    assert isinstance(connection, kind)
    for command in COMMANDS:
        ours = b"".join(connection.pack_command(*command))
        assert ours == b"".join(kind.pack_command(connection, *command))


_ECHO = """#!lua name=echo
redis.register_function('echo', function(_, args) return args[1] end)"""


@pytest.fixture
async def echo(redis_client: redis.asyncio.Redis) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of a server with a function that gives back its argument."""
    await redis_client.function_load(_ECHO, replace=True)
    yield redis_client
    await redis_client.function_delete("echo")


async def test_calls_at_the_same_time_get_their_own_answers(echo: redis.asyncio.Redis) -> None:
    """Those that follow take the same connections, of which a client keeps a few from its pool."""
    for _ in range(3):
        answers = await asyncio.gather(*(echo.fcall("echo", 0, str(i)) for i in range(20)))
        assert answers == [b"%d" % i for i in range(20)]
        [(num_free, _), (num_kept, _)] = echo.connection_pool.get_connection_count()
        assert num_free + num_kept <= 21  # the fixture's plain commands had one
        assert num_kept <= 4


async def test_an_answer_that_nobody_waited_for_reaches_nobody(
    echo: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    """A call is given up while the server holds its answer back; the next call has its own."""
    async with contextlib.aclosing(connect(redis_server.url)) as other:
        await echo.fcall("echo", 0, "warm")
        await other.client_pause(60_000, all=False)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await echo.fcall("echo", 0, "old")
        await other.client_unpause()
    assert await echo.fcall("echo", 0, "new") == b"new"


async def test_a_connection_that_the_server_closed_is_made_anew(echo: redis.asyncio.Redis) -> None:
    assert await echo.fcall("echo", 0, "1") == b"1"
    await echo.client_kill_filter(_type="normal", skipme=True)
    assert await echo.fcall("echo", 0, "2") == b"2"


async def test_values_come_back_as_they_were_written(redis_client: redis.asyncio.Redis) -> None:
    """Alone and in a pipeline."""
    values = (b"\x00\r\n", b"", "größe".encode(), b"x" * 100_000)
    for number, value in enumerate(values):
        await redis_client.set(f"alone {number}", value)
    async with redis_client.pipeline() as pipe:
        for number, value in enumerate(values):
            pipe.set(f"piped {number}", value)
        await pipe.execute()
    for number, value in enumerate(values):
        assert await redis_client.get(f"alone {number}") == value
        assert await redis_client.get(f"piped {number}") == value
