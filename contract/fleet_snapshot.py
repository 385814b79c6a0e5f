"""A model's lanes, workers and totals at one moment."""

from collections.abc import Mapping

import msgspec


class LaneSnapshot(msgspec.Struct, frozen=True):
    """A lane's waiting and running jobs. Costs in tokens; 0 s where no job waits."""

    num_queued: int
    queued_tokens: int
    num_running: int
    running_tokens: int
    oldest_wait_s: float  # since the first waiting job was submitted


class WorkerSnapshot(msgspec.Struct, frozen=True):
    """A live worker by its last heartbeat, `seen_s` seconds ago."""

    incarnation: str
    seen_s: float
    num_jobs_held: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use, from 0 to 1."""
        if not self.num_blocks or not self.num_running:
            return 0.0
        return 1.0 - self.num_free_blocks / self.num_blocks


class FleetSnapshot(msgspec.Struct, frozen=True):
    """`totals` by field, see contract/lua/_totals.lua; `deliveries` of callbacks by outcome."""

    now_s: float  # of the Redis clock
    lanes: Mapping[str, LaneSnapshot]
    workers: tuple[WorkerSnapshot, ...]
    totals: Mapping[str, int]
    deliveries: Mapping[str, int]
