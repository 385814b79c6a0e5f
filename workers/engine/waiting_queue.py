"""Those who wait, in order once they may run; their number costs a step nothing.

All of one lane and tenant have the same level, and by what stays as it is while they wait they
are kept in order. A step merges these queues from their heads, as far as it lets sequences in.
Leaves to strategies who may run, and to the admission check whether there is room.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterator
from heapq import heapify, heappop, heapreplace

from workers.engine.lanes import Lanes
from workers.engine.policies import Key, Policy
from workers.engine.sequence import Account, Sequence

# What a sequence keeps while it waits: its standing, its arrival, and a number of its own.
_Place = tuple[Key, int, int]
# Level, running before waiting, streams before prompts, the policy's key, arrival, a number.
Rank = tuple[int, bool, bool, Key, int, int]


class WaitingQueue:
    """Queues by lane and tenant, each in the policy's order."""

    def __init__(self, lanes: Lanes, policy: Policy) -> None:
        self._lanes = lanes
        self._policy = policy
        self._queues: dict[Account, list[tuple[_Place, Sequence]]] = {}
        self._places: dict[Sequence, _Place | None] = {}  # None: a strategy keeps it
        self._num_in: Counter[str] = Counter()  # by lane, kept or not; none is 0
        self._num_queued_in: Counter[str] = Counter()
        self._next_number = 0
        self.num_changes = 0  # of who is in `accounts`

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def lanes(self) -> tuple[str, ...]:
        """In which anybody waits, by name."""
        return tuple(sorted(self._num_in))

    @property
    def first_priority(self) -> int | None:
        """Of the lanes in which anybody is in a queue; None where nobody is."""
        return min(map(self._lanes.priority_of, self._num_queued_in), default=None)

    @property
    def accounts(self) -> Collection[Account]:
        """Lanes and tenants with anybody in a queue."""
        return self._queues.keys()

    def first_of(self, account: Account) -> Sequence:
        """The first in a queue."""
        return self._queues[account][0][1]

    def is_queued(self, sequence: Sequence) -> bool:
        """Whether it waits and may run."""
        return self._places.get(sequence) is not None

    def add(self, sequence: Sequence) -> None:
        self._places[sequence] = None
        self._num_in[sequence.lane] += 1

    def let_in(self, sequence: Sequence, now_s: float) -> None:
        """From now on it may run."""
        place = (self._policy.standing(sequence, now_s), sequence.arrival, self._next_number)
        self._next_number += 1
        self._places[sequence] = place
        self._num_queued_in[sequence.lane] += 1
        account = sequence.lane, sequence.tenant
        if account not in self._queues:
            self.num_changes += 1
        queue = self._queues.setdefault(account, [])
        queue.insert(_index(queue, place), (place, sequence))

    def discard(self, sequence: Sequence) -> None:
        """Forgets who is there; its lane must be the one it came with."""
        if sequence not in self._places:
            return
        self._num_in -= Counter((sequence.lane,))
        place = self._places.pop(sequence)
        if place is None:
            return
        account = sequence.lane, sequence.tenant
        queue = self._queues[account]
        del queue[_index(queue, place)]
        if not queue:
            del self._queues[account]
            self.num_changes += 1
        self._num_queued_in -= Counter((sequence.lane,))

    def ordered(
        self, now_s: float, lane: str | None = None, until: float = math.inf
    ) -> Iterator[tuple[Rank, Sequence]]:
        """Those who may run, of one lane or of all, below a level; each is looked at when it is
        asked for, and may leave then.
        """
        firsts: dict[int, list[tuple[_Place, Sequence]]] = {}
        for account, queue in self._queues.items():
            if lane is None or account[0] == lane:
                firsts.setdefault(self._lanes.level_of(account), []).append(queue[0])
        # Few steps get beyond the first level: the policy need not rank those behind it.
        for level in sorted(firsts):
            if level >= until:
                return
            yield from self._merged(level, firsts[level], now_s)

    def _merged(
        self, level: int, firsts: list[tuple[_Place, Sequence]], now_s: float
    ) -> Iterator[tuple[Rank, Sequence]]:
        """The queues of a level as one, each from its first on."""
        heads = [self._ranked(level, place, sequence, now_s) for place, sequence in firsts]
        heapify(heads)
        while heads:
            rank, place, sequence = heads[0]
            yield rank, sequence
            queue = self._queues.get(sequence.account, [])
            index = bisect_right(queue, place, key=_place_of)
            if index < len(queue):
                heapreplace(heads, self._ranked(level, *queue[index], now_s))
            else:
                heappop(heads)

    def _ranked(
        self, level: int, place: _Place, sequence: Sequence, now_s: float
    ) -> tuple[Rank, _Place, Sequence]:
        key = self._policy.key(sequence, now_s)
        return (level, True, True, key, sequence.arrival, place[2]), place, sequence


def _index(queue: list[tuple[_Place, Sequence]], place: _Place) -> int:
    return bisect_left(queue, place, key=_place_of)


def _place_of(entry: tuple[_Place, Sequence]) -> _Place:
    return entry[0]
