"""Which object store a namespace uses: the first part that has one leaves its name in Redis."""

from typing import Any

import redis.asyncio

from contract.connection import broker_errors
from contract.errors import wire_errors
from contract.keys import Keys


async def known_store(client: redis.asyncio.Redis, keys: Keys, own: str) -> str:
    """The store of the namespace, which is `own` where none was known; '': no store at all.

    Raises BrokerUnavailable, CommandDenied, WireError.
    """
    with wire_errors("object store's name"), broker_errors(client, "HGET or HSETNX"):
        raw: Any = await client.hget(keys.object_store, "name")
        if raw is None and own:
            await client.hsetnx(keys.object_store, "name", own)
            raw = await client.hget(keys.object_store, "name")
    return own if raw is None else str(raw.decode(errors="replace"))
