"""Forgotten jobs whose objects are still to be deleted.

`delete` and `sweep` write the list; whoever knows the object store works it off, and takes a job
off it only when the store has answered.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import redis.asyncio

from contract.connection import broker_errors
from contract.errors import wire_errors
from contract.keys import Keys


class OrphanedObjects(msgspec.Struct, frozen=True):
    """The list of one partition. Every method raises BrokerUnavailable, WireError."""

    client: redis.asyncio.Redis
    keys: Keys

    async def some(self, max_jobs: int) -> list[str]:
        """Ids of jobs, any so many."""
        with wire_errors("list of orphaned objects"), broker_errors(self.client, "SRANDMEMBER"):
            found: Any = await self.client.srandmember(self.keys.orphaned, max_jobs)
        return [job_id.decode(errors="replace") for job_id in found or ()]

    async def cleared(self, job_ids: Sequence[str]) -> None:
        """These jobs have no objects any more."""
        if job_ids:
            with broker_errors(self.client, "SREM"):
                await self.client.srem(self.keys.orphaned, *job_ids)
