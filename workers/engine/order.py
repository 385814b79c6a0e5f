"""The order in which one step serves running and waiting sequences. A step's cost does not grow
with the number of those that wait.

Lanes order sequences of different lanes, a policy those of one lane; strategies decide when a
sequence may start. Sequences of one lane and tenant have the same level and are kept sorted by
arrival. A step merges these queues lazily, as far as it admits.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from heapq import heapify, heappop, heapreplace
from operator import itemgetter
from types import MappingProxyType

from contract.fair_shares import FairShares
from workers.engine.interface import Chunk
from workers.engine.sequence import Account, Sequence
from workers.lanes import STANDARD, WARM, Lane

_LATELY_S = 10.0


class Lanes:
    """The lanes and the service that each has received. Unknown lanes are treated as `standard`.

    Two guarantees, both in computed tokens:
    - While a lane has work that can be computed, it gets at least `min_share` of the tokens, and
      lags by at most two steps' budget.
    - A tenant that is not served in a lane rises in priority with the tokens that others get. Above
      the first priority it is overdue, and is served before all that arrived or were served later.

    The age is the tenant's, not the sequence's. Otherwise the long queue of a tenant that is served
    all the time would pass everyone else.
    """

    def __init__(self, table: Seq[Lane], max_credit: int) -> None:
        """`max_credit`: the most tokens of a lane's deficit, such as a step's budget."""
        self._num_computed = 0
        self._num_live: Counter[str] = Counter()
        self._num_live_of: Counter[Account] = Counter()
        self._served_at: dict[Account, int] = {}  # `_num_computed` when it was last served
        self._credits: dict[str, float] = {}
        self._live_at: dict[str, float] = {}  # when lanes last had work
        self.replace(table, max_credit)

    def replace(self, table: Seq[Lane], max_credit: int) -> None:
        """Applies a new table; deficits are kept."""
        self._table = {lane.name: lane for lane in table}
        self.first_priority = min(lane.priority for lane in (*table, STANDARD))
        self._max_credit = max_credit
        shared = [lane.name for lane in table if lane.min_share > 0]
        self._credits = {name: self._credits.get(name, 0.0) for name in shared}

    def of(self, sequence: Sequence) -> Lane:
        return self._table.get(sequence.lane, STANDARD)

    def priority_of(self, name: str) -> int:
        return self._table.get(name, STANDARD).priority

    def live_lately(self, now_s: float) -> dict[str, Lane]:
        """The lanes with work now or in the last ten seconds, by the names that jobs have."""
        self._live_at |= dict.fromkeys((n for n in self._num_live if n != WARM.name), now_s)
        names = [name for name, at_s in self._live_at.items() if now_s - at_s <= _LATELY_S]
        return {name: self._table.get(name, STANDARD) for name in names}

    def level(self, sequence: Sequence) -> int:
        """The priority of its account after ageing; the smallest is served first."""
        return self.level_of((sequence.lane, sequence.tenant))

    def level_of(self, account: Account) -> int:
        """The priority of a lane and tenant after ageing. Overdue ones are ordered by age."""
        lane = self._table.get(account[0], STANDARD)
        num_passed = self._num_computed - self._served_at[account]
        level = lane.priority - num_passed // lane.ageing_tokens
        return level if level >= self.first_priority else self.first_priority - num_passed

    def is_overdue(self, account: Account) -> bool:
        return self.level_of(account) < self.first_priority

    def arrive(self, sequence: Sequence) -> None:
        account = sequence.lane, sequence.tenant
        self._served_at.setdefault(account, self._num_computed)
        self._num_live_of[account] += 1
        self._num_live[sequence.lane] += 1

    def leave(self, sequence: Sequence) -> None:
        account = sequence.lane, sequence.tenant
        self._num_live_of[account] -= 1
        if self._num_live_of[account] == 0:
            del self._num_live_of[account], self._served_at[account]
        self._num_live[sequence.lane] -= 1
        if self._num_live[sequence.lane] == 0:
            del self._num_live[sequence.lane]

    def settle(
        self, chunks: Iterable[Chunk], num_streams: Mapping[Account, int] = MappingProxyType({})
    ) -> None:
        """Accounts for a step: the tokens of each chunk, and one token for each stream."""
        by_account = dict(num_streams)
        for chunk in chunks:
            account = chunk.sequence.account
            by_account[account] = by_account.get(account, 0) + chunk.num_known
        by_lane: Counter[str] = Counter()
        for account, num in by_account.items():
            by_lane[account[0]] += num
        num_total = by_lane.total()
        self._num_computed += num_total
        self._served_at |= dict.fromkeys(by_account, self._num_computed)
        for name, credit in self._credits.items():
            due = self._table[name].min_share * num_total
            earned = credit + due - by_lane[name] if self._num_live[name] else 0.0
            self._credits[name] = min(max(earned, 0.0), float(self._max_credit))

    def deficits(self) -> dict[str, int]:
        """Deficits in tokens of lanes below their minimum share; they are served first in a step.
        Empty if only one lane has work.
        """
        if len(self._num_live) < 2:
            return {}
        return {name: int(credit) for name, credit in self._credits.items() if credit >= 1.0}


_OUTPUT_WEIGHT = 2.0  # the service of an output token, in tokens of a prompt


class VirtualTokenCounters:
    """Fair service between the tenants of a lane: the tenant with the least service is first.

    Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. Two tenants that both
    have work differ in service by at most 2 * max(longest input, weight of an output token * tokens
    of KV) in the paper; here by one step's budget more, as the order is made once a step.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, FairShares[str]] = {}

    def key(self, sequence: Sequence) -> float:
        """The smallest runs first and is preempted last; equal ones first come, first served."""
        return self._lanes[sequence.lane].served[sequence.tenant]

    def arrive(self, sequence: Sequence) -> None:
        """The sequence has arrived in the engine."""
        lane = self._lanes.setdefault(sequence.lane, FairShares())
        lane.arrive(sequence.tenant, sequence.weight)

    def charge(self, account: Account, num_in: int, num_out: int) -> None:
        """A step served the account; `num_in` prompt tokens were computed for the first time."""
        lane, tenant = account
        self._lanes[lane].charge(tenant, num_in + _OUTPUT_WEIGHT * num_out)

    def charge_streams(self, num_by_account: Mapping[Account, int]) -> None:
        """A step computed one token for each of so many streams of each account."""
        lanes = self._lanes
        for (lane, tenant), num in num_by_account.items():  # without a call for each
            shares = lanes[lane]
            shares.served[tenant] += _OUTPUT_WEIGHT * num / shares.weights[tenant]

    def leave(self, sequence: Sequence) -> None:
        """The sequence has ended or was stopped."""
        self._lanes[sequence.lane].leave(sequence.tenant)


# Constant while a sequence waits: its arrival, a unique number.
_Place = tuple[int, int]
# Level, is waiting, is a prompt, the policy's key, arrival, a unique number.
Rank = tuple[int, bool, bool, float, int, int]


class WaitingQueue:
    """Queues by lane and tenant, each in the policy's order."""

    def __init__(self, lanes: Lanes, policy: VirtualTokenCounters) -> None:
        self._lanes = lanes
        self._policy = policy
        self._queues: dict[Account, list[tuple[_Place, Sequence]]] = {}
        self._places: dict[Sequence, _Place | None] = {}  # None: its strategy has not released it
        self._num_in: Counter[str] = Counter()  # by lane, released or not; no zeros
        self._num_queued_in: Counter[str] = Counter()
        self._next_number = 0
        self.num_changes = 0  # of `accounts`

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def lanes(self) -> tuple[str, ...]:
        """Names of the lanes with waiting sequences."""
        return tuple(sorted(self._num_in))

    @property
    def first_priority(self) -> int | None:
        """The smallest priority of the lanes with a queue; None without any queue."""
        return min(map(self._lanes.priority_of, self._num_queued_in), default=None)

    @property
    def accounts(self) -> Collection[Account]:
        """Lanes and tenants with a queue."""
        return self._queues.keys()

    def first_of(self, account: Account) -> Sequence:
        return self._queues[account][0][1]

    def is_queued(self, sequence: Sequence) -> bool:
        """Whether it waits and its strategy has released it."""
        return self._places.get(sequence) is not None

    def add(self, sequence: Sequence) -> None:
        self._places[sequence] = None
        self._num_in[sequence.lane] += 1

    def admit(self, sequence: Sequence) -> None:
        """Queues a sequence that its strategy has released."""
        place = sequence.arrival, self._next_number
        self._next_number += 1
        self._places[sequence] = place
        self._num_queued_in[sequence.lane] += 1
        account = sequence.lane, sequence.tenant
        if account not in self._queues:
            self.num_changes += 1
        queue = self._queues.setdefault(account, [])
        queue.insert(_index(queue, place), (place, sequence))

    def discard(self, sequence: Sequence) -> None:
        """Removes a sequence, if it waits; its lane must not have changed meanwhile."""
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
        self, lane: str | None, until: float, closed: Collection[str]
    ) -> Iterator[tuple[Rank, Sequence]]:
        """The queued sequences of one lane or of all but the closed ones, below a level, in order.
        Lazy: the caller may remove the one that was yielded last, and close its lane.
        """
        firsts: dict[int, list[tuple[_Place, Sequence]]] = {}
        for account, queue in self._queues.items():
            if lane is None or account[0] == lane:
                firsts.setdefault(self._lanes.level_of(account), []).append(queue[0])
        # Few steps get beyond the first level, so keys of later levels are not computed in advance.
        for level in sorted(firsts):
            if level >= until:
                return
            yield from self._merged(level, firsts[level], closed)

    def _merged(
        self, level: int, firsts: list[tuple[_Place, Sequence]], closed: Collection[str]
    ) -> Iterator[tuple[Rank, Sequence]]:
        heads = [self._ranked(level, place, sequence) for place, sequence in firsts]
        heapify(heads)
        while heads:
            rank, place, sequence = heads[0]
            yield rank, sequence
            queue = self._queues.get(sequence.account, [])
            index = bisect_right(queue, place, key=itemgetter(0))
            if index < len(queue) and sequence.lane not in closed:
                heapreplace(heads, self._ranked(level, *queue[index]))
            else:
                heappop(heads)

    def _ranked(
        self, level: int, place: _Place, sequence: Sequence
    ) -> tuple[Rank, _Place, Sequence]:
        key = self._policy.key(sequence)
        return (level, True, True, key, sequence.arrival, place[1]), place, sequence


def _index(queue: list[tuple[_Place, Sequence]], place: _Place) -> int:
    return bisect_left(queue, place, key=itemgetter(0))


class Order:
    """Orders by level, then running before waiting, streams before prompts, then by policy.

    So a long prompt does not delay a stream of its own level. The order is fixed when the step
    begins: sequences that are admitted or preempted in the step keep their place.
    """

    def __init__(
        self,
        running: Collection[Sequence],
        queue: WaitingQueue,
        lanes: Lanes,
        policy: VirtualTokenCounters,
    ) -> None:
        self.includes_waiting = True  # otherwise only running ones, and those that just ran
        self.closed: set[str] = set()  # lanes whose waiting ones are left out
        self._queue = queue
        self._started: list[tuple[Rank, Sequence]] = []
        level, key = lanes.level, policy.key
        self._running: list[tuple[Rank, Sequence]] = [
            ((level(s), False, s.num_pending > 1, key(s), s.arrival, 0), s) for s in running
        ]
        self._running.sort(key=itemgetter(0))

    def walk(self, lane: str | None = None, until: float = math.inf) -> Iterator[Sequence]:
        """Yields the sequences of a lane, or of all lanes, below a level. The caller may admit a
        waiting one when it is yielded."""
        self._merge_started()
        waiting = (
            self._queue.ordered(lane, until, self.closed) if self.includes_waiting else iter(())
        )
        head = next(waiting, None)
        for rank, sequence in self._running:
            if rank[0] >= until:
                break
            if lane is not None and sequence.lane != lane:
                continue
            while head is not None and self.includes_waiting and head[0] < rank:
                yield from self._offer(head)
                head = next(waiting, None) if self.includes_waiting else None
            yield sequence
        while head is not None and self.includes_waiting:
            yield from self._offer(head)
            head = next(waiting, None) if self.includes_waiting else None

    def _offer(self, head: tuple[Rank, Sequence]) -> Iterator[Sequence]:
        yield head[1]
        if not self._queue.is_queued(head[1]):
            self._started.append(head)

    def _merge_started(self) -> None:
        """Moves what was admitted on an earlier walk to the running sequences."""
        if self._started:
            self._running += self._started
            self._running.sort(key=itemgetter(0))
            self._started = []
