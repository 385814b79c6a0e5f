"""What Redis knows of the object store: its name, and the objects of forgotten jobs."""

from typing import Any

import redis.asyncio

from contract.connection import broker_errors
from contract.errors import wire_errors
from contract.keys import Keys


async def known_store(client: redis.asyncio.Redis, keys: Keys, own: str) -> str:
    """The name of the namespace's object store; '' for none. The first part that has a store
    leaves its name, `own`, in Redis.

    Raises BrokerUnavailable, CommandDenied, WireError.
    """
    with wire_errors("object store's name"), broker_errors(client, "HGET or HSETNX"):
        raw: Any = await client.hget(keys.of("object_store"), "name")
        if raw is None and own:
            await client.hsetnx(keys.of("object_store"), "name", own)
            raw = await client.hget(keys.of("object_store"), "name")
    return own if raw is None else str(raw.decode(errors="replace"))


async def orphaned_jobs(client: redis.asyncio.Redis, keys: Keys, max_jobs: int) -> list[str]:
    """Ids of forgotten jobs whose objects are not deleted yet; `delete` and `sweep` list them.

    Raises BrokerUnavailable, WireError.
    """
    with wire_errors("list of orphaned objects"), broker_errors(client, "SRANDMEMBER"):
        found: Any = await client.srandmember(keys.of("orphaned"), max_jobs)
    return [job_id.decode(errors="replace") for job_id in found or ()]


async def clear_orphan(client: redis.asyncio.Redis, keys: Keys, job_id: str) -> None:
    """Takes a job off the list once its objects are deleted. Raises BrokerUnavailable."""
    with broker_errors(client, "SREM"):
        await client.srem(keys.of("orphaned"), job_id)
