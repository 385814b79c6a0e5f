"""Limits how many things a name may have at a time: connections of an address, calls of a key."""


class ConcurrencyCap:
    """Counts of one process. `cap` 0 means no limit. Names whose count is 0 are not stored."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._num_of: dict[str, int] = {}

    def can_enter(self, name: str) -> bool:
        return not self.cap or self._num_of.get(name, 0) < self.cap

    def enter(self, name: str) -> None:
        self._num_of[name] = self._num_of.get(name, 0) + 1

    def leave(self, name: str) -> None:
        left = self._num_of[name] - 1
        if left:
            self._num_of[name] = left
        else:
            del self._num_of[name]
