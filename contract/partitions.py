"""Partitions: which there are, in which of them a tenant lives, and how it moves.

All keys of a partition are in one slot of a cluster. Partition 0 holds the map and the tenants'
homes; each partition holds the right to admit the tenants that live in it (lua/_homes.lua). Without
a map there is partition 0 alone, and nothing here is asked.

Over 300 lines: the map, the homes and the steps of a move, which are read together.
"""

import hashlib
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from contract.connection import broker_errors, repeated
from contract.errors import BatchwayError, BrokerUnavailable, wire_errors
from contract.library import Partition

log = logging.getLogger("batchway.partitions")

T = TypeVar("T")

MAX_PARTITIONS = 64
_MAX_TRIES = 5  # of a call that others overtake
_NUM_HOMES = 500  # read at once


class Entry(msgspec.Struct, frozen=True):
    """A partition of the map. One that drains takes no new tenants. `share`: its part of the
    fleet's bounds, if all have one; else by weight."""

    weight: float = 1.0
    state: Literal["active", "draining"] = "active"
    share: float | None = None

    @property
    def text(self) -> str:
        share = "" if self.share is None else f" {self.share:.4f}"
        return f"{self.weight:.17g} {self.state}{share}"


class PartitionMap(msgspec.Struct, frozen=True):
    """The partitions. `version` 0: there is no map, and partition 0 alone. `shared_ms`: when the
    bounds were last shared out otherwise."""

    version: int = 0
    entries: Mapping[int, Entry] = msgspec.field(default_factory=lambda: {0: Entry()})
    shared_ms: int = 0

    @property
    def numbers(self) -> list[int]:
        return sorted(self.entries)

    @property
    def is_single(self) -> bool:
        return self.version == 0

    def choose(self, tenant: str) -> int:
        """The partition of a new tenant. Where a partition is added, only tenants that it gets
        change theirs. Source: Thaler, Ravishankar, "Using Name-Based Mappings to Increase Hit
        Rates", 1998; weights by −w ÷ ln(h)."""
        active = [n for n, entry in self.entries.items() if entry.state == "active"]
        return max(active, key=lambda number: (self._score(number, tenant), number))

    def _score(self, number: int, tenant: str) -> float:
        digest = hashlib.sha256(f"{number}/{tenant}".encode()).digest()[:8]
        h = (int.from_bytes(digest) + 1) / (2**64 + 1)  # above 0, below 1
        return -self.entries[number].weight / math.log(h)

    def share(self, number: int) -> float:
        """A partition's part of the fleet's bounds (contract/shares.py)."""
        shares = {n: entry.share for n, entry in self.entries.items()}
        own = shares.get(number)
        return self.weight_share(number) if own is None or None in shares.values() else own

    def weight_share(self, number: int) -> float:
        if number not in self.entries:
            return 1.0
        return self.entries[number].weight / sum(entry.weight for entry in self.entries.values())


class Home(msgspec.Struct, frozen=True):
    """Where a tenant lives: the last of `partitions`. It has lived in the others, which may still
    hold jobs of it. In version 0 there is no map."""

    version: int = 0
    partitions: tuple[int, ...] = (0,)
    is_moving: bool = False

    @property
    def number(self) -> int:
        return self.partitions[-1]


class Moved(BatchwayError):
    """The tenant does not live in this partition; its home must be read again."""


class MapChanged(BatchwayError):
    """Another caller has changed the map."""


class PartitionInUse(BatchwayError):
    """The partition cannot be removed: tenants live in it, or it holds the map."""


class Homes(Partition):
    """One partition's calls about partitions. Each may be repeated, and raises BrokerUnavailable,
    CommandDenied, WireError."""

    # --- partition 0: the map and the homes

    async def map(self) -> PartitionMap:
        with wire_errors("map of partitions"), broker_errors(self._client, "HGETALL"):
            key = self._keys.of("partitions")
            raw: Any = await repeated(lambda: self._client.hgetall(key))
            if not raw:
                return PartitionMap()
            version, shared_ms = int(raw.pop(b"version")), int(raw.pop(b"shared_ms", 0))
            entries = {int(name): _entry(raw[name]) for name in raw}
            return PartitionMap(version, entries, shared_ms)

    async def chart(
        self, known: PartitionMap, changes: Mapping[int, Entry | None], shared_ms: int = 0
    ) -> None:
        """Changes entries of the map; None removes one. `shared_ms`: now, where shares change.
        Raises MapChanged, PartitionInUse."""
        words: list[str | int] = [known.version]
        for number, entry in changes.items():
            words += [number, "" if entry is None else entry.text]
        words += ["shared_ms", shared_ms] if shared_ms else []
        match await self._call("chart", *words):
            case [b"STALE", _]:
                raise MapChanged("the map of partitions was changed")
            case [b"IN_USE", number]:
                raise PartitionInUse(f"partition {number.decode()} is in use")

    async def find(self, tenant: str, known: PartitionMap) -> Home:
        """The home of a tenant, which is chosen now for a new one. Raises MapChanged."""
        reply = await self._call("home", tenant, known.choose(tenant), known.version)
        if reply == [b"STALE"]:
            raise MapChanged("the map of partitions was changed")
        return _home(reply)

    async def begin_move(self, tenant: str, target: int) -> Home | None:
        """Begins a move; one that is under way goes on. None: the tenant is not known, or no such
        partition is active."""
        reply = await self._call("move", tenant, target)
        return None if reply == [b"NOT_FOUND"] else _home(reply)

    async def end_move(self, tenant: str, version: int) -> Home | None:
        reply = await self._call("move", tenant, "", version)
        return None if reply == [b"NOT_FOUND"] else _home(reply)

    async def tenants(self) -> dict[str, Home]:
        """All tenants that have ever had a job."""
        found, cursor = dict[str, Home](), 0
        with wire_errors("homes of tenants"), broker_errors(self._client, "HSCAN"):
            while True:
                key, at = self._keys.of("homes"), cursor
                scan: Any = await repeated(
                    lambda: self._client.hscan(key, at, count=_NUM_HOMES)  # noqa: B023
                )
                cursor, rows = scan
                for name, value in rows.items():
                    version, state, path = value.split()
                    found[name.decode()] = _home([int(version), state, path])
                if not cursor:
                    return found

    # --- the partition of a tenant

    async def settle(self, tenant: str, version: int) -> bool:
        """Makes this partition the home of a new tenant; False if it has moved since."""
        reply = await self._call("settle", tenant, version, self._keys.partition)
        return bool(reply == [b"OK"])

    async def depart(self, tenant: str, version: int) -> list[Any] | None:
        """Ends a tenant's residence here. Returns what its next home must know; None if a later
        move has taken place."""
        reply = await self._call("depart", tenant, version)
        return None if reply == [b"STALE"] else list(reply)

    async def arrive(self, tenant: str, version: int, source: int, ledger: list[Any]) -> bool:
        """Makes this partition the home of a tenant that has departed from `source`."""
        *meters, parts = ledger
        words = [word for part in parts for word in part]
        own = self._keys.partition
        reply = await self._call("settle", tenant, version, own, source, *meters, *words)
        return bool(reply == [b"OK"])

    async def away(self) -> dict[int, list[str]]:
        """Tenants that live here and have left something in other partitions, by partition."""
        with wire_errors("tenants' rests"), broker_errors(self._client, "HKEYS or HMGET"):
            fields: Any = await repeated(lambda: self._client.hkeys(self._keys.of("away")))
            places = [field.decode().split(" ", 1) for field in fields]
            if not places:
                return {}
            names = [tenant for _, tenant in places]
            key = self._keys.of("residents")
            states: Any = await repeated(lambda: self._client.hmget(key, names))
            found = dict[int, list[str]]()
            for (number, tenant), state in zip(places, states, strict=True):
                if state is not None and state.endswith(b" in"):
                    found.setdefault(int(number), []).append(tenant)
            return found

    async def left(self, tenants: list[str]) -> list[list[Any]]:
        """What tenants have left here: reserved tokens, stored bytes, and what its ends have added
        to their meters."""
        return await self._in_pages("left", 100, [(name,) for name in tenants], reads=True)

    async def lower(self, tenant: str, other: int, left: list[Any]) -> list[int]:
        """What a tenant that lives here has left in another partition, by `left` there. Returns the
        reserved tokens and stored bytes that count now."""
        return list(await self._call("lower", tenant, other, *left))


def _entry(raw: bytes) -> Entry:
    weight, state, *share = raw.decode().split()
    found = {"weight": float(weight), "state": state, "share": float(share[0]) if share else None}
    return msgspec.convert(found, Entry)


def _home(reply: list[Any]) -> Home:
    version, state, path = reply
    return Home(version, tuple(int(n) for n in path.split(b",")), state == b"moving")


class Ask(Protocol):
    """Calls one partition, each with what guards its calls."""

    async def __call__(self, number: int, call: Callable[[Homes], Awaitable[T]], /) -> T: ...


async def open_partitions(ask: Ask, num_partitions: int) -> PartitionMap:
    """Returns the map; makes one with so many partitions if there is none and that is over 1.
    Raises BrokerUnavailable."""
    known = await ask(0, Homes.map)
    if known.is_single and num_partitions > 1:
        entries: dict[int, Entry | None] = {n: Entry() for n in range(num_partitions)}
        try:
            await ask(0, lambda homes: homes.chart(known, entries))
        except MapChanged:
            pass
        else:
            log.info("partitions made num=%d", num_partitions)
        known = await ask(0, Homes.map)
    return known


async def home_of(ask: Ask, tenant: str, known: PartitionMap) -> tuple[Home, PartitionMap]:
    """A tenant's home, which may admit it, and the map as it is now. A new tenant gets one; a move
    that somebody began is completed. Raises BrokerUnavailable."""
    for _ in range(_MAX_TRIES):
        if known.is_single:
            return Home(), known
        try:
            home = await ask(0, lambda homes: homes.find(tenant, known))  # noqa: B023
        except MapChanged:
            known = await ask(0, Homes.map)
            continue
        if home.is_moving:
            home = await complete_move(ask, tenant, home)
        if home.version > 1:
            return home, known
        if await ask(home.number, lambda homes: homes.settle(tenant, home.version)):  # noqa: B023
            return home, known
    raise BrokerUnavailable(f"the home of a tenant changed {_MAX_TRIES} times meanwhile")


async def move_tenant(ask: Ask, tenant: str, target: int) -> Home | None:
    """Moves a tenant, whose unfinished jobs end where they are. May be repeated wherever it was
    interrupted. None: the tenant is not known, or no such partition is active."""
    for _ in range(_MAX_TRIES):
        home = await ask(0, lambda homes: homes.begin_move(tenant, target))
        if home is None:
            return None
        if home.is_moving:
            home = await complete_move(ask, tenant, home)
        if home.number == target:
            return home
    raise BrokerUnavailable("other moves of the tenant came between")


async def complete_move(ask: Ask, tenant: str, home: Home) -> Home:
    """What follows after a move has begun; any number of processes may do it at once."""
    source, target, version = home.partitions[-2], home.number, home.version
    ledger = await ask(source, lambda homes: homes.depart(tenant, version))
    if ledger is not None:
        await ask(target, lambda homes: homes.arrive(tenant, version, source, ledger))
        log.info("tenant moved from=%d to=%d", source, target)
    return await ask(0, lambda homes: homes.end_move(tenant, version)) or home


async def lower_rests(ask: Ask, number: int) -> None:
    """Brings what the tenants of a partition have left elsewhere up to date, as far as the other
    partitions answer."""
    for other, tenants in (await ask(number, Homes.away)).items():
        try:
            lefts = await ask(other, lambda homes: homes.left(tenants))  # noqa: B023
        except BrokerUnavailable as exc:
            log.info("what tenants left in partition %d is not known: %s", other, exc)
            continue
        for tenant, left in zip(tenants, lefts, strict=True):
            await ask(number, lambda homes: homes.lower(tenant, other, left))  # noqa: B023
