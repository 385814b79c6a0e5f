"""The service that each lane has received, by which the next is given.

The policy orders sequences within a lane; the scheduler hands out tokens and blocks.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from types import MappingProxyType

from workers.engine.interface import Chunk
from workers.engine.sequence import Account, Sequence
from workers.lanes import STANDARD, Lane

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
        self._live_at: dict[str, float] = {}  # when lanes with a latency target last had work
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

    def tightest_target_s(self, now_s: float) -> float | None:
        """The tightest latency target of the lanes with work now or in the last ten seconds."""
        for name in self._num_live:
            if self._table.get(name, STANDARD).itl_target_s is not None:
                self._live_at[name] = now_s
        targets = [
            self._table.get(name, STANDARD).itl_target_s
            for name, at_s in self._live_at.items()
            if now_s - at_s <= _LATELY_S
        ]
        return min((target for target in targets if target is not None), default=None)

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
