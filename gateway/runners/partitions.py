"""Starts what runs in each partition without a caller: a runner of operations, and of batches."""

import asyncio

from contract.connection import end_tasks
from contract.errors import BatchwayError
from gateway.redis.shards import GatewayShard
from gateway.runners.batches.feeder import Feeder
from gateway.runners.operations import run_operations
from gateway.state import Gateway


async def run_in_partitions(gateway: Gateway) -> None:
    """Runs until cancelled; begins when Redis has told the partitions."""
    shards = list[GatewayShard]()
    while not shards:
        try:
            shards = await gateway.broker.shards.all()
        except BatchwayError:  # the breaker logs it
            await asyncio.sleep(gateway.settings.poll_s)
    feeds = gateway.broker.payloads.store is not None
    works = [run_operations(gateway, shard) for shard in shards]
    works += [Feeder(gateway, shard).run() for shard in shards if feeds]
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.Event().wait()  # also where one of them has ended with an error
    finally:
        await end_tasks(*tasks)
