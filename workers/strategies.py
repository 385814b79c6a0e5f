"""When waiting sequences may start: continuous, static and dynamic batching."""

from bisect import bisect_left
from dataclasses import dataclass

from workers.engine.sequence import Sequence
from workers.engine.strategy import Lobby


@dataclass(frozen=True, slots=True)
class ContinuousBatching:
    """Iteration-level scheduling (Orca, OSDI 2022) with chunked prefill (Sarathi-Serve, 2024)."""

    is_padded: bool = False  # continuous batches are never padded

    def next_batch(self, lobby: Lobby) -> list[Sequence]:
        return lobby.waiting

    def wake_s(self, lobby: Lobby) -> float | None:
        return lobby.first_since_s(lobby.waiting)


@dataclass(frozen=True, slots=True)
class StaticBatching:
    """Waits for `batch_size` sequences, or until the first has waited `max_wait_s`.

    `drain_share` shortens the tail: the next batch may start once no more than that share of
    every batch before it still runs. At 0 each batch runs to its end alone.
    """

    batch_size: int = 8
    max_wait_s: float = 1.0
    drain_share: float = 0.0
    is_padded: bool = False

    def next_batch(self, lobby: Lobby) -> list[Sequence]:
        wake_s = self.wake_s(lobby)
        if wake_s is None or not lobby.waiting:
            return []
        if len(lobby.waiting) < self.batch_size and lobby.now_s < wake_s:
            return []
        return lobby.waiting[: self.batch_size]

    def wake_s(self, lobby: Lobby) -> float | None:
        if not lobby.waiting or any(batch.share_left > self.drain_share for batch in lobby.batches):
            return None
        return lobby.first_since_s(lobby.waiting) + self.max_wait_s


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """Lets in a batch once it is full, or when `window_s` has passed since its first came.

    Batches run beside each other. With `bucket_edges`, say (64, 256), a batch holds prompts of
    one bucket only (here up to 64, up to 256, and longer), which limits its padding.
    """

    batch_size: int = 8
    window_s: float = 0.02
    bucket_edges: tuple[int, ...] = ()  # tokens, ascending
    is_padded: bool = False

    def next_batch(self, lobby: Lobby) -> list[Sequence]:
        for bucket in self._buckets(lobby):
            is_over = lobby.now_s >= lobby.first_since_s(bucket) + self.window_s
            if is_over or len(bucket) >= self.batch_size:
                return bucket[: self.batch_size]
        return []

    def wake_s(self, lobby: Lobby) -> float | None:
        return lobby.first_since_s(lobby.waiting) + self.window_s if lobby.waiting else None

    def _buckets(self, lobby: Lobby) -> list[list[Sequence]]:
        """The waiting by bucket, each in the policy's order, the one with the first first."""
        buckets: dict[int, list[Sequence]] = {}
        for sequence in lobby.waiting:
            bucket = bisect_left(self.bucket_edges, sequence.num_known)
            buckets.setdefault(bucket, []).append(sequence)
        return list(buckets.values())
