"""A seeded random walk of tenants that move between partitions while they submit jobs.

Gateways have old maps and old homes; movers die between their calls, repeat them, and bring what
they read long ago. The clock stands still, so all limits are exact. Each reply is compared with the
reference. A tenant never has more than one home, nor more than its limits allow in all partitions.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from contract.errors import JobRefused
from contract.function_types import Append, Claimed, Submission, TenantLimits
from contract.functions import Functions, encoded_parts, stored_bytes
from contract.ids import in_partition
from contract.jobs import Job, JobStatus
from contract.keys import Keys
from contract.partitions import (
    Entry,
    Home,
    Homes,
    MapChanged,
    Moved,
    PartitionInUse,
    PartitionMap,
    complete_move,
)
from tests.contract.some_calls import make_job, tokens
from tests.oracle.reference_homes import Left, ReferenceHomes

TENANTS = ["a", "b", "c"]
NUMBERS = range(4)
MAX_REQUESTS, MAX_CONCURRENT, MAX_METERED = 12, 100, 2000
EXPECTED_TOKENS, MAX_TOKENS = 10, 20
COST = 3 + EXPECTED_TOKENS


def with_one_cost(source: str) -> str:
    """The library, where all jobs have one cost, which some outgrow."""
    source = source.replace("MIN_LENGTHS = 5 ", "MIN_LENGTHS = 2 ^ 50 ")
    return source.replace("return max_tokens, 'cap'", f"return {EXPECTED_TOKENS}, 'cap'")


@dataclass
class GatewayView:
    """What one gateway believes."""

    known: PartitionMap
    homes: dict[str, Home]


class MovesWalk:
    """Draws one step after another."""

    def __init__(self, client: Any, namespace: str, seed: int) -> None:
        self._rng = random.Random(seed)
        self._reference = ReferenceHomes()
        self._homes = {n: Homes(client, Keys(namespace, n)) for n in NUMBERS}
        self._functions = {n: Functions(client, Keys(namespace, n)) for n in NUMBERS}
        self._entries: dict[int, Entry] = {}
        self._gateways = [GatewayView(PartitionMap(), {}) for _ in range(2)]
        self._ledgers: list[tuple[str, Home, list[Any], list[Any]]] = []  # as read; by reference
        self._lefts: list[tuple[str, int, int, list[Any], Left]] = []
        self._running: dict[int, list[Claimed]] = defaultdict(list)
        self._ended: list[tuple[int, Job]] = []
        self._stored: dict[str, int] = {}
        self.num_entered: dict[str, int] = defaultdict(int)
        self.true_reserved: dict[str, int] = defaultdict(int)
        self.true_stored: dict[str, int] = defaultdict(int)
        self.true_tokens: dict[str, float] = defaultdict(float)
        self._steps: list[tuple[int, Callable[[], Coroutine[Any, Any, None]]]] = [
            (3, self._chart),
            (4, self._refresh),
            (14, self._find),
            (6, self._settle),
            (8, self._begin_move),
            (12, self._depart),
            (12, self._arrive),
            (8, self._end_move),
            (20, self._enter),
            (36, self._submit),
            (18, self._claim),
            (24, self._end),
            (8, self._delete),
            (30, self._read_left),
            (40, self._lower),
        ]

    async def run(self, num_steps: int) -> None:
        await self._chart()
        for _ in range(num_steps):
            weights = [weight for weight, _ in self._steps]
            await self._rng.choices([step for _, step in self._steps], weights)[0]()
            self._check()
        await self._come_to_rest()

    def _check(self) -> None:
        for tenant in TENANTS:
            homes = [n for n in NUMBERS if self._reference.ledger(n, tenant).is_in]
            assert len(homes) <= 1, "one partition admits a tenant"
            assert self.num_entered[tenant] <= MAX_REQUESTS
            assert self.true_reserved[tenant] <= MAX_CONCURRENT
            for n in homes:
                ledger = self._reference.ledger(n, tenant)
                assert ledger.all_reserved >= self.true_reserved[tenant]
                assert ledger.all_stored >= self.true_stored[tenant]

    # --- the map and the homes

    async def _chart(self) -> None:
        version = self._reference.version - (self._rng.random() < 0.1)
        changes: dict[int, Entry | None] = {}
        if not self._entries:
            version, changes = 0, {n: Entry() for n in (0, 1, 2)}
        else:
            number = self._rng.choice(NUMBERS)
            removes = self._rng.random() < 0.4 and number in self._entries
            drains = number != 0 and self._rng.random() < 0.3
            made = Entry(1.0, "draining" if drains else "active")
            changes[number] = None if removes else made
        words = {n: "" if e is None else e.state for n, e in changes.items()}
        expected = self._reference.chart(version, words)
        try:
            await self._homes[0].chart(PartitionMap(max(0, version)), changes)
        except MapChanged:
            assert expected[0] == b"STALE"
        except PartitionInUse:
            assert expected[0] == b"IN_USE"
        else:
            assert expected[0] == b"OK"
            for number, entry in changes.items():
                if entry is None:
                    self._entries.pop(number, None)
                else:
                    self._entries[number] = entry

    async def _refresh(self) -> None:
        view = self._rng.choice(self._gateways)
        view.known = PartitionMap(self._reference.version, dict(self._entries))

    async def _find(self) -> None:
        view, tenant = self._rng.choice(self._gateways), self._rng.choice(TENANTS)
        known = view.known
        if self._rng.random() < 0.2:  # one that takes no tenants, or is none
            known = PartitionMap(self._reference.version, {self._rng.choice(NUMBERS): Entry()})
        if known.is_single:
            return
        expected = self._reference.home(tenant, known.choose(tenant), known.version)
        try:
            home = await self._homes[0].find(tenant, known)
        except MapChanged:
            assert expected == [b"STALE"]
            return
        assert _reply(home) == expected
        view.homes[tenant] = home

    async def _settle(self) -> None:
        """Only a new tenant's home: others come with what they left."""
        view, tenant = self._rng.choice(self._gateways), self._rng.choice(TENANTS)
        home = view.homes.get(tenant)
        if home is not None and home.version == 1:
            settled = await self._homes[home.number].settle(tenant, 1)
            assert settled == self._reference.settle(home.number, tenant, 1, -1, None)

    # --- moves

    async def _begin_move(self) -> None:
        tenant, target = self._rng.choice(TENANTS), self._rng.choice([0, 1, 0, 1, *NUMBERS])
        expected = self._reference.begin_move(tenant, target)
        home = await self._homes[0].begin_move(tenant, target)
        assert ([b"NOT_FOUND"] if home is None else _reply(home)) == expected

    def _seen_home(self, tenant: str) -> Home | None:
        """The tenant's home, or one that it had long ago."""
        known = self._reference.homes.get(tenant)
        if known is None or len(known.path) < 2:
            return None
        return Home(known.version, tuple(known.path), known.state == "moving")

    async def _depart(self) -> None:
        tenant = self._rng.choice(TENANTS)
        home = self._seen_home(tenant)
        old = [(h, t) for t, h, *_ in self._ledgers if t == tenant]
        if old and self._rng.random() < 0.2:
            home, _ = self._rng.choice(old)
        if home is None or not (home.is_moving or old):
            return
        source = home.partitions[-2]
        expected = self._reference.depart(source, tenant, home.version)
        ledger = await self._homes[source].depart(tenant, home.version)
        assert (ledger is None) == (expected is None)
        if ledger is not None and expected is not None:
            assert _ledger(ledger) == expected, (_ledger(ledger), expected)
            self._ledgers.append((tenant, home, ledger, expected))

    async def _arrive(self) -> None:
        if self._ledgers:
            recent = self._ledgers[-3:] if self._rng.random() < 0.8 else self._ledgers
            tenant, home, ledger, expected = self._rng.choice(recent)
            source, version = home.partitions[-2], home.version
            arrived = await self._homes[home.number].arrive(tenant, version, source, ledger)
            known = self._reference.settle(home.number, tenant, version, source, expected)
            assert arrived == known
            await self._quote(home.number, tenant)

    async def _end_move(self) -> None:
        """By a mover whose new home has answered."""
        if self._ledgers:
            tenant, home, *_ = self._rng.choice(self._ledgers[-3:])
            if self._reference.ledger(home.number, tenant).version >= home.version:
                expected = self._reference.end_move(tenant, home.version)
                ended = await self._homes[0].end_move(tenant, home.version)
                assert ended is not None
                assert _reply(ended) == expected

    async def _read_left(self) -> None:
        tenant, number = self._rng.choice(TENANTS), self._rng.choice(NUMBERS)
        others = list(self._reference.ledger(number, tenant).away)
        if others:
            other = self._rng.choice(others)
            [left] = await self._homes[other].left([tenant])
            expected = self._reference.ledger(other, tenant).left
            assert _left(left) == expected
            self._lefts.append((tenant, number, other, left, expected))

    async def _lower(self) -> None:
        if self._lefts:
            recent = self._lefts[-self._rng.choice([4, 40]) :]
            tenant, number, other, left, known = self._rng.choice(recent)
            expected = self._reference.lower(number, tenant, other, known)
            assert await self._homes[number].lower(tenant, other, left) == expected
            await self._quote(number, tenant)

    async def _quote(self, number: int, tenant: str) -> None:
        """Where the tenant lives, its meter is that of the reference."""
        ledger = self._reference.ledger(number, tenant)
        if ledger.is_in:
            job, submission = _job(tenant, Home(ledger.version, (number,)))
            quote = await self._functions[number].quote(job, submission)
            assert quote.rates.tokens is not None
            assert quote.rates.tokens.remaining == max(0, MAX_METERED - max(0, ledger.tokens))
            fits = max(0.0, ledger.tokens) + COST <= MAX_METERED
            fits = fits and ledger.all_reserved + COST <= MAX_CONCURRENT
            assert (quote.refusal is None) == fits

    # --- calls and jobs

    async def _enter(self) -> None:
        view, tenant = self._rng.choice(self._gateways), self._rng.choice(TENANTS)
        home = view.homes.get(tenant)
        if home is None:
            return
        ledger = self._reference.ledger(home.number, tenant)
        admits = self._reference.admits(home.number, tenant, home.version)
        limits = TenantLimits(requests_per_min=MAX_REQUESTS)
        try:
            await self._functions[home.number].enter(tenant, limits, home=home.version)
        except Moved:
            assert not admits
        except JobRefused:
            assert admits
            assert ledger.requests + 1 > MAX_REQUESTS
        else:
            assert admits
            assert ledger.requests + 1 <= MAX_REQUESTS
            ledger.requests += 1
            self.num_entered[tenant] += 1

    async def _submit(self) -> None:
        view, tenant = self._rng.choice(self._gateways), self._rng.choice(TENANTS)
        home = view.homes.get(tenant)
        if home is None:
            return
        job, submission = _job(tenant, home)
        ledger = self._reference.ledger(home.number, tenant)
        admits = self._reference.admits(home.number, tenant, home.version)
        fits = max(0.0, ledger.tokens) + COST <= MAX_METERED
        fits = fits and ledger.all_reserved + COST <= MAX_CONCURRENT
        try:
            await self._functions[home.number].submit(job, submission)
        except Moved:
            assert not admits
        except JobRefused:
            assert admits
            assert not fits
        else:
            assert admits
            assert fits
            num_bytes = stored_bytes(job, submission, encoded_parts(job, submission))
            self._stored[job.id] = num_bytes
            ledger.reserved += COST
            ledger.stored += num_bytes
            ledger.tokens = max(0.0, ledger.tokens) + COST
            self.true_reserved[tenant] += COST
            self.true_stored[tenant] += num_bytes
            self.true_tokens[tenant] += COST

    async def _claim(self) -> None:
        number = self._rng.choice(NUMBERS)
        functions = self._functions[number]
        _, weights = await functions.waiting("m", "w", ["standard"])
        claimed = await functions.claim(
            "w", "m", ["standard"], lease_s=3600, max_jobs=2, max_tokens=10_000
        )
        assert bool(weights) == bool(claimed), "what waits is known"
        self._running[number] += claimed

    async def _end(self) -> None:
        number = self._rng.choice(NUMBERS)
        if not self._running[number]:
            return
        claimed = self._running[number].pop(0)
        job, num_tokens = claimed.job, self._rng.randint(1, MAX_TOKENS)
        event = tokens(0, *range(num_tokens))
        items = [Append(job.id, claimed.epoch, 1, event, num_tokens, JobStatus.SUCCEEDED)]
        await self._functions[number].append("w", items, lease_s=3600)
        ledger = self._reference.ledger(number, job.tenant)
        ledger.reserved -= COST
        more = 3 + num_tokens - COST
        if more > 0:  # it has grown to its cap
            self._reference.meter(number, job.tenant, MAX_TOKENS - EXPECTED_TOKENS)
            self._reference.meter(number, job.tenant, more - (MAX_TOKENS - EXPECTED_TOKENS))
        else:
            self._reference.meter(number, job.tenant, more)
        self.true_reserved[job.tenant] -= COST
        self.true_tokens[job.tenant] += more
        self._ended.append((number, job))

    async def _delete(self) -> None:
        if self._ended:
            number, job = self._ended.pop(self._rng.randrange(len(self._ended)))
            assert await self._functions[number].delete(job.id, job.tenant) is True
            num_bytes = self._stored.pop(job.id)
            self._reference.ledger(number, job.tenant).stored -= num_bytes
            self.true_stored[job.tenant] -= num_bytes

    # --- the end

    async def _come_to_rest(self) -> None:
        """All moves are completed, and what was left is told: then the homes know everything."""

        async def ask(number: int, call: Callable[[Homes], Any], /) -> Any:
            return await call(self._homes[number])

        for tenant, known in self._reference.homes.items():
            home = Home(known.version, tuple(known.path), known.state == "moving")
            if home.is_moving:
                source = home.partitions[-2]
                expected = self._reference.depart(source, tenant, home.version)
                assert expected is not None
                await complete_move(ask, tenant, home)
                self._reference.settle(home.number, tenant, home.version, source, expected)
            elif home.version == 1:
                await self._homes[home.number].settle(tenant, 1)
                self._reference.settle(home.number, tenant, 1, -1, None)
            ledger = self._reference.ledger(home.number, tenant)
            assert ledger.is_in
            for other in list(ledger.away):
                [left] = await self._homes[other].left([tenant])
                self._reference.lower(home.number, tenant, other, _left(left))
                await self._homes[home.number].lower(tenant, other, left)
            own = await self._homes[home.number].left([tenant])
            assert _left(own[0])[:3] == (home.version, ledger.reserved, ledger.stored)
            assert ledger.all_reserved == self.true_reserved[tenant]
            assert ledger.all_stored == self.true_stored[tenant]
            assert ledger.requests == self.num_entered[tenant]
            assert ledger.tokens == self.true_tokens[tenant]
            departed = await self._homes[home.number].depart(tenant, home.version + 1)
            assert departed is not None
            assert _ledger(departed) == self._reference.depart(
                home.number, tenant, home.version + 1
            )


async def walk_of_moves(client: Any, namespace: str, seed: int, num_steps: int) -> None:
    """Raises AssertionError for a difference."""
    await MovesWalk(client, namespace, seed).run(num_steps)


def _job(tenant: str, home: Home) -> tuple[Job, Submission]:
    job = make_job(tenant)
    params = replace(job.params, max_tokens=MAX_TOKENS)
    job = replace(job, id=in_partition(job.id, home.number), params=params)
    limits = TenantLimits(concurrent_tokens=MAX_CONCURRENT, tokens_per_min=MAX_METERED)
    return job, Submission(
        max_output_tokens=MAX_TOKENS,
        deadline_s=3600,
        retention_s=3600,
        limits=limits,
        home=home.version,
    )


def _reply(home: Home) -> list[Any]:
    state = b"moving" if home.is_moving else b"in"
    return [home.version, state, ",".join(map(str, home.partitions)).encode()]


def _left(left: list[Any]) -> Left:
    version, reserved, stored, late = left
    number, total = late.split(b":")
    return version, reserved, stored, int(number), float(total)


def _ledger(reply: list[Any]) -> list[Any]:
    requests, _, level, _, parts = reply
    found = {int(number) if number else None: _left(left) for number, *left in parts}
    return [float(requests), float(level), found]
