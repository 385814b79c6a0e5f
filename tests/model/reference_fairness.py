"""Who goes next among the tenants of a lane, and among lanes: contract/lua/_fairness.lua, and the
shares of claim.lua, once more in Python.

Pure: names, tokens and counters. After VTC (Sheng et al., OSDI 2024), on start-time fair queueing.

Two promises, both in tokens of jobs' costs, as handed out over the whole fleet:
- While two tenants both have jobs waiting in a lane, what they have been handed out differs by at
  most twice the cost of the largest job.
- A lane with a minimum share `s` waits for its next job, of cost `c`, until at most c / s + one
  job's tokens were handed out by other lanes, if the job fits a worker's room then.
Each job that does not fit is passed over by at most `MAX_PASSED` others.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_PASSED = 8
MAX_SKIPPED = 4  # of one stream, in one search
MAX_TENANTS = 8  # of a lane, whose lines are searched
MAX_OWED = 2**20


@dataclass(slots=True)
class Turns:
    """Of one lane: tokens handed out by tenant, while it has a line and after.

    A returning tenant starts at the higher of its own counter and that of the tenant served last.
    """

    active: dict[str, int] = field(default_factory=dict)
    idle: dict[str, int] = field(default_factory=dict)
    clock: int = 0

    def join(self, tenant: str) -> None:
        self.active[tenant] = max(self.idle.pop(tenant, 0), self.clock)

    def retire(self, tenant: str) -> None:
        own = self.active.pop(tenant)
        if own > self.clock:
            self.idle[tenant] = own
        self.idle = {name: at for name, at in self.idle.items() if at > self.clock}

    def bill(self, tenant: str, num_tokens: int) -> None:
        """Adds to what it was handed out; gives back where it is negative."""
        if tenant in self.active:
            self.active[tenant] += num_tokens
        elif num_tokens:
            own = max(self.clock, self.idle.pop(tenant, 0)) + num_tokens
            if own > self.clock:
                self.idle[tenant] = own

    def charge(self, tenant: str, cost: int) -> None:
        """A job of its line is handed out."""
        self.clock = max(self.clock, self.active[tenant])
        self.bill(tenant, cost)

    def order(self) -> list[str]:
        """Who has waited with the least comes first."""
        return sorted(self.active, key=lambda name: (self.active[name], name))[:MAX_TENANTS]


@dataclass(slots=True)
class Shares:
    """What the lanes with a minimum share are owed, in tokens."""

    owed: dict[str, float] = field(default_factory=dict)

    def book(
        self, min_shares: Iterable[tuple[str, float]], lane: str, cost: int, waiting: set[str]
    ) -> None:
        """Tokens were handed out in a lane: every lane with work is owed its share of them."""
        for name, share in min_shares:
            if share > 0:
                owed = self.owed.get(name, 0.0) + share * cost - (cost if name == lane else 0)
                owed = min(float(MAX_OWED), owed) if name in waiting else 0.0
                self.owed[name] = max(0.0, owed)


@dataclass(slots=True)
class Places:
    """Of a lane at a worker whose places are all taken: how many there are, in places and tokens,
    and what each tenant holds."""

    max_jobs: int
    max_tokens: int
    held: dict[str, tuple[int, int]] = field(default_factory=dict)

    def room_of(self, tenant: str) -> int:
        """The largest job that the tenant may be handed, in tokens: 0 or less where one more place
        would give it more than an equal share, among those that hold any and itself."""
        num_jobs, num_tokens = self.held.get(tenant, (0, 0))
        num_tenants = len(self.held) + (tenant not in self.held)
        if num_jobs + 1 > self.max_jobs // num_tenants:
            return 0
        return self.max_tokens // num_tenants - num_tokens

    def hold(self, tenant: str, num_choices: int, cost: int) -> None:
        """The tenant was handed a job."""
        num_jobs, num_tokens = self.held.get(tenant, (0, 0))
        self.held[tenant] = num_jobs + num_choices, num_tokens + cost
