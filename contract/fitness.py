"""Checks that the configuration of Redis keeps jobs, and reads its memory limit."""

import logging
from typing import Any

import redis.asyncio
from redis.exceptions import ResponseError

from contract.connection import broker_errors, repeated
from contract.errors import BrokerUnfit, CommandDenied

FIT_POLICY = "noeviction"

# The first Valkey that reverts all writes of a function whose block is incomplete in the
# append-only file. No version of Redis does.
_WHOLE_SINCE_VALKEY = (9, 1, 2)

log = logging.getLogger("batchway.redis")


async def check_fitness(client: redis.asyncio.Redis) -> None:
    """Checks the server. Raises BrokerUnfit, BrokerUnavailable, CommandDenied."""
    with broker_errors(client, "INFO"):  # INFO, since managed services have no CONFIG
        known = await repeated(lambda: client.info("memory", "persistence", "server"))
    policy = known.get("maxmemory_policy", FIT_POLICY)
    if policy != FIT_POLICY:
        raise BrokerUnfit(
            f"Redis would evict jobs when its memory is full: its maxmemory-policy is {policy}; "
            f"set it to {FIT_POLICY}"
        )
    if known.get("aof_enabled") and not _reverts_blocks(known) and not await _refuses(client):
        log.warning(
            "after a power cut this Redis may run half of a function's writes: "
            "set its aof-load-truncated to no (docs/deployment.md)"
        )


def _reverts_blocks(known: dict[str, Any]) -> bool:
    version = str(known.get("valkey_version", "0")).split(".")
    return tuple(int(part) for part in version if part.isdigit()) >= _WHOLE_SINCE_VALKEY


async def _refuses(client: redis.asyncio.Redis) -> bool:
    """Whether Redis refuses to start with a truncated append-only file. False where CONFIG is not
    allowed or missing, as for the users of docs/security.md and in managed services."""
    try:
        with broker_errors(client, "CONFIG GET"):
            found: Any = await client.config_get("aof-load-truncated")
    except (CommandDenied, ResponseError) as exc:
        log.info("aof-load-truncated is not known: CONFIG GET failed with %s", type(exc).__name__)
        return False
    return bool(found["aof-load-truncated"] == "no")


async def max_memory(client: redis.asyncio.Redis) -> tuple[int, bool]:
    """The bytes that Redis may use: its `maxmemory`, or the machine's memory where none is set; and
    whether `maxmemory` is set. Raises BrokerUnavailable, CommandDenied.
    """
    with broker_errors(client, "INFO"):
        memory = await client.info("memory")
    limit = int(memory.get("maxmemory", 0))
    return limit or int(memory.get("total_system_memory", 0)), limit > 0
