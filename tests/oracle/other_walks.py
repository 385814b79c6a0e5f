"""Random walks through deliveries of callbacks, files and batches, and operations on many jobs."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from contract.batches import BatchStatus, Part
from contract.function_types import Wanted
from contract.operations import OperationKind, Step
from contract.outbox import Taken
from tests.oracle.test_files_and_batches import add, batch, cancel, due, save, take
from tests.oracle.walk import TENANTS, Walk
from tests.oracle.world import LANES, LEASE_S, URLS, World, job_id, name_of

LEASE_MS = int(LEASE_S * 1000)
MAX_PER_TARGET = 2
Steps = list[tuple[int, Callable[[], None]]]


class OutboxWalk(Walk):
    """Few jobs, many deliveries, by deliverers that die, repeat and come late."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        self.taken: list[Taken] = [Taken(job_id("none"), 1)]  # also those whose attempt is over
        self.attempts: Counter[str] = Counter()
        self.until_ms: dict[str, int] = {}  # of the leases that deliverers may rely on

    def steps(self) -> Steps:
        jobs = [
            (16, self.submit),
            (10, self.claim),
            (16, self.append),
            (4, self.cancel),
            (3, self.release),
        ]
        times = [(2, self.sweep), (8, lambda: self.world.pass_time(self.rng.choice([1, 3, 11])))]
        outbox = [
            (16, self.take),
            (8, self.start),
            (5, self.renew),
            (16, self.done),
            (9, self.replay),
        ]
        return [*jobs, *times, *outbox]

    def a_message(self) -> Taken:
        return self.rng.choice(self.taken[-4:] if self.flip(0.9) else self.taken)

    def record(self, name: str, *fields: str) -> list[str | None]:
        return [self.world.redis("HGET", f"out:{job_id(name)}", field) for field in fields]

    def take(self) -> None:
        """Nothing is taken twice, nor more for a destination than it may have in flight."""
        room = self.rng.choice([1, 3, 50])
        found = self.world.take(room, MAX_PER_TARGET)
        assert len(found) <= room
        for taken in found:
            name = name_of(taken.job_id)
            assert self.until_ms.get(name, 0) <= self.world.now_ms, "another holds it"
            assert taken.attempt == self.attempts[name] + 1
            self.attempts[name] += 1
            self.until_ms[name] = self.world.now_ms + LEASE_MS
        held = [name for name, until_ms in self.until_ms.items() if until_ms > self.world.now_ms]
        assert (
            max(Counter(self.record(name, "to")[0] for name in held).values(), default=0)
            <= MAX_PER_TARGET
        )
        self.taken += found

    def is_held(self, taken: Taken) -> bool:
        return self.record(name_of(taken.job_id), "state", "attempt") == [
            "taken",
            str(taken.attempt),
        ]

    def start(self) -> None:
        taken = self.a_message()
        is_held = self.is_held(taken)
        record = self.world.run(self.world.outbox.start(taken, lease_s=LEASE_S))
        assert (record is not None) == is_held
        if record:
            entry = self.ledger.get(name_of(taken.job_id))
            if entry and entry.has_ended:
                assert record.kind == entry.status, "no message comes after the end"
            self.until_ms[name_of(taken.job_id)] = self.world.now_ms + LEASE_MS

    def renew(self) -> None:
        taken = self.a_message()
        is_held = self.is_held(taken)
        assert self.world.run(self.world.outbox.renew(taken, lease_s=LEASE_S)) == is_held
        if is_held:
            self.until_ms[name_of(taken.job_id)] = self.world.now_ms + LEASE_MS

    def done(self) -> None:
        taken, outcome = self.a_message(), self.rng.choice(["delivered", "retry", "dead", "dead"])
        name = name_of(taken.job_id)
        attempt, began, number, kind = self.record(name, "attempt", "taken", "number", "kind")
        said = self.world.done(taken, outcome, self.rng.choice([0, 2, 20]))  # type: ignore[arg-type]
        if attempt != str(taken.attempt):
            assert said == ("FENCED" if attempt else "GONE")
            return
        assert said == ("OK" if began in ("", number) else "SUPERSEDED")
        if not began:
            return
        del self.until_ms[name]
        is_end = kind in ("succeeded", "failed", "cancelled", "expired")
        wanted = (
            "due" if outcome == "retry" or said == "SUPERSEDED" else outcome if is_end else "idle"
        )
        assert self.record(name, "state", "taken") == [wanted, ""]

    def replay(self) -> None:
        name, tenant = name_of(self.a_message().job_id), self.rng.choice(TENANTS)
        state, owner = self.record(name, "state", "tenant")
        said = self.world.run(self.world.outbox.replay(job_id(name), tenant))
        is_dead = owner == tenant and state == "dead"
        assert str(said) == ("due" if is_dead else state if owner == tenant else "None")
        letters = self.world.run(self.world.outbox.dead(tenant))
        assert job_id(name) not in [letter.record.job_id for letter in letters] or not is_dead


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
        self.files: dict[str, list[Any]] = {}  # tenant, bytes, ms until it expires
        self.batches: dict[str, list[Any]] = {}  # tenant, status, token, ms of the lease
        self.tokens = ["0"]
        self.most = self.rng.choice([0, 60])

    def steps(self) -> Steps:
        files = [
            (14, self.add_file),
            (8, self.drop),
            (3, self.find),
            (3, self.begin),
            (6, self.delete_due),
        ]
        batches = [(8, self.add_batch), (5, self.cancel_batch), (12, self.take), (30, self.save)]
        passing = (8, lambda: self.world.pass_time(self.rng.choice([1, 1, 3, 11, 70])))
        return [*files, *batches, passing]

    def add_file(self) -> None:
        known = list(self.files)[-4:]
        name = (
            self.rng.choice(known)
            if known and self.flip(0.1)
            else f"file-{self.world.now_ms}-{self.rng.random()}"
        )
        tenant, num_bytes = self.rng.choice(TENANTS), self.rng.choice([0, 10, 30])
        if name in self.files:
            tenant = self.files[name][0]
        held = sum(f[1] for f in self.files.values() if f[0] == tenant)
        said = add(self.world, name, num_bytes, tenant, self.most)
        if name not in self.files and self.most and held + num_bytes > self.most:
            assert said == "FilesFull"
            return
        self.files.setdefault(name, [tenant, 0, self.world.now_ms + 60_000])[1] = num_bytes
        assert said.expires_ms == self.files[name][2]

    def drop(self) -> None:
        name, tenant = (
            self.rng.choice([*list(self.files)[-6:], "none"]),
            self.rng.choice(["", *TENANTS]),
        )
        is_own = name in self.files and tenant in ("", self.files[name][0])
        assert self.world.run(self.world.files.drop(name, tenant)) == is_own
        if is_own:
            del self.files[name]

    def find(self) -> None:
        name, tenant = self.rng.choice([*list(self.files)[-6:], "none"]), self.rng.choice(TENANTS)
        known = self.files.get(name, ["", 0, 0])
        found = self.world.run(self.world.files.find(name, tenant))
        assert (found is not None) == (known[0] == tenant and known[2] > self.world.now_ms)

    def begin(self) -> None:
        self.world.run(self.world.files.begin(f"lost-{self.rng.random()}", upload_s=5))

    def delete_due(self) -> None:
        """What has expired is dropped first; a gateway may die before it reports the rest."""
        for each in due(self.world, self.rng.choice([1, 9])):
            assert each not in self.files or self.files[each][2] <= self.world.now_ms
            self.world.run(self.world.files.drop(each))
            self.files.pop(each, None)
            if self.flip(0.8):
                self.world.redis("ZREM", "objects_due", each)

    def add_batch(self) -> None:
        name, tenant, most = (
            f"b{len(self.batches)}",
            self.rng.choice(TENANTS),
            self.rng.choice([0, 3]),
        )
        num_open = sum(b[0] == tenant and b[1] in NEXT for b in self.batches.values())
        said = batch(
            self.world, name, tenant, max_open=most, callback=self.rng.choice([None, URLS[0]])
        )
        assert said == ("BatchesFull" if most and num_open >= most else "None")
        if said == "None":
            self.batches[name] = [tenant, "validating", "", 0]

    def a_batch(self) -> str:
        return self.rng.choice([*list(self.batches)[-5:], "none"])

    def cancel_batch(self) -> None:
        name, tenant = self.a_batch(), self.rng.choice(TENANTS)
        said, known = cancel(self.world, name, tenant), self.batches.get(name)
        if known is None or known[0] != tenant:
            assert said == "None"
            return
        if known[1] in ("validating", "in_progress"):
            known[1] = "cancelling"
        assert said == known[1]

    def take(self) -> None:
        """No batch that another holds; as many as may be."""
        token, runs, most = f"{len(self.tokens)}", self.flip(0.5), self.rng.choice([0, 1, 2, 9])
        self.tokens.append(token)
        now_ms = self.world.now_ms
        open_ = {
            n for n, b in self.batches.items() if b[1] in NEXT and (b[1] == "in_progress") == runs
        }
        free = {n for n in open_ if self.batches[n][3] <= now_ms}
        found = take(self.world, token, most, runs=runs)
        assert set(found) <= free
        assert len(found) == min(most, len(free))
        for name in found:
            self.batches[name][2:] = [token, now_ms + LEASE_MS]

    def save(self) -> None:
        name = self.a_batch()
        known = self.batches.get(name, ["", "", "", 0])
        token = known[2] if known[2] and self.flip(0.85) else self.rng.choice(self.tokens)
        status = self.rng.choice(NEXT.get(known[1], ("failed",))) if self.flip(0.6) else None
        expected = (
            known[1]
            if known[1] and self.flip(0.5)
            else self.rng.choice([None, None, "in_progress"])
        )
        lease_s = self.rng.choice([LEASE_S] * 5 + [0.0])
        part = self.rng.choice([None, (1, Part(token, 5, 1, 7, 0, False)), (1, None)])
        terms: dict[str, Any] = {"name": name, "token": token, "lease_s": lease_s, "part": part}
        said = save(self.world, status, expected, fields={"total": 9}, **terms)
        if not known[2] or token != known[2] or known[3] <= self.world.now_ms:
            assert said == "LeaseLost"
            return
        known[3] = self.world.now_ms + int(lease_s * 1000)
        is_other = expected not in (None, known[1]) and status != known[1]
        has_ended = known[1] not in NEXT and status not in (None, known[1])
        if is_other or has_ended:
            assert said == "StatusChanged"
            return
        known[1] = status or known[1]
        assert said == known[1]

    def check(self) -> None:
        for tenant in TENANTS:
            held = sum(f[1] for f in self.files.values() if f[0] == tenant)
            assert self.world.run(self.world.files.tenant_bytes(tenant)) == held
        for name, (tenant, status, *_) in self.batches.items():
            found = self.world.run(self.world.batches.find(name, tenant))
            assert found is not None
            assert found.status == status
        self.world.audit.check()

    def finish(self) -> None:
        """Feeders end all batches, gateways delete what is due, and ends are delivered."""
        self.world.pass_time(LEASE_S)
        for runs in (False, True):
            for name in take(self.world, "last", 1000, runs=runs):
                save(self.world, str(BatchStatus.FAILED), name=name, token="last")
        for _ in range(3):
            self.world.pass_time(100)
            for each in due(self.world, 1000):
                self.world.run(self.world.files.drop(each))
                self.world.redis("ZREM", "objects_due", each)
            self.world.due()
        self.world.audit.check_at_rest()
        self.world.audit.check_files_at_rest()


class OperationsWalk(Walk):
    """Cancels and replays by filter, by gateways that die and come back late."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        self.kinds: dict[str, OperationKind] = {}
        self.terms: dict[str, tuple[str, str, int]] = {}  # tenant, lane, time in ms
        self.first: dict[str, set[str]] = {}  # open jobs at that time
        self.held: dict[str, tuple[str, int]] = {}  # operation → token, ms of the lease
        self.counts: dict[str, int] = {}  # jobs that matched
        self.open: set[str] = set()
        self.num_tokens = 0

    def steps(self) -> Steps:
        jobs = [
            (30, self.submit),
            (8, self.claim),
            (12, self.append),
            (4, self.delete),
            (1, self.sweep),
        ]
        passing = (6, lambda: self.world.pass_time(self.rng.choice([0.001, 1, 4, 11])))
        return [
            *jobs,
            passing,
            (4, self.give_up),
            (10, self.add),
            (12, self.take),
            (30, self.work),
            (2, self.stop),
        ]

    def give_up(self) -> None:
        for taken in self.world.take():
            self.world.done(taken, "dead")

    def an_operation(self) -> str:
        return self.rng.choice([*list(self.kinds)[-4:], "none"])

    def add(self) -> None:
        name, kind = f"o{len(self.kinds)}", self.rng.choice([OperationKind.CANCEL, *OperationKind])
        tenant = self.rng.choice(
            TENANTS if kind is OperationKind.REPLAY_CALLBACKS else ["", *TENANTS]
        )
        lane = self.rng.choice(["", "", *LANES])
        wanted = Wanted(lanes=frozenset([lane] if lane else []))
        terms = {"owner": self.rng.choice(TENANTS), "tenant": tenant}
        said = self.world.told(self.world.operations.add(name, kind, wanted, **terms))
        if said is not None:
            assert said == "OperationsFull"
            assert len(self.open) >= 16
            return
        self.kinds[name] = kind
        self.counts[name] = 0
        self.open.add(name)
        self.terms[name] = tenant, lane, self.world.now_ms
        self.first[name] = self.meant(name)

    def meant(self, name: str) -> set[str]:
        """The open jobs that an operation may end: also later ones of its own moment."""
        tenant, lane, at_ms = self.terms[name]
        return {
            n
            for n, e in self.ledger.items()
            if not e.has_ended
            and e.created_ms <= at_ms
            and tenant in ("", e.tenant)
            and lane in ("", e.lane)
        }

    def take(self) -> None:
        self.num_tokens += 1
        token, now_ms = f"{self.num_tokens}", self.world.now_ms
        name = self.world.run(self.world.operations.take(token, lease_s=LEASE_S))
        free = {n for n in self.open if self.held.get(n, ("", 0))[1] <= now_ms}
        assert name in free if free else name is None
        if name is not None:
            self.held[name] = token, now_ms + LEASE_MS

    def work(self) -> None:
        """One step, of any size."""
        name = self.an_operation()
        token, until_ms = self.held.get(name, ("0", 0))
        if self.flip(0.1):
            token, until_ms = "other", 0
        lease_s = self.rng.choice([LEASE_S] * 4 + [0.0])
        bounds: dict[str, Any] = {
            "max_looks": self.rng.choice([1, 3, 500]),
            "max_jobs": self.rng.choice([0, 1, 20]),
        }
        call = self.world.operations.step(name, token, lease_s=lease_s, **bounds)
        said = self.world.told(call)
        if until_ms <= self.world.now_ms:
            assert said == "LeaseLost"
            return
        self.held[name] = token, self.world.now_ms + int(lease_s * 1000)
        self.heard(name, said)
        if said.job_ids and self.flip(0.7):
            self.report(name, token, said)

    def heard(self, name: str, said: Step) -> None:
        if self.kinds[name] is OperationKind.CANCEL:
            ended = {
                n
                for n, e in self.ledger.items()
                if not e.has_ended and self.world.field(n, "state") == "cancelled"
            }
            assert ended <= self.meant(name), "only what is meant is cancelled"
            for each in ended:
                self.ledger[each].end("cancelled", self.world.now_ms)
            self.counts[name] += len(ended)
            assert said.matched == said.done == self.counts[name]
            if said.state == "completed" and name in self.open:
                assert not self.meant(name) & self.first[name], "every job that was meant has ended"
        if said.state != "running":
            self.open.discard(name)

    def report(self, name: str, token: str, said: Step) -> None:
        """The jobs of a replay were submitted again."""
        for each in said.job_ids:
            entry = self.ledger.get(name_of(each))
            assert entry is None or entry.has_ended
        num = len(said.job_ids)
        reported = Step(
            said.state, said.matched + num, said.done + num, said.failed, (), said.cursor
        )
        until_ms = self.held[name][1]
        call = self.world.operations.step(
            name, token, lease_s=LEASE_S, reported=reported, max_jobs=0
        )
        told = self.world.told(call)
        if until_ms <= self.world.now_ms:
            assert told == "LeaseLost"
            return
        self.held[name] = token, self.world.now_ms + LEASE_MS
        if said.state == "running":
            assert (told.matched, told.done) == (said.matched + num, said.done + num)
        self.heard(name, told)

    def stop(self) -> None:
        name = self.an_operation()
        said = str(self.world.run(self.world.operations.stop(name)))
        assert said != "running"
        self.open.discard(name)

    def finish(self) -> None:
        """Others end every operation."""
        self.world.pass_time(LEASE_S + 1)
        self.give_up()
        while (
            name := self.world.run(self.world.operations.take("last", lease_s=LEASE_S))
        ) is not None:
            self.held[name] = "last", self.world.now_ms + LEASE_MS
            said = None
            while said is None or said.state == "running":
                said = self.world.run(self.world.operations.step(name, "last", lease_s=LEASE_S))
                self.heard(name, said)
                if said.job_ids and self.kinds[name] is OperationKind.REPLAY:
                    self.report(name, "last", said)
        assert not self.open
        super().finish()
