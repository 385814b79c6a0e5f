"""Who runs, that is holds blocks; and the streams among them, which need one token each.

Most of a step's work is the streams' and the same for each, so it is done for all of them in a
few passes. Leaves to the scheduler who may run and what they get.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from workers.engine.sequence import Account, Sequence


@dataclass(frozen=True, slots=True)
class Streams:
    """In the order in which they were let in; `num_kv` are the tokens of all."""

    sequences: list[Sequence] = field(default_factory=list)
    num_kv: int = 0
    num_by_account: Mapping[Account, int] = field(default_factory=dict)

    @property
    def features(self) -> tuple[float, float, float]:
        """What `step_features` says of a token for each."""
        return float(len(self.sequences)), float(self.num_kv), 0.0

    def without(self, sequence: Sequence) -> "Streams":
        """The same but for one of them."""
        sequences = self.sequences.copy()
        sequences.remove(sequence)
        num_by_account = Counter(self.num_by_account) - Counter((sequence.account,))
        return Streams(sequences, self.num_kv - sequence.num_known, num_by_account)


class Running:
    """The running sequences, and how many of them are whose: that changes less often than each
    step, so it is kept.
    """

    def __init__(self) -> None:
        # A set in order of insertion: removal is constant-time, iteration deterministic.
        self.sequences: dict[Sequence, None] = {}
        self._num_by_account: Counter[Account] = Counter()

    @property
    def lanes(self) -> set[str]:
        """In which anybody runs."""
        return {lane for lane, _ in self._num_by_account}

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence] = None
        self._num_by_account[sequence.account] += 1

    def discard(self, sequence: Sequence) -> None:
        """Forgets who is there."""
        if sequence in self.sequences:
            del self.sequences[sequence]
            self._leave(sequence.account)

    def move(self, sequence: Sequence, lane: str) -> None:
        """Puts the sequence, running or not, into another lane; it keeps its place."""
        before = sequence.account
        sequence.lane = lane
        if sequence in self.sequences:
            self._leave(before)
            self._num_by_account[sequence.account] += 1

    def streams(self) -> Streams:
        """As of now."""
        streams = [s for s in self.sequences if len(s.token_ids) == s.num_computed + 1]
        num_kv = sum([s.num_computed for s in streams]) + len(streams)
        num_by_account = self._num_by_account.copy()
        if len(streams) < len(self.sequences):
            are_streams = set(streams)
            num_by_account -= Counter(s.account for s in self.sequences if s not in are_streams)
        return Streams(streams, num_kv, num_by_account)

    def _leave(self, account: Account) -> None:
        self._num_by_account[account] -= 1
        if self._num_by_account[account] == 0:
            del self._num_by_account[account]
