"""A scheduled Lambda function: loads the function library into Redis and ends overdue jobs.

It runs after each deployment, too. No other role may load functions.
"""

import asyncio
from typing import Any

from contract.function_types import Swept
from contract.library import ensure_library
from contract.shards import OpenShards, Shard
from gateway.aws.environment import load_settings
from gateway.settings import GatewaySettings


def handler(_event: Any, _context: Any) -> dict[str, int]:
    """The entry point of HousekeeperFunction; returns what the sweep found."""
    return asyncio.run(sweep(load_settings()))


async def sweep(settings: GatewaySettings) -> dict[str, int]:
    """Sweeps all partitions. Raises BrokerUnavailable, after those that answer are swept."""
    shards = OpenShards(settings.redis_url, settings.namespace)
    async with shards:
        swept = await asyncio.gather(
            *(_sweep(shard) for shard in await shards.all()), return_exceptions=True
        )
    found = list[Swept]()
    for each in swept:
        if isinstance(each, BaseException):
            raise each
        found.append(each)
    return {
        "leases_lapsed": sum(each.num_lapsed for each in found),
        "jobs_expired": sum(each.num_expired for each in found),
        "jobs_unattended": sum(each.num_unattended for each in found),
    }


async def _sweep(shard: Shard) -> Swept:
    await ensure_library(shard.client)
    return await shard.functions.sweep()
