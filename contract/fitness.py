"""Whether a Redis may hold jobs at all, and how much: one that evicts keys would drop jobs."""

from typing import Any

import redis.asyncio
from redis.exceptions import NoPermissionError

from contract.connection import broker_errors
from contract.errors import BrokerUnfit

FIT_POLICY = "noeviction"


async def check_fitness(client: redis.asyncio.Redis) -> None:
    """Raises BrokerUnfit, BrokerUnavailable. Where INFO is not allowed, whoever deploys answers for
    it.
    """
    policy = (await _memory(client)).get("maxmemory_policy", FIT_POLICY)
    if policy != FIT_POLICY:
        raise BrokerUnfit(
            f"Redis would evict jobs when its memory is full: its maxmemory-policy is {policy}; "
            f"set it to {FIT_POLICY}"
        )


async def max_memory(client: redis.asyncio.Redis) -> tuple[int, bool]:
    """The bytes that Redis may use, and whether its `maxmemory` says so; else they are those of its
    machine, and 0 where INFO is not allowed. Raises BrokerUnavailable.
    """
    memory = await _memory(client)
    limit = int(memory.get("maxmemory", 0))
    return limit or int(memory.get("total_system_memory", 0)), limit > 0 or not memory


async def _memory(client: redis.asyncio.Redis) -> dict[str, Any]:
    """Of INFO, for managed services have no CONFIG; nothing where it is not allowed."""
    try:
        with broker_errors():
            found: dict[str, Any] = await client.info("memory")
    except NoPermissionError:
        return {}
    return found
