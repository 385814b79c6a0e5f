"""Static batching: a full batch starts together, and the next one when it has ended."""

from dataclasses import dataclass

from workers.engine.sequence import Sequence
from workers.engine.strategy import Lobby


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
