"""What a client of ours writes to Redis is what redis-py would write."""

import pytest
import redis.asyncio
from redis.asyncio.connection import Connection

from contract.redis_link import packed

pytestmark = pytest.mark.anyio

COMMANDS = (
    ("SET", "key", b"\x00\r\n\xff"),
    ("SET", "größe", "naïve 文"),
    ("ZADD", "set", -7, 1.5, ""),
    ("FCALL", "f", 1, *range(2000)),
)


def test_commands_are_packed_as_redis_py_packs_them() -> None:
    """Text, bytes and numbers."""
    for command in COMMANDS:
        assert packed(*command) == b"".join(Connection().pack_command(*command))


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
