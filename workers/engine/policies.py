"""Who comes first within a lane: one function from a sequence and the time to a sort key.

Policies compose by joining their tuples (`Composed`). Leaves to the scheduler what is done with
the order, to lanes who goes before whom across them, and to strategies when to admit.
"""

from collections import Counter
from typing import Protocol

from workers.engine.sequence import Account, Sequence

# Numbers throughout, so that policies compose by joining their tuples.
Key = tuple[float, ...]


class Policy(Protocol):
    """An order of sequences: the smallest key runs first and is preempted last.

    The hooks tell a policy that keeps account what happens; most need none of them.
    """

    def key(self, sequence: Sequence, now_s: float) -> Key:
        """`now_s` is the engine's monotonic clock. Equal keys: first come, first served."""
        ...

    def standing(self, sequence: Sequence, now_s: float) -> Key:
        """The part of the key that stays constant while waiting."""
        return self.key(sequence, now_s)

    def arrive(self, sequence: Sequence) -> None:
        """The sequence is there to be served."""
        return

    def charge(self, account: Account, num_in: int, num_out: int) -> None:
        """A step served it: prompt tokens computed for the first time, and tokens drawn."""
        return

    def leave(self, sequence: Sequence) -> None:
        """It has ended or was stopped."""
        return


class Composed(Policy):
    """Each policy breaks the ties of those before it."""

    def __init__(self, *policies: Policy) -> None:
        self._policies = policies
        # Asked for each account at each step: those alone that keep account.
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
    """By arrival in this engine; a preempted sequence keeps its place."""

    def key(self, sequence: Sequence, now_s: float) -> Key:
        return (sequence.arrival,)


class VirtualTokenCounters(Policy):
    """Fair service between the tenants of a lane: who has had least goes first.

    Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. Two tenants that both
    have work differ in service by at most 2 * max(input_weight * longest input, output_weight *
    tokens of KV) there; here one step's budget more, for the order is made once a step. A tenant
    that comes back is lifted to the least of those who stayed: being idle saves nothing up.
    Service is divided by the tenant's weight, that of its latest sequence.
    """

    def __init__(self, input_weight: float = 1.0, output_weight: float = 2.0) -> None:
        self._input_weight = input_weight
        self._output_weight = output_weight
        self._counters: dict[tuple[str, str], float] = {}
        self._num_live: Counter[tuple[str, str]] = Counter()
        self._weights: dict[tuple[str, str], float] = {}  # of those who are live
        self._floors: dict[str, float] = {}  # by lane: the least counter when last anyone was live

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
        self._forget_paid_up(sequence.lane)

    def _floor(self, lane: str) -> float:
        live = [self._counters[account] for account in self._num_live if account[0] == lane]
        return min(live, default=self._floors.get(lane, 0.0))

    def _forget_paid_up(self, lane: str) -> None:
        """Idle tenants that would be lifted anyway need no counter."""
        floor = self._floor(lane)
        for account in [a for a, counter in self._counters.items() if counter <= floor]:
            if account[0] == lane and account not in self._num_live:
                del self._counters[account]
