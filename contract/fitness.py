"""Whether a Redis may hold jobs at all: one that evicts keys would drop them without a word."""

from typing import Any

import redis.asyncio
from redis.exceptions import NoPermissionError

from contract.connection import broker_errors
from contract.errors import BrokerUnfit

FIT_POLICY = "noeviction"


async def check_fitness(client: redis.asyncio.Redis) -> None:
    """Raises BrokerUnfit, BrokerUnavailable. Asks INFO, for managed services have no CONFIG; where
    that is not allowed either, whoever deploys answers for it.
    """
    try:
        with broker_errors():
            memory: Any = await client.info("memory")
    except NoPermissionError:
        return
    policy = memory.get("maxmemory_policy", FIT_POLICY)
    if policy != FIT_POLICY:
        raise BrokerUnfit(
            f"Redis would evict jobs when its memory is full: its maxmemory-policy is {policy}; "
            f"set it to {FIT_POLICY}"
        )
