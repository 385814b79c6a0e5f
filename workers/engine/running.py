"""The running sequences (those that hold blocks), and the streams among them.

Streams need one token each and are most of a step's work, so they are processed together in a few
passes.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from workers.engine.sequence import Account, Sequence


@dataclass(frozen=True, slots=True)
class Streams:
    """Streams in admission order; `num_kv` is their total of tokens."""

    sequences: list[Sequence] = field(default_factory=list)
    num_kv: int = 0
    num_by_account: Mapping[Account, int] = field(default_factory=dict)

    @property
    def features(self) -> tuple[float, float, float]:
        """`step_features` of one token for each stream."""
        return float(len(self.sequences)), float(self.num_kv), 0.0

    def without(self, others: Collection[Sequence]) -> "Streams":
        """The same without some of the streams."""
        sequences = [sequence for sequence in self.sequences if sequence not in others]
        num_by_account = Counter(self.num_by_account) - Counter([s.account for s in others])
        num_kv = self.num_kv - sum([s.num_known for s in others])
        return Streams(sequences, num_kv, num_by_account)


class Running:
    """The running sequences, all and by account; updated incrementally, as few change in a step."""

    def __init__(self) -> None:
        # Dicts as ordered sets: constant-time removal, deterministic iteration.
        self.sequences: dict[Sequence, None] = {}
        self.by_account: dict[Account, dict[Sequence, None]] = {}  # without empty ones
        self.num_changes = 0

    def weight_of(self, account: Account) -> float:
        """The weight of an account's latest running sequence."""
        return next(reversed(self.by_account[account])).weight

    def places_by_weight(self, account: Account, weight: float, more: int = 0) -> float:
        """A tenant's places in a lane, plus `more`, divided by its weight."""
        return (len(self.by_account.get(account, ())) + more) / weight

    def most_places(self, account: Account, weight: float) -> Account | None:
        """The tenant to take a place from, if it then still has no less per weight."""
        left = {
            other: self.places_by_weight(other, self.weight_of(other), -1)
            for other in self.by_account
            if other[0] == account[0] and other != account
        }
        found = max(left, key=left.__getitem__, default=None)
        if found is None or left[found] < self.places_by_weight(account, weight, 1):
            return None
        return found

    def below_share(self, waiting: Iterable[Sequence]) -> list[Account]:
        """The accounts of those sequences for which `most_places` finds a tenant."""
        most: dict[str, float] = {}
        for account in self.by_account:
            has = self.places_by_weight(account, self.weight_of(account), -1)
            most[account[0]] = max(most.get(account[0], 0.0), has)
        return [
            s.account
            for s in waiting
            if most.get(s.lane, 0.0) >= self.places_by_weight(s.account, s.weight, 1)
        ]

    def add(self, sequence: Sequence) -> None:
        self.num_changes += 1
        self.sequences[sequence] = None
        self.by_account.setdefault(sequence.account, {})[sequence] = None

    def discard(self, sequence: Sequence) -> None:
        """Removes a sequence, if it runs."""
        if sequence in self.sequences:
            self.num_changes += 1
            del self.sequences[sequence]
            self._leave(sequence)

    def move(self, sequence: Sequence, lane: str) -> None:
        """Puts the sequence, running or not, into another lane; its order among all stays."""
        if sequence not in self.sequences:
            sequence.lane = lane
            return
        self.num_changes += 1
        self._leave(sequence)
        sequence.lane = lane
        self.add(sequence)

    def streams(self, held: Collection[Sequence] = ()) -> Streams:
        """The current streams, without the `held` ones."""
        streams = [s for s in self.sequences if len(s.token_ids) == s.num_computed + 1]
        if held:
            streams = [s for s in streams if s not in held]
        num_kv = sum([s.num_computed for s in streams]) + len(streams)
        num_by_account = {account: len(running) for account, running in self.by_account.items()}
        if len(streams) < len(self.sequences):
            num_by_account = Counter([s.account for s in streams])
        return Streams(streams, num_kv, num_by_account)

    def _leave(self, sequence: Sequence) -> None:
        running = self.by_account[sequence.account]
        del running[sequence]
        if not running:
            del self.by_account[sequence.account]
