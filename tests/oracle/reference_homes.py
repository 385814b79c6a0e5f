"""The homes of tenants in Python, as lua/_homes.lua and its functions have them."""

from dataclasses import dataclass, field
from typing import Any

Left = tuple[int, int, int, int, float]  # version, tokens, bytes, number and sum of late ends


@dataclass
class Ledger:
    """What one partition knows of a tenant."""

    requests: float = 0.0
    tokens: float = 0.0
    reserved: int = 0
    stored: int = 0
    version: int = 0
    is_in: bool = False
    late: tuple[int, float] = (0, 0.0)
    away: dict[int, Left] = field(default_factory=dict)  # by partition

    @property
    def left(self) -> Left:
        return (self.version, self.reserved, self.stored, *self.late)

    @property
    def all_reserved(self) -> int:
        return self.reserved + sum(left[1] for left in self.away.values())

    @property
    def all_stored(self) -> int:
        return self.stored + sum(left[2] for left in self.away.values())


@dataclass
class Home:
    version: int
    state: str
    path: list[int]

    @property
    def reply(self) -> list[Any]:
        return [self.version, self.state.encode(), ",".join(map(str, self.path)).encode()]


class ReferenceHomes:
    """All partitions. Replies are those of the functions."""

    def __init__(self) -> None:
        self.version = 0
        self.states: dict[int, str] = {}
        self.homes: dict[str, Home] = {}
        self.ledgers: dict[tuple[int, str], Ledger] = {}

    def ledger(self, partition: int, tenant: str) -> Ledger:
        return self.ledgers.setdefault((partition, tenant), Ledger())

    def chart(self, version: int, changes: dict[int, str]) -> list[Any]:
        if version != self.version:
            return [b"STALE", self.version]
        used = {home.path[-1] for home in self.homes.values()} | {0}
        for number, state in changes.items():
            if not state and number in used:
                return [b"IN_USE", str(number).encode()]
        self.states |= changes
        self.states = {number: state for number, state in self.states.items() if state}
        self.version += 1
        return [b"OK", self.version]

    def home(self, tenant: str, chosen: int, version: int) -> list[Any]:
        if tenant not in self.homes:
            if version != self.version or self.states.get(chosen) != "active":
                return [b"STALE"]
            self.homes[tenant] = Home(1, "in", [chosen])
        return self.homes[tenant].reply

    def begin_move(self, tenant: str, target: int) -> list[Any]:
        home = self.homes.get(tenant)
        if home is None:
            return [b"NOT_FOUND"]
        if home.state == "in" and home.path[-1] != target:
            if self.states.get(target) != "active":
                return [b"NOT_FOUND"]
            home.path = [number for number in home.path if number != target] + [target]
            home.version, home.state = home.version + 1, "moving"
        return home.reply

    def end_move(self, tenant: str, version: int) -> list[Any]:
        home = self.homes.get(tenant)
        if home is None:
            return [b"NOT_FOUND"]
        if home.version == version:
            home.state = "in"
        return home.reply

    def depart(self, partition: int, tenant: str, version: int) -> list[Any] | None:
        """The ledger; None where a later move has taken place."""
        known = self.ledger(partition, tenant)
        if known.version > version or (known.version == version and known.is_in):
            return None
        if known.version < version:
            known.version, known.is_in, known.late = version, False, (0, 0.0)
        return [known.requests, known.tokens, {None: known.left, **known.away}]

    def settle(
        self, partition: int, tenant: str, version: int, source: int, ledger: list[Any] | None
    ) -> bool:
        known = self.ledger(partition, tenant)
        if known.version > version or (known.version == version and not known.is_in):
            return False
        if known.version == version:
            return True
        known.version, known.is_in = version, True
        if ledger is not None:
            known.away.clear()
            requests, tokens, parts = ledger
            known.requests, known.tokens = requests, tokens
            for number, left in parts.items():
                other = source if number is None else number
                if other == partition:
                    known.tokens += known.late[1] - left[4]
                else:
                    self._set_away(known, other, left)
            known.late = (0, 0.0)
        return True

    def lower(self, partition: int, tenant: str, other: int, left: Left) -> list[int]:
        ledger = self.ledger(partition, tenant)
        known = ledger.away.get(other)
        if known is None:
            return [0, 0]
        if known[0] != left[0] or not ledger.is_in:
            return [known[1], known[2]]
        late = known[3:]
        if left[3] > known[3]:
            ledger.tokens += left[4] - known[4]
            late = left[3:]
        now = (known[0], min(known[1], left[1]), min(known[2], left[2]), *late)
        self._set_away(ledger, other, now)
        return [now[1], now[2]]

    def admits(self, partition: int, tenant: str, version: int) -> bool:
        known = self.ledger(partition, tenant)
        return known.is_in and known.version == version

    def meter(self, partition: int, tenant: str, more: float) -> None:
        """The end of a job adds to its tenant's meter."""
        known = self.ledger(partition, tenant)
        if more:
            known.tokens = max(0.0, max(0.0, known.tokens) + more)
            if known.version and not known.is_in:
                known.late = known.late[0] + 1, known.late[1] + more

    @staticmethod
    def _set_away(known: Ledger, other: int, left: Left) -> None:
        known.away.pop(other, None)
        if left[1] or left[2]:
            known.away[other] = left
