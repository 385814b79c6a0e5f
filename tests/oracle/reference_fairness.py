"""Fair sharing among the tenants of a lane and among lanes: contract/lua/_fairness.lua and the
shares of claim.lua in Python.

After VTC (Sheng et al., OSDI 2024), on start-time fair queueing.

Two guarantees, in claimed tokens of jobs' costs over the whole fleet:
- While two tenants both have waiting jobs in a lane, their claimed tokens divided by their weights
  differ by at most twice the cost of the largest job over the lesser weight.
- A lane with a minimum share `s` waits for its next job, of cost `c`, until other lanes have
  claimed at most c / s + one job's tokens, if the job then fits a worker's room.
At most `MAX_PASSED` other jobs pass a job that does not fit.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MAX_PASSED = 8
MAX_SKIPPED = 4  # of one stream, in one search
MAX_BACK = 64  # entries looked at for jobs of tenants below their share
MAX_TENANTS = 8  # of a lane, whose lines are searched
MAX_DEFICIT = 2**20


@dataclass(slots=True)
class Turns:
    """The turns of one lane: tokens handed out by tenant, divided by its weight, while it has
    waiting jobs and after.

    A returning tenant starts at the higher of its own counter and that of the tenant served last.
    """

    active: dict[str, float] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=dict)
    clock: float = 0.0

    def join(self, tenant: str) -> None:
        self.active[tenant] = max(self.idle.pop(tenant, 0), self.clock)

    def retire(self, tenant: str) -> None:
        own = self.active.pop(tenant)
        if own > self.clock:
            self.idle[tenant] = own
        self.idle = {name: at for name, at in self.idle.items() if at > self.clock}

    def bill(self, tenant: str, num_tokens: float) -> None:
        """Adds tokens by weight to the tenant's counter; negative tokens are given back."""
        if tenant in self.active:
            self.active[tenant] += num_tokens
        elif num_tokens:
            own = max(self.clock, self.idle.pop(tenant, 0)) + num_tokens
            if own > self.clock:
                self.idle[tenant] = own

    def charge(self, tenant: str, num_tokens: float) -> None:
        """A job of the tenant is handed out, of this many tokens by weight."""
        self.clock = max(self.clock, self.active[tenant])
        self.bill(tenant, num_tokens)

    def order(self) -> list[str]:
        """The waiting tenants, the one with the lowest counter first."""
        return sorted(self.active, key=lambda name: (self.active[name], name))[:MAX_TENANTS]


@dataclass(slots=True)
class Shares:
    """The deficit of each lane with a minimum share, in tokens."""

    deficit: dict[str, float] = field(default_factory=dict)

    def book(
        self, min_shares: Iterable[tuple[str, float]], lane: str, cost: int, waiting: set[str]
    ) -> None:
        """Books handed-out tokens: each lane with work gains its share of them as deficit."""
        for name, share in min_shares:
            if share > 0:
                deficit = self.deficit.get(name, 0.0) + share * cost - (cost if name == lane else 0)
                deficit = min(float(MAX_DEFICIT), deficit) if name in waiting else 0.0
                self.deficit[name] = max(0.0, deficit)


@dataclass(slots=True)
class Places:
    """The places of a lane at a full worker: their number, in places and tokens, and what each
    tenant holds. Each tenant has a share by its weight."""

    max_jobs: int
    max_tokens: int
    held: dict[str, tuple[int, int]] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)  # 1 for tenants without one

    def room_of(self, tenant: str) -> int:
        """The largest job that the tenant may get, in tokens: 0 or less if one more place would
        exceed its share, among the tenants that hold any and itself."""
        num_jobs, num_tokens = self.held.get(tenant, (0, 0))
        holders = list(self.held) if tenant in self.held else [*self.held, tenant]
        weight = self.weights.get(tenant, 1.0)
        total = sum(self.weights.get(holder, 1.0) for holder in holders)
        if num_jobs + 1 > math.floor(self.max_jobs * weight / total):
            return 0
        return math.floor(self.max_tokens * weight / total) - num_tokens

    def hold(self, tenant: str, num_choices: int, cost: int) -> None:
        """The tenant got a job."""
        num_jobs, num_tokens = self.held.get(tenant, (0, 0))
        self.held[tenant] = num_jobs + num_choices, num_tokens + cost
