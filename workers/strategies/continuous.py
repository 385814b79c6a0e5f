"""Continuous batching: a sequence joins as soon as the step has tokens left for it."""

from dataclasses import dataclass

from workers.engine.sequence import Sequence
from workers.engine.strategy import Lobby


@dataclass(frozen=True, slots=True)
class ContinuousBatching:
    """Iteration-level scheduling (Orca, OSDI 2022) with chunked prefill (Sarathi-Serve, 2024)."""

    is_padded: bool = False  # its batches hold whoever came between two steps: no rectangle

    def next_batch(self, lobby: Lobby) -> list[Sequence]:
        return lobby.waiting

    def wake_s(self, lobby: Lobby) -> float | None:
        return lobby.first_since_s(lobby.waiting)
