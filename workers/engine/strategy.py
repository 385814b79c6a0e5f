"""What a batching strategy decides: which waiting sequences are let in together, and when.

Changes when a sequence runs, never what it yields. Leaves order to the policy, tokens, blocks
and limits to the scheduler, and to `batches` who belongs to which batch.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from workers.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Batch:
    """Sequences that were let in together; `sequences` are those that have not ended."""

    sequences: dict[Sequence, None]
    num_rows: int  # sequences when it was let in

    @property
    def share_left(self) -> float:
        return len(self.sequences) / self.num_rows


@dataclass(frozen=True, slots=True)
class Lobby:
    """One strategy's sequences that wait to be let in, and its batches that have not ended."""

    now_s: float
    waiting: list[Sequence]  # in the policy's order
    since_s: Mapping[Sequence, float]  # when each came into the lobby
    batches: Collection[Batch]

    def first_since_s(self, sequences: Collection[Sequence]) -> float:
        """When the first of them came."""
        return min(self.since_s[sequence] for sequence in sequences)


class Strategy(Protocol):
    """Hashable by its parameters: lanes whose strategies are equal share their batches."""

    @property
    def is_padded(self) -> bool:
        """Whether its batches are computed as rectangles: see `padding`."""
        ...

    def next_batch(self, lobby: Lobby) -> list[Sequence]:
        """Those who are let in together now, out of `lobby.waiting`; none where all must wait.

        Asked again until it says none. Never none for good while `lobby.batches` is empty.
        """
        ...

    def wake_s(self, lobby: Lobby) -> float | None:
        """When `next_batch` will say more, if until then no one comes and no one ends."""
        ...


@dataclass(frozen=True, slots=True)
class Strategies:
    """Which strategy lets in whom, by lane."""

    default: Strategy
    by_lane: Mapping[str, Strategy] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, sequence: Sequence) -> Strategy:
        return self.by_lane.get(sequence.lane, self.default)
