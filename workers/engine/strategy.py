"""Batching strategies: which waiting sequences start together, and when.

A strategy changes when a sequence runs, never its output.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from workers.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Batch:
    """Sequences admitted together; `sequences` are those that have not ended."""

    sequences: dict[Sequence, None]
    num_rows: int  # sequences when it was admitted

    @property
    def share_left(self) -> float:
        return len(self.sequences) / self.num_rows


@dataclass(frozen=True, slots=True)
class Lobby:
    """One strategy's waiting sequences and open batches."""

    now_s: float
    waiting: list[Sequence]  # in the policy's order
    since_s: Mapping[Sequence, float]  # when each entered the lobby
    batches: Collection[Batch]

    def first_since_s(self, sequences: Collection[Sequence]) -> float:
        """When the first of them entered."""
        return min(self.since_s[sequence] for sequence in sequences)


class Strategy(Protocol):
    """Hashable by its parameters: lanes with equal strategies share batches."""

    @property
    def is_padded(self) -> bool:
        """Whether its batches are computed as rectangles: see `padding`."""
        ...

    def next_batch(self, lobby: Lobby) -> list[Sequence]:
        """The sequences of `lobby.waiting` to admit together now; empty if all must wait. Called
        again until it returns none. Must not return none for ever while `lobby.batches` is empty.
        """
        ...

    def wake_s(self, lobby: Lobby) -> float | None:
        """When `next_batch` will admit more without arrivals or ends."""
        ...


@dataclass(frozen=True, slots=True)
class Strategies:
    """The strategy of each lane."""

    default: Strategy
    by_lane: Mapping[str, Strategy] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, sequence: Sequence) -> Strategy:
        return self.by_lane.get(sequence.lane, self.default)
