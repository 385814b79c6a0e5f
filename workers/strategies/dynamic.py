"""Dynamic batching: what comes within a short window, or up to a number, starts together."""

from bisect import bisect_left
from dataclasses import dataclass

from workers.engine.sequence import Sequence
from workers.engine.strategy import Lobby


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
