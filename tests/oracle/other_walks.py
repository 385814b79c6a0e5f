"""Random walks through deliveries of callbacks, files and batches, and operations on many jobs."""

from collections import Counter
from typing import Any

from contract.function_types import Wanted
from contract.operations import OperationKind, OperationProgress
from contract.outbox import Taken
from tests.oracle.test_files_and_batches import FileCalls
from tests.oracle.walk import LEASE_MS, TENANTS, Steps, Walk
from tests.oracle.world import LANES, LEASE_S, World, job_id, name_of

MAX_PER_TARGET = 2


class OutboxWalk(Walk):
    """Few jobs, many deliveries, by deliverers that die, repeat and come late."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        self.taken: list[Taken] = [Taken(job_id("none"), 1)]  # also those whose attempt is over
        self.attempts: Counter[str] = Counter()
        self.until_ms: dict[str, int] = {}  # of the leases that deliverers may rely on

    def steps(self) -> Steps:
        jobs = [(16, self.submit), (10, self.claim), (16, self.append), (4, self.cancel)]
        times = [(2, self.sweep), (8, lambda: self.world.pass_time(self.rng.choice([1, 3, 11])))]
        outbox = [(16, self.take), (8, self.start), (5, self.renew), (16, self.done)]
        return [*jobs, *times, *outbox, (9, self.replay)]

    def a_message(self) -> tuple[Taken, str]:
        taken = self.rng.choice(self.taken[-4:] if self.flip(0.9) else self.taken)
        return taken, name_of(taken.job_id)

    def record(self, name: str, *fields: str) -> list[str | None]:
        return [self.world.redis("HGET", f"out:{job_id(name)}", field) for field in fields]

    def is_held(self, taken: Taken, name: str) -> bool:
        return self.record(name, "state", "attempt") == ["taken", str(taken.attempt)]

    def take(self) -> None:
        """Nothing is taken twice, nor more for a destination than it may have in flight."""
        room, now_ms = self.rng.choice([1, 3, 50]), self.world.now_ms
        found = self.world.take(room, MAX_PER_TARGET)
        assert len(found) <= room
        for taken in found:
            name = name_of(taken.job_id)
            assert self.until_ms.get(name, 0) <= now_ms, "another holds it"
            self.attempts[name] += 1
            assert taken.attempt == self.attempts[name]
            self.until_ms[name] = now_ms + LEASE_MS
        held = [name for name, until_ms in self.until_ms.items() if until_ms > now_ms]
        in_flight = Counter(self.record(name, "to")[0] for name in held)
        assert max(in_flight.values(), default=0) <= MAX_PER_TARGET
        self.taken += found

    def start(self) -> None:
        taken, name = self.a_message()
        is_held = self.is_held(taken, name)
        record = self.world.run(self.world.outbox.start(taken, lease_s=LEASE_S))
        assert (record is not None) == is_held
        if record:
            entry = self.ledger.get(name)
            if entry and entry.has_ended:
                assert record.kind == entry.status, "no message comes after the end"
            self.until_ms[name] = self.world.now_ms + LEASE_MS

    def renew(self) -> None:
        taken, name = self.a_message()
        is_held = self.is_held(taken, name)
        assert self.world.run(self.world.outbox.renew(taken, lease_s=LEASE_S)) == is_held
        if is_held:
            self.until_ms[name] = self.world.now_ms + LEASE_MS

    def done(self) -> None:
        taken, name = self.a_message()
        outcome = self.rng.choice(["delivered", "retry", "dead", "dead"])
        attempt, began, number, kind = self.record(name, "attempt", "taken", "number", "kind")
        said = self.world.done(taken, outcome, self.rng.choice([0, 2, 20]))
        if attempt != str(taken.attempt):
            assert said == ("FENCED" if attempt else "GONE")
            return
        assert said == ("OK" if began in ("", number) else "SUPERSEDED")
        if began:
            del self.until_ms[name]
            at_last = outcome if kind not in ("started", "progress") else "idle"
            is_due = outcome == "retry" or said == "SUPERSEDED"
            assert self.record(name, "state", "taken") == ["due" if is_due else at_last, ""]

    def replay(self) -> None:
        _, name = self.a_message()
        state, tenant = self.record(name, "state")[0], self.rng.choice(TENANTS)
        said = self.world.run(self.world.outbox.replay(job_id(name), tenant))
        is_own = tenant == name[0]
        assert said == (("due" if state == "dead" else state) if is_own else None)
        letters = self.world.run(self.world.outbox.dead(tenant))
        assert not is_own or job_id(name) not in [letter.record.job_id for letter in letters]


NEXT = {  # the status that a feeder records at each status
    "validating": ("in_progress", "in_progress", "failed"),
    "in_progress": ("finalizing", "finalizing", "failed"),
    "finalizing": ("completed", "expired"),
    "cancelling": ("cancelled",),
}


class FilesWalk(Walk):
    """Files that come, expire and are dropped; batches with feeders that die and come late."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        self.calls = FileCalls(world)
        self.files: dict[str, tuple[int, int]] = {}  # bytes, ms until it expires
        self.batches: dict[str, list[Any]] = {}  # status, token, ms of the lease, of the start
        self.most = self.rng.choice([0, 60])
        self.num = 0

    def steps(self) -> Steps:
        files = [(14, self.add_file), (8, self.drop), (3, self.find), (6, self.delete_due)]
        batches = [(8, self.add_batch), (5, self.stop), (12, self.feed), (30, self.save)]
        batches += [(4, self.move)]
        return [
            *files,
            *batches,
            (8, lambda: self.world.pass_time(self.rng.choice([1, 3, 11, 70]))),
        ]

    def a_name(self, known: dict[str, Any]) -> str:
        """Mostly one of the youngest, sometimes none."""
        return self.rng.choice([*list(known)[-5:], "none"])

    def a_new_name(self) -> str:
        self.num += 1
        return f"{self.rng.choice(TENANTS)}{self.num}"

    def add_file(self) -> None:
        name = self.a_name(self.files) if self.flip(0.1) else self.a_new_name()
        num_bytes = self.rng.choice([0, 10, 30])
        if self.flip(0.3):
            self.calls.begin(name if self.flip(0.5) else f"lost{self.num}", 5)
        held = sum(size for each, (size, _) in self.files.items() if each[0] == name[0])
        said = self.calls.add(name, num_bytes, self.most)
        if name not in self.files and self.most and held + num_bytes > self.most:
            assert said == "FilesFull"
            return
        _, expires_ms = self.files.get(name, (0, self.world.now_ms + 60_000))
        self.files[name] = num_bytes, expires_ms
        assert said.split()[1] == str((expires_ms - self.world.now_ms) / 1000)

    def drop(self) -> None:
        name, tenant = self.a_name(self.files), self.rng.choice(["", *TENANTS])
        is_own = name in self.files and tenant in ("", name[0])
        assert self.calls.drop(name, tenant) == is_own
        if is_own:
            del self.files[name]

    def find(self) -> None:
        name, tenant = self.a_name(self.files), self.rng.choice(TENANTS)
        _, expires_ms = self.files.get(name, (0, 0))
        lives = tenant == name[0] and expires_ms > self.world.now_ms
        assert self.calls.found(name, tenant) == lives

    def delete_due(self) -> None:
        """What has expired is dropped first; a gateway may die before it reports the rest."""
        for each in self.calls.objects(self.rng.choice([1, 9])):
            assert self.files.get(each, (0, 0))[1] <= self.world.now_ms
            self.calls.drop(each)
            self.files.pop(each, None)
            if self.flip(0.8):
                self.world.redis("ZREM", "objects_due", each)

    def add_batch(self) -> None:
        name, most = self.a_new_name(), self.rng.choice([0, 3])
        num_open = sum(n[0] == name[0] and b[0] in NEXT for n, b in self.batches.items())
        terms: dict[str, Any] = {"max_open": most, "callback": self.rng.choice(["", "a"])}
        start_ms = self.a_start() if self.flip(0.3) else 0
        said = self.calls.batch(name, start_at_s=start_ms / 1000, **terms)
        assert said == ("BatchesFull" if most and num_open >= most else "None")
        if said == "None":
            self.batches[name] = ["validating", "", 0, start_ms]

    def a_start(self) -> int:
        """ms; sometimes over."""
        return self.world.now_ms // 1000 * 1000 + self.rng.choice([-3000, 2000, 9000])

    def move(self) -> None:
        name, tenant = self.a_name(self.batches), self.rng.choice(TENANTS)
        start_ms, known, now_ms = self.a_start(), self.batches.get(name), self.world.now_ms
        said = self.calls.move(name, start_ms / 1000, tenant)
        if known is None or tenant != name[0]:
            assert said is None
            return
        assert said == (known[3] > now_ms and known[0] in ("validating", "in_progress"))
        known[3] = max(start_ms, now_ms) if said else known[3]

    def stop(self) -> None:
        name, tenant = self.a_name(self.batches), self.rng.choice(TENANTS)
        said, known = self.calls.stop(name, tenant), self.batches.get(name)
        if known is None or tenant != name[0]:
            assert said is None
            return
        if known[0] in ("validating", "in_progress"):
            known[0] = "cancelling"
        assert said == known[0]

    def feed(self) -> None:
        """No batch that another holds; as many as may be."""
        self.num += 1
        runs, most, now_ms = self.flip(0.5), self.rng.choice([0, 1, 2, 9]), self.world.now_ms
        waiting = {n for n, b in self.batches.items() if b[0] in NEXT and b[2] <= now_ms}
        free = {n for n in waiting if (self.batches[n][0] == "in_progress") == runs}
        free -= {n for n in free if runs and self.batches[n][3] > now_ms}
        found = self.calls.feed(self.num, most, runs=runs)
        assert set(found) <= free
        assert len(found) == min(most, len(free))
        for name in found:
            self.batches[name][1:3] = [self.num, now_ms + LEASE_MS]

    def save(self) -> None:
        name = self.a_name(self.batches)
        known = self.batches.get(name, ["", 0, 0, 0])
        token = known[1] if self.flip(0.85) else self.num
        status = self.rng.choice(NEXT.get(known[0], ("failed",))) if self.flip(0.6) else ""
        expected = known[0] if self.flip(0.5) else self.rng.choice(["", "", "in_progress"])
        lease_s = self.rng.choice([LEASE_S] * 5 + [0.0])
        part: dict[str, Any] = self.rng.choice([{}, {"part": 1}, {"lost": 1}])
        said = self.calls.save(name, status, expected, token, lease_s=lease_s, total=9, **part)
        if not known[1] or token != known[1] or known[2] <= self.world.now_ms:
            assert said == "LeaseLost"
            return
        known[2] = self.world.now_ms + int(lease_s * 1000)
        is_other = expected not in ("", known[0]) and status != known[0]
        if is_other or (known[0] not in NEXT and status not in ("", known[0])):
            assert said == "StatusChanged"
            return
        known[0] = status or known[0]
        assert said == known[0]

    def check(self) -> None:
        for tenant in TENANTS:
            sizes = [size for name, (size, _) in self.files.items() if name[0] == tenant]
            assert self.calls.files(tenant)[-1] == sum(sizes)
        for name, (status, *_) in self.batches.items():
            assert self.calls.of(name, "status") == [status]
        self.world.audit.check()

    def finish(self) -> None:
        """Feeders end all batches, gateways delete what is due, and ends are delivered."""
        self.world.pass_time(LEASE_S)
        for runs in (False, True):
            for name in self.calls.feed(0, 1000, runs=runs):
                self.calls.save(name, "failed", token=0)
        for _ in range(3):
            self.world.pass_time(100)
            for each in self.calls.objects(1000):
                self.calls.drop(each)
                self.calls.deleted(each)
            self.world.due()
        self.world.audit.check_at_rest()
        self.world.audit.check_files_at_rest()


class OperationsWalk(Walk):
    """Cancels and replays by filter, by gateways that die and come back late."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        self.kinds: dict[str, OperationKind] = {}
        self.terms: dict[str, tuple[str, str, int]] = {}  # tenant, lane, time in ms
        self.first: dict[str, set[str]] = {}  # the open jobs at that time
        self.held: dict[str, tuple[str, int]] = {}  # operation → token, ms of the lease
        self.counts: Counter[str] = Counter()  # jobs that matched
        self.open: set[str] = set()
        self.num_tokens = 0

    def steps(self) -> Steps:
        jobs = [(30, self.submit), (8, self.claim), (12, self.append), (4, self.delete)]
        times = [(6, lambda: self.world.pass_time(self.rng.choice([0.001, 1, 4, 11])))]
        operations = [(10, self.add), (12, self.take), (30, self.work), (2, self.stop)]
        return [*jobs, *times, *operations, (1, self.sweep), (4, self.give_up)]

    def give_up(self) -> None:
        for taken in self.world.take():
            self.world.done(taken, "dead")

    def an_operation(self) -> str:
        return self.rng.choice([*list(self.kinds)[-4:], "none"])

    def add(self) -> None:
        name, kind = f"o{len(self.kinds)}", self.rng.choice([OperationKind.CANCEL, *OperationKind])
        of_all = kind is not OperationKind.REPLAY_CALLBACKS
        tenant = self.rng.choice(["", *TENANTS] if of_all else TENANTS)
        lane = self.rng.choice(["", "", *LANES])
        wanted = Wanted(lanes=frozenset([lane] if lane else []))
        terms: dict[str, Any] = {"owner": self.rng.choice(TENANTS), "tenant": tenant}
        said = self.world.told(self.world.operations.add(name, kind, wanted, **terms))
        if said is not None:
            assert said == "OperationsFull"
            assert len(self.open) >= 16
            return
        self.kinds[name] = kind
        self.open.add(name)
        self.terms[name] = tenant, lane, self.world.now_ms
        self.first[name] = self.meant(name)

    def meant(self, name: str) -> set[str]:
        """The open jobs that an operation may end: also later ones of its own moment."""
        tenant, lane, at_ms = self.terms[name]
        entries = [e for e in self.ledger.values() if not e.has_ended and e.created_ms <= at_ms]
        return {e.name for e in entries if tenant in ("", e.name[0]) and lane in ("", e.lane)}

    def take(self) -> None:
        self.num_tokens += 1
        token, now_ms = f"{self.num_tokens}", self.world.now_ms
        name = self.world.run(self.world.operations.take(token, lease_s=LEASE_S))
        free = {n for n in self.open if self.held.get(n, ("", 0))[1] <= now_ms}
        assert name in free if free else name is None
        if name is not None:
            self.held[name] = token, now_ms + LEASE_MS

    def work(self) -> None:
        """A step of any size, mostly followed by a report of the jobs that it handed out."""
        name = self.an_operation()
        bounds = {
            "max_looks": self.rng.choice([1, 3, 500]),
            "max_jobs": self.rng.choice([0, 1, 20]),
        }
        token = "other" if self.flip(0.1) else self.held.get(name, ("0", 0))[0]
        said = self.one_step(name, token, lease_s=self.rng.choice([LEASE_S] * 4 + [0.0]), **bounds)
        if said and said.job_ids and self.flip(0.7):
            self.report(name, said)

    def one_step(
        self, name: str, token: str, *, lease_s: float = LEASE_S, **terms: Any
    ) -> OperationProgress | None:
        """None where the lease was lost."""
        said = self.world.told(self.world.operations.step(name, token, lease_s=lease_s, **terms))
        known, until_ms = self.held.get(name, ("", 0))
        if token != known or until_ms <= self.world.now_ms:
            assert said == "LeaseLost"
            return None
        self.held[name] = token, self.world.now_ms + int(lease_s * 1000)
        if self.kinds[name] is OperationKind.CANCEL:
            self.heard(name, said)
        if said.state != "running":
            self.open.discard(name)
        found: OperationProgress = said
        return found

    def heard(self, name: str, said: OperationProgress) -> None:
        """Only what is meant is cancelled, and all of it in the end."""
        is_open = [n for n, e in self.ledger.items() if not e.has_ended]
        ended = {n for n in is_open if self.world.field(n, "state") == ["cancelled"]}
        assert ended <= self.meant(name)
        for each in ended:
            self.ledger[each].end("cancelled", self.world.now_ms)
        self.counts[name] += len(ended)
        assert said.matched == said.done == self.counts[name]
        if said.state == "completed" and name in self.open:
            assert not self.meant(name) & self.first[name]

    def report(self, name: str, said: OperationProgress) -> None:
        """The jobs of a replay were submitted again."""
        entries = [self.ledger.get(name_of(each)) for each in said.job_ids]
        assert all(entry is None or entry.has_ended for entry in entries)
        counts = said.matched + len(entries), said.done + len(entries), said.failed
        reported = OperationProgress(said.state, *counts, (), said.cursor)
        told = self.one_step(name, self.held[name][0], reported=reported, max_jobs=0)
        assert told is None or (told.matched, told.done, told.failed) == counts

    def stop(self) -> None:
        name = self.an_operation()
        assert self.world.run(self.world.operations.stop(name)) != "running"
        self.open.discard(name)

    def finish(self) -> None:
        """Others end every operation."""
        self.world.pass_time(LEASE_S + 1)
        self.give_up()
        take = self.world.operations.take
        while (name := self.world.run(take("last", lease_s=LEASE_S))) is not None:
            self.held[name] = "last", self.world.now_ms + LEASE_MS
            while (said := self.one_step(name, "last")) and said.state == "running":
                if said.job_ids:
                    self.report(name, said)
        assert not self.open
        super().finish()
