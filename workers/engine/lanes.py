"""Service classes: who goes before whom, how soon the next token is due, what no one may take.

Leaves the order within a lane to the policy, and tokens and blocks to the scheduler.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import MappingProxyType

from workers.engine.model import Chunk
from workers.engine.sequence import Account, Sequence


@dataclass(frozen=True, slots=True)
class Lane:
    """One service class. Raises ValueError for numbers that make no sense."""

    name: str
    priority: int  # the smallest goes first, and takes places and blocks from the others
    itl_target_s: float | None = None  # seconds between two tokens of a stream
    min_share: float = 0.0  # of the computed tokens, while the lane has work
    ageing_tokens: int = 32_768  # computed for others, they lift a tenant by one priority

    def __post_init__(self) -> None:
        if self.itl_target_s is not None and self.itl_target_s <= 0:
            raise ValueError(f"lane {self.name}: itl_target_s must be positive")
        if not 0.0 <= self.min_share < 1.0:
            raise ValueError(f"lane {self.name}: min_share is a share: from 0 to below 1")
        if self.ageing_tokens < 1:
            raise ValueError(f"lane {self.name}: ageing_tokens must be positive")


STANDARD = Lane("standard", priority=1)
DEFAULT_LANES = (
    Lane("interactive", priority=0, itl_target_s=0.1),
    STANDARD,
    Lane("batch", priority=2, min_share=0.05),
)


class Lanes:
    """The lanes and what each has had. Lanes that the table does not name are like standard.

    Two promises, both in tokens that the engine computes:
    - While a lane has work that can be computed, it gets at least `min_share` of them, at most
      two steps' budget behind.
    - A tenant that has had none in a lane while so many went to others as lift it above the first
      priority is overdue there, and goes before all that came or were served since its last.

    Age is the tenant's, not the sequence's: the long queue of one that is served all the time
    would else go before all who come, whatever the policy says.
    """

    def __init__(self, table: Seq[Lane], max_credit: int) -> None:
        """`max_credit`: tokens that a lane can be behind at most; say, a step's."""
        self._num_computed = 0
        self._num_live: Counter[str] = Counter()
        self._num_live_of: Counter[Account] = Counter()
        self._served_at: dict[Account, int] = {}  # tokens computed before it was served, or came
        self._credits: dict[str, float] = {}
        self.replace(table, max_credit)

    def replace(self, table: Seq[Lane], max_credit: int) -> None:
        """From now on; what a lane is owed it keeps. Raises ValueError."""
        if sum(lane.min_share for lane in table) > 1.0:
            raise ValueError("the minimum shares of all lanes exceed the whole")
        self._table = {lane.name: lane for lane in table}
        self.first_priority = min(lane.priority for lane in (*table, STANDARD))
        self._max_credit = max_credit
        shared = [lane.name for lane in table if lane.min_share > 0]
        self._credits = {name: self._credits.get(name, 0.0) for name in shared}

    def of(self, sequence: Sequence) -> Lane:
        return self._table.get(sequence.lane, STANDARD)

    def priority_of(self, name: str) -> int:
        return self._table.get(name, STANDARD).priority

    def itl_target_s_of(self, name: str) -> float | None:
        return self._table.get(name, STANDARD).itl_target_s

    def level(self, sequence: Sequence) -> int:
        """Its priority, lifted by age; the smallest goes first, and of the overdue the oldest."""
        return self.level_of((sequence.lane, sequence.tenant))

    def level_of(self, account: Account) -> int:
        """Of all sequences of a lane and tenant."""
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
        """Books a step: the tokens of each chunk, and beside them one for each stream."""
        by_account = dict(num_streams)
        for chunk in chunks:
            account = chunk.sequence.account
            by_account[account] = by_account.get(account, 0) + chunk.num_tokens
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

    def owed(self) -> dict[str, int]:
        """Tokens that come first in this step, by lane: of those that are behind their share.

        A lane alone is owed nothing: all is its own.
        """
        if len(self._num_live) < 2:
            return {}
        return {name: int(credit) for name, credit in self._credits.items() if credit >= 1.0}
