"""A batch that this feeder holds: its lease, its status, and the end of its window."""

from typing import Any, Self

from contract.batches import Batch, BatchStatus, LeaseLost, Part
from contract.consumer import keep_leases
from contract.payloads.store import ObjectStore
from gateway.files import store_of
from gateway.redis.shards import GatewayShard
from gateway.state import Gateway

LEASE_S = 15.0
_RENEW_S = 1.0

CANCELLED, EXPIRED = "batch_cancelled", "batch_expired"


class LeasedBatch:
    """A batch and its lease. `batch` is as when the lease began; `status` is the latest known."""

    def __init__(self, gateway: Gateway, shard: GatewayShard, batch: Batch, token: str) -> None:
        self.gateway = gateway
        self.shard = shard
        self.batch = batch
        self.token = token
        self.status = batch.status
        self._now_ms = batch.created_ms

    @classmethod
    async def taken(cls, gateway: Gateway, shard: GatewayShard, batch_id: str, token: str) -> Self:
        """Reads a batch of a partition whose lease has just been taken. Raises LeaseLost,
        BrokerUnavailable."""
        found = await shard.ask("batch", shard.batches.find, batch_id)
        if found is None:
            raise LeaseLost(batch_id)
        leased = cls(gateway, shard, found, token)
        await leased.save()  # tells the time: the window may have ended
        return leased

    @property
    def store(self) -> ObjectStore:
        return store_of(self.gateway)

    @property
    def stop_code(self) -> str | None:
        """Why no more lines are run: the code of their errors; None while lines are run."""
        if self.status is BatchStatus.CANCELLING:
            return CANCELLED
        return EXPIRED if self.left_s <= 0 else None

    @property
    def left_s(self) -> float:
        """The seconds that are left of the batch's window."""
        return (self.batch.expires_ms - self._now_ms) / 1000

    async def parts(self) -> dict[int, Part]:
        """The parts that are recorded, by number. Raises BrokerUnavailable."""
        return await self.shard.ask("batch", self.shard.batches.parts, self.batch.id)

    async def save(self, *, gives_back: bool = False, **progress: Any) -> None:
        """Records progress. Raises LeaseLost, StatusChanged, BrokerUnavailable."""
        lease_s = 0.0 if gives_back else LEASE_S
        self.status, self._now_ms = await self.shard.ask(
            "batch", self.shard.batches.save, self.batch.id, self.token, lease_s=lease_s, **progress
        )

    async def refresh(self) -> None:
        """Renews the lease and reads the batch again. Raises LeaseLost, BrokerUnavailable."""
        await self.save()
        found = await self.shard.ask("batch", self.shard.batches.find, self.batch.id)
        if found is None:
            raise LeaseLost(self.batch.id)
        self.batch, self.status = found, found.status

    async def keep(self) -> None:
        """Renews the lease until it is lost."""
        await keep_leases(self.save, every_s=_RENEW_S)
