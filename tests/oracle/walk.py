"""Random walks through a world, checked against a ledger of its jobs.

A ledger knows each job's state, holder, attempts, events and times: what any order of calls may do to
it, and not which job a claim chooses or whether there is room. Those are in the tables of decisions.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from contract.function_types import FairRoom, LaneRoom, TenantLimits, Wanted
from contract.jobs import JobStatus
from tests.oracle.world import LANES, LEASE_S, REF, TALKATIVE, URLS, World, job_id

TENANTS = ("t", "u")
WORKERS = ("w", "x", "y")
MAX_ATTEMPTS, MAX_CRASHES = 2, 2
CHECK_EVERY = 10  # steps
_ENDS = frozenset(JobStatus) - {JobStatus.QUEUED, JobStatus.CLAIMED, JobStatus.STREAMING}


@dataclass
class Entry:
    """What must be so of a job."""

    tenant: str
    lane: str
    cap: int
    choices: int
    created_ms: int
    deadline_ms: int
    retention_ms: int
    attendance_ms: int
    attended_ms: int  # cancelled then; 0: never
    number: int  # of its submission
    has_callback: bool
    status: str = "queued"
    holder: str = ""
    lease_ms: int = 0
    epoch: int = 0
    attempt: int = 0
    releases: int = 0
    lapses: int = 0
    crashes: int = 0
    next: int = 1
    tokens: int = 0
    was_returned: bool = False  # waits in front of its lane
    was_moved: bool = False  # waits behind those that are younger
    is_suspect: bool = False
    forgotten_ms: int = 0

    @property
    def has_ended(self) -> bool:
        return self.status in _ENDS

    @property
    def is_running(self) -> bool:
        return self.holder != ""

    def end(self, status: str, now_ms: int) -> None:
        self.status, self.holder = status, ""
        self.next += 1
        self.forgotten_ms = now_ms + self.retention_ms

    def give_back(self, *, is_suspect: bool = False) -> None:
        self.status, self.holder, self.was_returned = "queued", "", True
        self.is_suspect = is_suspect


class Walk:
    """Draws one step after another from one seed."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.ledger: dict[str, Entry] = {}
        self.num_submitted = 0
        self.paused: list[tuple[str, str]] = []
        self.limits = TenantLimits(
            requests_per_min=self.rng.choice([0, 0, 9]),
            tokens_per_min=self.rng.choice([0, 300]),
            concurrent_tokens=self.rng.choice([0, 0, 90]),
            lane_share=self.rng.choice([0.0, 0.5]),
        )
        # Many kinds of calls, or long queues, or much time.
        self.is_long, self.is_slow = seed % 3 == 1, seed % 3 == 2

    def steps(self) -> list[tuple[int, Callable[[], None]]]:
        """Weights and calls."""
        return [
            (40 if self.is_long else 16, self.submit),
            (24, self.claim),
            (30, self.append),
            (8, self.release),
            (5, self.blame),
            (5, self.heartbeat),
            (3, self.mine),
            (6, self.cancel),
            (6, self.move),
            (5, self.detach),
            (6, self.delete),
            (3, self.attend),
            (3, self.list_jobs),
            (3, self.pause),
            (1, self.enter),
            (1, self.drain),
            (1, self.look),
            (1, self.fill_memory),
            (1, self.restart),
            (8 if self.is_slow else 4, self.sweep),
            (
                12 if self.is_slow else 6,
                lambda: self.world.pass_time(self.rng.choice([0.5, 3, 6, 11])),
            ),
        ]

    def step(self) -> None:
        weights, calls = zip(*self.steps(), strict=True)
        self.rng.choices(calls, weights)[0]()

    # --- what is drawn

    def flip(self, probability: float) -> bool:
        return self.rng.random() < probability

    def a_job(self) -> str:
        """Mostly one of the youngest, of any state; sometimes none."""
        return self.rng.choice([*list(self.ledger)[-8:], *list(self.ledger)[-3:], "none"])

    def a_held_job(self) -> tuple[str, str]:
        """A worker and a job that it mostly believes to hold."""
        worker = self.rng.choice(WORKERS)
        held = sorted(self.world.held[worker])[-4:]
        return worker, self.rng.choice(held) if held and self.flip(0.85) else self.a_job()

    def an_owner(self, name: str) -> str:
        known = self.ledger.get(name)
        return known.tenant if known and self.flip(0.8) else self.rng.choice(TENANTS)

    # --- the ledger

    def own(self, name: str, tenant: str) -> Entry | None:
        entry = self.ledger.get(name)
        return entry if entry and entry.tenant == tenant else None

    def fence(self, worker: str, name: str, epoch: int) -> str | None:
        """Why the worker may not change the job."""
        entry = self.ledger.get(name)
        if entry is None:
            return "GONE"
        if entry.has_ended:
            return entry.status
        is_held = entry.holder == worker and entry.epoch == epoch
        return None if is_held else "FENCED"

    def expires(self, entry: Entry) -> bool:
        if self.world.now_ms < entry.deadline_ms:
            return False
        entry.end("expired", self.world.now_ms)
        return True

    def is_paused(self, entry: Entry) -> bool:
        return any(
            lane in ("", entry.lane) and tenant in ("", entry.tenant)
            for lane, tenant in self.paused
        )

    # --- callers

    def submit(self) -> None:
        """A quote says the same; what is refused changes nothing."""
        rng, world = self.rng, self.world
        name = f"j{self.num_submitted:04}"
        if self.ledger and self.flip(0.05):
            name = rng.choice(list(self.ledger)[-8:])
        self.num_submitted += 1
        tenant, lane = rng.choice(TENANTS), rng.choice(LANES)
        choices = rng.choice([1, 1, 1, 3])
        cap = rng.choice([1, 4, 9, 27, 80]) * choices
        callback = rng.choice([None, None, *URLS, TALKATIVE])
        terms: dict[str, Any] = {"cap": cap, "n": choices, "callback": callback}
        terms |= {"deadline_s": rng.choice([5, 60, 600]), "retention_s": rng.choice([30, 600])}
        terms |= {"max_attempts": MAX_ATTEMPTS, "weight": rng.choice([1.0, 1.0, 3.0])}
        terms |= {"attendance_s": rng.choice([0, 0, 9]), "is_passing": self.flip(0.3)}
        terms |= {"is_stored": self.flip(0.2), "metadata": rng.choice([{}, {"colour": "red"}])}
        terms |= {"batch_price": rng.choice([1.0, 0.5]), "expects": rng.choice([0, 0, 4])}
        if self.flip(0.4):
            terms |= {"limits": self.limits, "lane_bound_tokens": rng.choice([0, 120])}
            terms |= {"lane_bound_s": rng.choice([0, 3])}
        quoted = world.quote(name, tenant, lane, **terms)
        before = contents(world)
        said = world.submit(name, tenant, lane, **terms)
        if name in self.ledger:
            assert said == f"known {name}"
            return
        if "memory" in quoted:
            self.drop_forgotten()
        elif said != "new":
            assert said in (quoted, "memory_full")
            assert contents(world) == before, "a refusal changes nothing"
        if said == "new":
            assert quoted == "OK" or "memory" in quoted
            now_ms, attendance_ms = world.now_ms, int(terms["attendance_s"] * 1000)
            self.ledger[name] = Entry(
                tenant,
                lane,
                cap,
                choices,
                now_ms,
                now_ms + terms["deadline_s"] * 1000,
                terms["retention_s"] * 1000,
                attendance_ms,
                now_ms + attendance_ms if attendance_ms else 0,
                self.num_submitted,
                callback is not None,
            )

    def drop_forgotten(self) -> None:
        """Results of synchronous calls may be forgotten early, for a job that finds no memory."""
        for name, entry in list(self.ledger.items()):
            if entry.has_ended and self.world.status(name, entry.tenant) == "none":
                del self.ledger[name]

    def enter(self) -> None:
        call = self.world.functions.enter(self.rng.choice(TENANTS), self.limits)
        assert self.world.told(call) in (None, "JobRefused")

    def cancel(self) -> None:
        name = self.a_job()
        tenant = self.an_owner(name)
        said, entry = self.world.cancel(name, tenant), self.own(name, tenant)
        if entry and not entry.has_ended:
            entry.end("cancelled", self.world.now_ms)
        assert said == (entry.status if entry else "None")

    def move(self) -> None:
        name, lane = self.a_job(), self.rng.choice(["", *LANES])
        tenant, deadline_s = self.an_owner(name), self.rng.choice([None, 5, 90])
        said, entry = self.world.move(name, lane, deadline_s, tenant), self.own(name, tenant)
        if entry is None or entry.has_ended:
            assert said == (entry.status if entry else "None")
            return
        assert said == "OK"
        if deadline_s is not None:
            entry.deadline_ms = self.world.now_ms + deadline_s * 1000
        if lane not in ("", entry.lane):
            entry.was_moved, entry.was_returned = True, False
            entry.lane = lane

    def detach(self) -> None:
        name, seconds = self.a_job(), self.rng.choice([5, 90])
        tenant = self.an_owner(name)
        said, entry = self.world.detach(name, seconds, seconds, tenant), self.own(name, tenant)
        if entry is None or entry.has_ended:
            assert said == (entry.status if entry else "None")
            return
        assert said == "OK"
        entry.deadline_ms = max(entry.deadline_ms, self.world.now_ms + seconds * 1000)
        entry.retention_ms = max(entry.retention_ms, seconds * 1000)
        entry.attended_ms = entry.attendance_ms = 0

    def delete(self) -> None:
        ended = [name for name, entry in self.ledger.items() if entry.has_ended]
        name = self.rng.choice(ended) if ended and self.flip(0.4) else self.a_job()
        tenant = self.an_owner(name)
        said, entry = self.world.delete(name, tenant), self.own(name, tenant)
        if entry is None:
            assert said == "False"
        elif entry.has_ended:
            assert said == "True"
            del self.ledger[name]
        else:
            assert said == entry.status

    def attend(self) -> None:
        name = self.a_job()
        num, entry = (
            self.world.run(self.world.functions.attend([job_id(name)])),
            self.ledger.get(name),
        )
        assert num == bool(entry and entry.attendance_ms)
        if entry and entry.attendance_ms:
            entry.attended_ms = self.world.now_ms + entry.attendance_ms

    def list_jobs(self) -> None:
        """Page by page, all that are meant and no other, the youngest first."""
        rng, found, after = self.rng, list[str](), ""
        tenant = rng.choice(["", *TENANTS])
        states = frozenset(map(JobStatus, rng.sample(sorted(JobStatus), 4)))
        lane = rng.choice(["", *LANES])
        wanted = Wanted(statuses=states, lanes=frozenset([lane] if lane else []))
        while True:
            bounds = {"max_jobs": rng.choice([1, 3]), "max_looks": rng.choice([2, 500])}
            *names, last = [*self.world.listed(tenant, wanted, after=after, **bounds), ""]
            if names and names[-1].startswith("after "):
                last = names.pop()
            found += names
            if not last:
                break
            after = job_id(last.removeprefix("after "))
        meant = [
            name
            for name, e in self.ledger.items()
            if tenant in ("", e.tenant) and e.status in states and lane in ("", e.lane)
        ]
        assert sorted(found) == sorted(meant)
        ages = [int(self.world.field(name, "created")) for name in found]
        assert ages == sorted(ages, reverse=True)

    def pause(self) -> None:
        """Pauses end more often than they begin."""
        if self.paused and self.flip(0.7):
            assert self.world.resume(*self.paused.pop())
            return
        line = self.rng.choice(["", *LANES]), self.rng.choice(["", *TENANTS])
        if line != ("", "") and line not in self.paused:
            self.world.pause(*line)
            self.paused.append(line)

    # --- workers

    def claim(self) -> None:
        """What is claimed waited, is not paused, fits, and goes before those behind it."""
        rng, world = self.rng, self.world
        worker, jobs, room = rng.choice(WORKERS), rng.choice([1, 2, 8]), rng.choice([12, 40, 1000])
        rooms = None
        if self.flip(0.2):
            fair = FairRoom(
                4, 200, {tenant: (rng.randrange(3), rng.randrange(60)) for tenant in TENANTS}
            )
            rooms = {LANES[0]: LaneRoom(jobs, room), "batch": LaneRoom(0, 0, fair=fair)}
        waiting = {n for n, e in self.ledger.items() if e.status == "queued"}
        offered = {n for n, e in self.ledger.items() if e.is_running}
        is_idle = self.flip(0.5)
        names = world.claim(
            worker,
            jobs,
            room,
            rooms=rooms,
            is_idle=is_idle,
            min_shares={"batch": 0.3},
            loses_reply=self.flip(0.2),
        )
        self.drop_expired(waiting)
        claimed = [name.removesuffix(" alone") for name in names]
        assert len(set(claimed)) == len(claimed)
        num_filled = 0
        for item, name in zip(world.reply, names, strict=True):
            entry = self.ledger[name.removesuffix(" alone")]
            if item.job.id.removeprefix("job-0-") in offered:
                assert entry.holder != worker, "nobody takes what it offers"
                assert entry.status in ("claimed", "streaming")
                entry.attempt -= 1
                entry.is_suspect = False
            else:
                assert entry.status == "queued"
                assert not self.is_paused(entry)
                assert item.is_alone == entry.is_suspect
            if item.is_alone:
                assert is_idle
                assert len(names) == 1
            elif rooms is None:
                assert item.cost_tokens / entry.choices <= room
                assert num_filled < jobs
                room, num_filled = room - item.cost_tokens, num_filled + entry.choices
            self.check_order(name, claimed, waiting, item.cost_tokens / entry.choices)
            entry.epoch, entry.attempt = entry.epoch + 1, entry.attempt + 1
            found = item.epoch, item.attempt, item.next_number, item.num_logged_tokens
            assert found == (entry.epoch, entry.attempt, entry.next, entry.tokens)
            entry.status, entry.holder = "claimed", worker
            entry.lease_ms = world.now_ms + int(LEASE_S * 1000)

    def drop_expired(self, waiting: set[str]) -> None:
        """A claim ends jobs that it finds after their deadline."""
        for name in waiting:
            entry = self.ledger[name]
            if (
                self.world.now_ms >= entry.deadline_ms
                and self.world.field(name, "state") == "expired"
            ):
                entry.end("expired", self.world.now_ms)

    def check_order(self, name: str, claimed: list[str], waiting: set[str], cost: float) -> None:
        """No older job of the same tenant and lane stays behind that fits as well."""
        entry = self.ledger.get(name)
        if entry is None or entry.was_returned or entry.was_moved:
            return
        for other in waiting - set(claimed):
            o = self.ledger[other]
            is_same = (o.tenant, o.lane) == (entry.tenant, entry.lane) and o.status == "queued"
            if is_same and o.number < entry.number and not o.was_moved and not o.was_returned:
                other_cost = int(self.world.field(other, "cost")) / o.choices
                assert other_cost > cost, f"{other} was passed by {name}"

    def append(self) -> None:
        """A token or some to one of a worker's jobs, and a token to others beside it."""
        rng, world = self.rng, self.world
        worker, name = self.a_held_job()
        names = [
            name,
            *(n for n in sorted(world.held[worker])[-3:] if n != name and self.flip(0.3)),
        ]
        says = []
        for i, each in enumerate(names):
            num = rng.choice([0, 1, 1, 2, 30]) if i == 0 else 1
            fin = rng.choice(["", "", "", "succeeded", "failed"]) if i == 0 else ""
            shift = rng.choice([0] * 6 + [-1, 1])
            result = REF if fin and self.flip(0.3) else None
            says.append(world.says(each, num, fin, worker=worker, shift=shift, result=result))
        renews = self.flip(0.7)
        expected = [
            self.verdict(worker, item.job_id.removeprefix("job-0-"), item, renews) for item in says
        ]
        assert world.append_all(says, worker, LEASE_S if renews else 0.0) == expected

    def verdict(self, worker: str, name: str, item: Any, renews: bool) -> str:
        if refusal := self.fence(worker, name, item.epoch):
            return f"{refusal} 0"
        entry = self.ledger[name]
        if item.number != entry.next:
            return f"{'OK' if item.number < entry.next else 'GAP'} {entry.next}"
        if self.expires(entry):
            return "expired 0"
        if entry.tokens + item.num_tokens > entry.cap:
            return f"OVER {entry.tokens}"
        if item.event is not None:
            entry.next, entry.tokens = entry.next + 1, entry.tokens + item.num_tokens
            entry.status = "streaming"
        if item.fin:
            entry.end(item.fin, self.world.now_ms)
        elif renews:
            entry.lease_ms = self.world.now_ms + int(LEASE_S * 1000)
        return f"OK {entry.next}"

    def release(self) -> None:
        worker, name = self.a_held_job()
        epoch, _ = self.world.held[worker].get(name, (1, 1))
        kind = self.rng.choice(["drain", "error", "offer"])
        said = self.world.release(name, kind, worker)
        if (refusal := self.fence(worker, name, epoch)) is not None:
            assert said == refusal
            return
        entry = self.ledger[name]
        if self.expires(entry):
            assert said == "expired"
        elif kind == "offer":
            assert said == "OK"
        elif kind == "error" and entry.attempt >= MAX_ATTEMPTS:
            assert said == "failed"
            entry.end("failed", self.world.now_ms)
        else:
            assert said == "OK"
            entry.attempt -= kind == "drain"
            entry.releases += kind == "drain"
            entry.give_back()

    def blame(self) -> None:
        worker, name = self.a_held_job()
        epoch, _ = self.world.held[worker].get(name, (1, 1))
        said = self.world.blame(name, MAX_CRASHES, worker)
        if (refusal := self.fence(worker, name, epoch)) is not None:
            assert said == refusal
            return
        entry = self.ledger[name]
        if self.expires(entry):
            assert said == "expired"
            return
        entry.crashes += 1
        if entry.crashes == MAX_CRASHES:
            assert said == "failed"
            entry.end("failed", self.world.now_ms)
        else:
            assert said == "OK"
            entry.give_back(is_suspect=True)

    def heartbeat(self) -> None:
        """The worker learns which jobs it has lost; the leases of the others last on."""
        worker, rng = self.rng.choice(WORKERS), self.rng
        held = dict(self.world.held[worker])
        state = rng.choice(["up", "up", "up", "draining", "gone"])
        lost = self.world.beat(
            worker,
            rng.choice([0.0, 7.0, 30.5]),
            state,
            jobs=rng.choice([0, 3]),
            tokens=rng.choice([0, 60]),
        )
        gone = {name for name, (epoch, _) in held.items() if self.fence(worker, name, epoch)}
        assert set(lost) == gone
        for name in held.keys() - gone:
            self.ledger[name].lease_ms = self.world.now_ms + int(LEASE_S * 1000)

    def mine(self) -> None:
        """What a lost reply gave a worker."""
        worker = self.rng.choice(WORKERS)
        known = set(self.world.held[worker])
        found = [name.removesuffix(" alone") for name in self.world.mine(worker)]
        of_worker = {name for name, e in self.ledger.items() if e.holder == worker}
        assert set(found) == of_worker - known
        for name in found:
            self.ledger[name].lease_ms = self.world.now_ms + int(LEASE_S * 1000)

    def drain(self) -> None:
        worker = self.rng.choice(WORKERS)
        is_live = self.world.redis("EXISTS", f"worker:{worker}") == 1
        assert self.world.run(self.world.functions.drain([worker])) == [is_live]

    # --- time, and the whole

    def sweep(self) -> None:
        """Deadlines first, then callers who are gone, leases, and retentions."""
        now_ms, counts = self.world.now_ms, [0, 0, 0, 0]
        ended, is_open = (
            dict[str, Entry](),
            {n: e for n, e in self.ledger.items() if not e.has_ended},
        )
        ended = {n: e for n, e in self.ledger.items() if e.has_ended and e.forgotten_ms <= now_ms}
        for entry in is_open.values():
            if self.expires(entry):
                counts[1] += 1
            elif entry.attended_ms and entry.attended_ms <= now_ms:
                entry.end("cancelled", now_ms)
                counts[2] += 1
            elif entry.is_running and entry.lease_ms <= now_ms:
                entry.give_back(is_suspect=entry.lapses > 0)
                entry.lapses += 1
                counts[0] += 1
        for name in ended:
            del self.ledger[name]
        found = self.world.sweep()
        assert found[:3] == tuple(counts[:3])
        assert found[3] >= len(ended)  # and jobs that were forgotten before, for others

    def restart(self) -> None:
        """Redis is another: nothing lapses for ten seconds."""
        if not self.world.redis("EXISTS", "runid"):
            return
        self.world.redis("SET", "runid", "another 0")
        lapsed, expired, unattended, _ = self.world.sweep()
        assert (lapsed, unattended) == (0, 0)
        before = sum(e.status == "expired" for e in self.ledger.values())
        for entry in self.ledger.values():
            if not entry.has_ended:
                self.expires(entry)
        assert sum(e.status == "expired" for e in self.ledger.values()) - before == expired
        for name in list(self.ledger):
            entry = self.ledger[name]
            if entry.has_ended and 0 < entry.forgotten_ms <= self.world.now_ms:
                if self.world.status(name, entry.tenant) == "none":
                    del self.ledger[name]
        self.world.pass_time(10)
        self.sweep()

    def fill_memory(self) -> None:
        room = self.rng.choice([0, 40_000, 400_000, "free", "free"])
        self.world.redis("SET", "memory", room)

    def look(self) -> None:
        """What is watched is what is so."""
        watched = self.world.run(self.world.functions.watch("m", LANES))
        for seen in watched.held:
            entry = self.ledger[seen.job_id.removeprefix("job-0-")]
            assert (entry.holder, entry.tokens) == (seen.worker, seen.num_output_tokens)
        lanes = self.world.run(self.world.functions.snapshot("m", LANES)).lanes
        for lane, found in lanes.items():
            entries = [e for e in self.ledger.values() if e.lane == lane]
            assert found.num_queued == sum(e.status == "queued" for e in entries)
            assert found.num_running == sum(e.is_running for e in entries)

    def check(self) -> None:
        """Every record and every log is as the ledger has it."""
        for name, entry in self.ledger.items():
            names = ("state", "lane", "owner", "epoch", "attempt", "lapses", "crashes", "deadline")
            found = [self.world.field(name, each) for each in names]
            wanted = [entry.status, entry.lane, entry.holder, entry.epoch, entry.attempt]
            wanted += [entry.lapses, entry.crashes, entry.deadline_ms]
            assert found == list(map(str, wanted)), name
            view = self.world.run(self.world.functions.read(job_id(name), entry.tenant))
            assert view is not None
            assert (view[0].next_number, view[0].num_output_tokens) == (entry.next, entry.tokens)
        self.world.audit.check()

    def finish(self) -> None:
        """Without faults, as time passes, every job ends and nothing is left."""
        self.world.redis("SET", "memory", "free")
        for seconds in (10_000, 10_000):
            self.world.pass_time(seconds)
            self.sweep()
        self.world.audit.check_all_ended()
        self.world.pass_time(10_000)
        self.world.sweep()
        while self.world.redis("EXISTS", "outbox"):
            self.world.pass_time(100)
            self.world.due()
        self.world.audit.check_at_rest()


def walk(
    world: World, draws: type[Walk], seed: int, num_steps: int, check_every: int = CHECK_EVERY
) -> None:
    """One world from its first step to its end; 0: without checks. An error names the seed and the
    step."""
    steps = draws(world, seed)
    for number in range(1, num_steps + 1):
        try:
            steps.step()
            if check_every and number % check_every == 0:
                steps.check()
        except Exception as exc:
            exc.add_note(f"{draws.__name__} {seed}, step {number}")
            raise
    if check_every:
        steps.check()
        steps.finish()


def contents(world: World) -> dict[str, Any]:
    """All of Redis, but counts of refusals, promises, and the reading of the memory."""
    passing = ("totals:", "promised:", "memory", "test_clock")
    names = [key.decode() for key in world.client.keys(f"{world.keys.tag}:*")]
    names = [name.removeprefix(f"{world.keys.tag}:") for name in names]
    return {n: world.redis("DUMP", n) for n in names if not n.startswith(passing)}
