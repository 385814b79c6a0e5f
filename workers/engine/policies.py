"""The order of sequences within a lane. Lanes order sequences of different lanes, and strategies
decide when a sequence may start."""

from collections import Counter

from workers.engine.sequence import Account, Sequence


class VirtualTokenCounters:
    """Fair service between the tenants of a lane: the tenant with the least service is first.

    Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. Two tenants that both
    have work differ in service by at most 2 * max(input_weight * longest input, output_weight *
    tokens of KV) in the paper; here by one step's budget more, as the order is made once a step.
    A returning tenant starts at least at the lowest counter of the active tenants, so idle time
    earns no credit. Service is divided by the tenant's weight, that of its latest sequence.
    """

    def __init__(self, input_weight: float = 1.0, output_weight: float = 2.0) -> None:
        self._input_weight = input_weight
        self._output_weight = output_weight
        self._counters: dict[tuple[str, str], float] = {}
        self._num_live: Counter[tuple[str, str]] = Counter()
        self._weights: dict[tuple[str, str], float] = {}  # of active tenants
        # By lane: the lowest counter when a tenant was last active.
        self._floors: dict[str, float] = {}

    def key(self, sequence: Sequence) -> float:
        """The smallest runs first and is preempted last; equal ones first come, first served."""
        return self._counters[sequence.account]

    def arrive(self, sequence: Sequence) -> None:
        """The sequence has arrived in the engine."""
        account = sequence.lane, sequence.tenant
        if self._num_live[account] == 0:
            floor = self._floor(sequence.lane)
            self._counters[account] = max(self._counters.get(account, 0.0), floor)
        self._num_live[account] += 1
        self._weights[account] = sequence.weight

    def charge(self, account: Account, num_in: int, num_out: int) -> None:
        """A step served the account; `num_in` prompt tokens were computed for the first time."""
        service = self._input_weight * num_in + self._output_weight * num_out
        self._counters[account] += service / self._weights[account]

    def leave(self, sequence: Sequence) -> None:
        """The sequence has ended or was stopped."""
        account = sequence.lane, sequence.tenant
        self._num_live[account] -= 1
        if self._num_live[account] > 0:
            return
        del self._num_live[account], self._weights[account]
        self._floors[sequence.lane] = self._counters[account]
        self._forget_idle(sequence.lane)

    def _floor(self, lane: str) -> float:
        live = [self._counters[account] for account in self._num_live if account[0] == lane]
        return min(live, default=self._floors.get(lane, 0.0))

    def _forget_idle(self, lane: str) -> None:
        """Drops counters at or below the floor: a returning tenant starts there anyway."""
        floor = self._floor(lane)
        for account in [a for a, counter in self._counters.items() if counter <= floor]:
            if account[0] == lane and account not in self._num_live:
                del self._counters[account]
