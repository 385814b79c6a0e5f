"""The order of sequences within a lane: a function from a sequence and the time to a sort key.

Keys are tuples, so that policies compose by concatenation (`Composed`). Lanes order sequences of
different lanes, and strategies decide when a sequence may start.
"""

from collections import Counter
from typing import Protocol

from workers.engine.sequence import Account, Sequence

# Only numbers, so that keys of several policies can be concatenated.
Key = tuple[float, ...]


class Policy(Protocol):
    """An order of sequences: the smallest key runs first and is preempted last.

    The hooks are for policies that keep accounts; their defaults do nothing.
    """

    def key(self, sequence: Sequence, now_s: float) -> Key:
        """Returns the sort key. `now_s` is the engine's monotonic clock. Equal keys: first come,
        first served."""
        ...

    def standing(self, sequence: Sequence, now_s: float) -> Key:
        """The part of the key that stays constant while waiting."""
        return self.key(sequence, now_s)

    def arrive(self, sequence: Sequence) -> None:
        """The sequence has arrived in the engine."""
        return

    def charge(self, account: Account, num_in: int, num_out: int) -> None:
        """A step served the account; `num_in` prompt tokens were computed for the first time."""
        return

    def leave(self, sequence: Sequence) -> None:
        """The sequence has ended or was stopped."""
        return


class Composed(Policy):
    """Each policy breaks the ties of those before it."""

    def __init__(self, *policies: Policy) -> None:
        self._policies = policies
        # Called for each account in each step, so only policies that keep accounts.
        self._charged = [p.charge for p in policies if type(p).charge is not Policy.charge]

    def key(self, sequence: Sequence, now_s: float) -> Key:
        key: Key = ()
        for policy in self._policies:
            key += policy.key(sequence, now_s)
        return key

    def standing(self, sequence: Sequence, now_s: float) -> Key:
        return tuple(p for policy in self._policies for p in policy.standing(sequence, now_s))

    def arrive(self, sequence: Sequence) -> None:
        for policy in self._policies:
            policy.arrive(sequence)

    def charge(self, account: Account, num_in: int, num_out: int) -> None:
        for charge in self._charged:
            charge(account, num_in, num_out)

    def leave(self, sequence: Sequence) -> None:
        for policy in self._policies:
            policy.leave(sequence)


class FirstComeFirstServed(Policy):
    """Orders by arrival in this engine; a preempted sequence keeps its place."""

    def key(self, sequence: Sequence, now_s: float) -> Key:
        return (sequence.arrival,)


class VirtualTokenCounters(Policy):
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
        self._floors: dict[
            str, float
        ] = {}  # by lane: the lowest counter when a tenant was last active

    def key(self, sequence: Sequence, now_s: float) -> Key:
        return (self._counters[sequence.lane, sequence.tenant],)

    def standing(self, sequence: Sequence, now_s: float) -> Key:
        return ()

    def arrive(self, sequence: Sequence) -> None:
        account = sequence.lane, sequence.tenant
        if self._num_live[account] == 0:
            floor = self._floor(sequence.lane)
            self._counters[account] = max(self._counters.get(account, 0.0), floor)
        self._num_live[account] += 1
        self._weights[account] = sequence.weight

    def charge(self, account: Account, num_in: int, num_out: int) -> None:
        service = self._input_weight * num_in + self._output_weight * num_out
        self._counters[account] += service / self._weights[account]

    def leave(self, sequence: Sequence) -> None:
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


def fair_service() -> Policy:
    """A worker's order: fair between the tenants of a lane, then first come, first served."""
    return Composed(VirtualTokenCounters(), FirstComeFirstServed())
