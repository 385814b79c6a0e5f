"""Starts what runs in each partition without a caller: a runner of operations, and of batches."""

import asyncio

from contract.errors import BatchwayError
from gateway.redis.shards import GatewayShard
from gateway.runners.batches.feeder import Feeder
from gateway.runners.operations import run_operations
from gateway.state import Gateway


async def start_in_partitions(gateway: Gateway, duties: list[asyncio.Task[None]]) -> None:
    """Adds tasks that run until cancelled to `duties`, once Redis has told the partitions."""
    shards = list[GatewayShard]()
    while not shards:
        try:
            shards = await gateway.broker.shards.all()
        except BatchwayError:  # the breaker logs it
            await asyncio.sleep(gateway.settings.poll_s)
    for shard in shards:
        duties.append(asyncio.create_task(run_operations(gateway, shard)))
        if gateway.broker.payloads.store is not None:
            duties.append(asyncio.create_task(Feeder(gateway, shard).run()))
