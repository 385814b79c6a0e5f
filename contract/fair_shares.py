"""Fair shares: of those that wait, the one that has had the least for its weight is next."""

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

N = TypeVar("N", bound=Hashable)


class FairShares(Generic[N]):
    """Counts what each name was served, in any unit, divided by its weight.

    A name that comes back starts at least at the lowest counter of those that have work, so that
    idle time earns no credit. Then two names that both have work never differ by more than the
    largest piece of each. Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI
    2024.
    """

    def __init__(self) -> None:
        self.served: dict[N, float] = {}  # of all names with work; the smallest is next
        self._num_live: Counter[N] = Counter()
        self.weights: dict[N, float] = {}  # of names with work
        self._floor = 0.0  # the lowest counter when a name last had work

    def arrive(self, name: N, weight: float = 1.0) -> None:
        """A piece of work has come. The latest weight counts."""
        if not self._num_live[name]:
            self.served[name] = max(self.served.get(name, 0.0), self._lowest())
        self._num_live[name] += 1
        self.weights[name] = weight

    def charge(self, name: N, amount: float) -> None:
        """Work of the name was served."""
        self.served[name] += amount / self.weights[name]

    def leave(self, name: N) -> None:
        """A piece of work has ended, or was given up."""
        self._num_live[name] -= 1
        if not self._num_live[name]:
            del self._num_live[name], self.weights[name]
            self._floor = self.served[name]
            self._forget_idle()

    def _lowest(self) -> float:
        return min(map(self.served.__getitem__, self._num_live), default=self._floor)

    def _forget_idle(self) -> None:
        """Forgets those that would start at the lowest counter anyway."""
        lowest = self._lowest()
        for name in self.served.keys() - self._num_live.keys():
            if self.served[name] <= lowest:
                del self.served[name]
