"""What a client of ours writes to Redis is what redis-py would write."""

from typing import Any

import pytest
import redis.asyncio
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection

from contract.connection import connect

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
