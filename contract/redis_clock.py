"""The time by the clock of Redis, which is the only clock that all parts share."""

from typing import Any

import redis.asyncio

from contract.connection import broker_errors, repeated
from contract.keys import Keys


async def now_ms(client: redis.asyncio.Redis, keys: Keys) -> int:
    """Unix milliseconds, moved or stopped as tests ask. Raises BrokerUnavailable."""
    with broker_errors(client, "GET or TIME"):
        raw: Any = await repeated(lambda: client.get(keys.clock_offset))
        offset = (raw or b"0").decode()
        if offset.startswith("="):
            return int(offset[1:])
        seconds, micros = await repeated(client.time)
    return int(seconds) * 1000 + int(micros) // 1000 + int(offset)
