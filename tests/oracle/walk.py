"""Random walks through a world, checked against a ledger of its jobs.

A ledger knows each job's state, holder, attempts, events and times: what any order of calls may do
to it. Which job a claim chooses, and whether there is room, is in the tables of decisions.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from contract.function_types import TenantLimits, Wanted
from contract.jobs import TERMINAL_STATUSES, JobStatus
from contract.residence import prefix_marks
from tests.contract.some_calls import make_job
from tests.oracle.world import LANES, LEASE_S, REF, World, contents, job_id, name_of

TENANTS, WORKERS = ("t", "u"), ("w", "x", "y")
MAX_ATTEMPTS, MAX_CRASHES = 2, 2
CHECK_EVERY = 10  # steps
LEASE_MS = int(LEASE_S * 1000)
Steps = list[tuple[int, Callable[[], Any]]]


@dataclass
class Entry:
    """What must be so of a job."""

    name: str
    lane: str
    cap: int
    choices: int
    created_ms: int
    deadline_ms: int
    retention_ms: int
    attendance_ms: int
    attended_ms: int  # cancelled then; 0: never
    status: str = "queued"
    holder: str = ""
    lease_ms: int = 0
    epoch: int = 0
    attempt: int = 0
    lapses: int = 0
    crashes: int = 0
    next: int = 1
    tokens: int = 0
    is_in_line: bool = True  # waits where it was submitted, neither returned nor moved
    priority: int = 0
    is_chat: bool = False
    has_session: bool = False  # and so may be left to its worker
    start_ms: int = 0  # waits for it, outside of its queue; 0: no more
    is_suspect: bool = False
    forgotten_ms: int = 0

    @property
    def has_ended(self) -> bool:
        return self.status in TERMINAL_STATUSES

    def end(self, status: str, now_ms: int) -> None:
        self.status, self.holder, self.next = status, "", self.next + 1
        self.forgotten_ms = now_ms + self.retention_ms

    def give_back(self, *, is_suspect: bool = False) -> str:
        self.status, self.holder, self.is_in_line = "queued", "", False
        self.is_suspect = is_suspect
        return "OK"


class Walk:
    """Draws one step after another from one seed."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.ledger: dict[str, Entry] = {}
        self.num_submitted = 0
        self.paused: list[tuple[str, str]] = []
        self.limits: dict[str, Any] = {
            "requests_per_min": self.rng.choice([0, 0, 9]),
            "tokens_per_min": self.rng.choice([0, 300]),
            "concurrent_tokens": self.rng.choice([0, 0, 90]),
            "lane_share": self.rng.choice([0.0, 0.5]),
        }
        self.is_slow = seed % 2 == 1  # much time passes

    def steps(self) -> Steps:
        """Weights and calls."""
        often, seldom = (6, 4) if self.is_slow else (3, 2)
        return [
            *((20, self.submit), (24, self.claim), (30, self.append), (8, self.release)),
            *((5, self.blame), (5, self.heartbeat), (3, self.mine), (6, self.cancel)),
            *((6, self.move), (5, self.detach), (6, self.delete), (3, self.attend)),
            *(
                (3, self.list_jobs),
                (3, self.pause),
                (2, self.warm),
                (seldom, self.look),
                (often, self.sweep),
            ),
            (2 * often, lambda: self.world.pass_time(self.rng.choice([0.5, 3, 6, 11]))),
        ]

    def step(self) -> None:
        weights, calls = zip(*self.steps(), strict=True)
        self.rng.choices(calls, weights)[0]()

    # --- what is drawn, and the ledger

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

    def of_caller(self) -> tuple[str, str, Entry | None]:
        """A job, a tenant, mostly its own, and the entry where it is."""
        name = self.a_job()
        tenant = name[0] if self.flip(0.8) else self.rng.choice(TENANTS)
        return name, tenant, self.ledger.get(name) if tenant == name[0] else None

    def fence(self, worker: str, name: str, epoch: int) -> str | None:
        """Why the worker may not change the job; it expires where its time is over."""
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

    # --- callers

    def submit(self) -> None:
        """A quote says the same; what is refused changes nothing."""
        rng, world = self.rng, self.world
        name = f"{rng.choice(TENANTS)}{self.num_submitted:03}"
        if self.ledger and self.flip(0.05):
            name = rng.choice(list(self.ledger)[-8:])
        self.num_submitted += 1
        choices = rng.choice([1, 1, 1, 3])
        terms: dict[str, Any] = {"lane": rng.choice(LANES), "n": choices}
        terms |= {"cap": rng.choice([1, 4, 9, 27, 80]) * choices, "expects": rng.choice([0, 0, 4])}
        terms |= {"deadline_s": rng.choice([5, 60, 600]), "retention_s": rng.choice([30, 600])}
        terms |= {"max_attempts": MAX_ATTEMPTS, "weight": rng.choice([1.0, 1.0, 3.0])}
        terms |= {"attendance_s": rng.choice([0, 0, 9]), "batch_price": rng.choice([1.0, 0.5])}
        terms["cached_price"] = rng.choice([1.0, 0.5])
        terms |= {"is_stored": self.flip(0.2), "callback": rng.choice(["", "", "a", "b", "talks"])}
        start_ms = self.a_start() if self.flip(0.2) else 0
        terms["start_at_s"] = start_ms / 1000
        terms |= {"priority": rng.choice([0, 0, 0, -1, 2]), "is_chat": self.flip(0.5)}
        terms["session"] = rng.choice(["", "", "s"])
        if self.flip(0.4):
            bounds = {"lane_bound_tokens": rng.choice([0, 120]), "lane_bound_s": rng.choice([0, 3])}
            terms |= self.limits | bounds
        quoted, before = world.quote(name, **terms), contents(world)
        said = world.submit(name, **terms)
        if name in self.ledger:
            assert said == f"known {name}"
            return
        assert said == ("new" if quoted == "OK" else quoted)
        if said != "new":
            assert contents(world) == before, "a refusal changes nothing"
            return
        now_ms, attendance_ms = world.now_ms, int(terms["attendance_s"] * 1000)
        entry = self.ledger[name] = Entry(
            *(name, terms["lane"], terms["cap"], choices, now_ms),
            *(max(now_ms, start_ms) + terms["deadline_s"] * 1000, terms["retention_s"] * 1000),
            *(attendance_ms, now_ms + attendance_ms if attendance_ms else 0),
            priority=terms["priority"],
            is_chat=terms["is_chat"],
            has_session=bool(terms["session"]),
        )
        if start_ms > now_ms:
            entry.start_ms, entry.is_in_line = start_ms, False

    def a_start(self) -> int:
        """ms; sometimes over."""
        return self.world.now_ms // 1000 * 1000 + self.rng.choice([-3000, 2000, 2000, 9000, 30_000])

    def cancel(self) -> None:
        name, tenant, entry = self.of_caller()
        said = self.world.cancel(name, tenant)
        if entry and not entry.has_ended:
            entry.end("cancelled", self.world.now_ms)
        assert said == (entry and entry.status)

    def move(self) -> None:
        name, tenant, entry = self.of_caller()
        lane, deadline_s = self.rng.choice(["", *LANES]), self.rng.choice([None, 5, 90])
        start_ms, now_ms = self.a_start() if self.flip(0.3) else None, self.world.now_ms
        start_at_s = None if start_ms is None else start_ms / 1000
        said = self.world.move(name, lane, deadline_s, tenant, start_at_s)
        if entry is None or entry.has_ended:
            assert said == (entry and entry.status)
            return
        if start_ms is not None and entry.epoch:
            assert said == "RUNNING"
            return
        assert said == "OK"
        if start_ms is not None and (entry.start_ms or start_ms > now_ms):
            entry.deadline_ms += max(start_ms, now_ms) - (entry.start_ms or now_ms)
            entry.start_ms = start_ms if start_ms > now_ms else 0
            entry.is_in_line = False
        if deadline_s is not None:
            entry.deadline_ms = (entry.start_ms or now_ms) + deadline_s * 1000
        entry.is_in_line = entry.is_in_line and lane in ("", entry.lane) and deadline_s is None
        entry.lane = lane or entry.lane

    def detach(self) -> None:
        name, tenant, entry = self.of_caller()
        seconds = self.rng.choice([5, 90])
        said = self.world.detach(name, seconds, seconds, tenant)
        if entry is None or entry.has_ended:
            assert said == (entry and entry.status)
            return
        assert said == "OK"
        entry.deadline_ms = max(entry.deadline_ms, self.world.now_ms + seconds * 1000)
        entry.is_in_line = False  # it keeps its place
        entry.retention_ms = max(entry.retention_ms, seconds * 1000)
        entry.attended_ms = entry.attendance_ms = 0

    def delete(self) -> None:
        name, tenant, entry = self.of_caller()
        said = self.world.delete(name, tenant)
        assert said == (entry is not None if entry is None or entry.has_ended else entry.status)
        if said is True:
            del self.ledger[name]

    def attend(self) -> None:
        name = self.a_job()
        entry, num = self.ledger.get(name), self.world.attend(name)
        assert num == bool(entry and entry.attendance_ms)
        if entry and entry.attendance_ms:
            entry.attended_ms = self.world.now_ms + entry.attendance_ms

    def list_jobs(self) -> None:
        """Page by page, all that are meant and no other."""
        found, after = list[str](), ""
        tenant, states = self.rng.choice(["", *TENANTS]), self.rng.sample(sorted(JobStatus), 4)
        is_chats, ascends = tenant != "" and self.flip(0.5), self.flip(0.5)
        wanted = Wanted(
            statuses=frozenset(map(JobStatus, states)), is_chats=is_chats, is_ascending=ascends
        )
        while True:
            bounds = {"max_jobs": self.rng.choice([1, 3]), "max_looks": self.rng.choice([2, 500])}
            page = self.world.listed(tenant, wanted, after=after, **bounds)
            found += [name for name in page if ":" not in name]
            if not page or ":" not in page[-1]:
                break
            after = job_id(page[-1].removeprefix("after:"))
        entries = self.ledger.values()
        meant = [e for e in entries if tenant in ("", e.name[0]) and e.status in states]
        meant = [e for e in meant if e.is_chat or not is_chats]
        meant.sort(key=lambda e: (e.created_ms, job_id(e.name)), reverse=not ascends)
        assert found == [e.name for e in meant]

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
        worker, slots, room = rng.choice(WORKERS), rng.choice([1, 2, 8]), rng.choice([12, 40, 1000])
        waiting = {n for n, e in self.ledger.items() if e.status == "queued"}
        options: dict[str, Any] = {"is_idle": self.flip(0.5), "loses_reply": self.flip(0.2)}
        options["prompt_token_s"] = rng.choice([None, 0.1])
        names = world.claim(worker, slots, room, min_shares={"batch": 0.3}, **options)
        late = [name for name in waiting if world.now_ms >= self.ledger[name].deadline_ms]
        for name in late:  # a claim ends those that it finds
            if world.field(name, "state") == ["expired"]:
                self.expires(self.ledger[name])
        claimed = {name.removesuffix("!") for name in names}
        assert len(claimed) == len(names)
        for item in world.reply:
            entry = self.ledger[name_of(item.job.id)]
            if entry.name in waiting:
                assert entry.status == "queued"
                assert not entry.start_ms, "nothing starts early"
                line = [(lane, of) for lane in ("", entry.lane) for of in ("", entry.name[0])]
                assert not set(line) & set(self.paused)
                assert item.is_alone == entry.is_suspect
            else:
                assert entry.holder not in ("", worker), "others take what a worker offers"
                entry.attempt -= 1
                entry.give_back()
            if item.is_alone:
                assert options["is_idle"]
                assert len(names) == 1
            else:
                assert item.cost_tokens / entry.choices <= room
                assert slots > 0
                room, slots = room - item.cost_tokens, slots - entry.choices
            if entry.is_in_line:
                self.check_order(entry, waiting - claimed, item.cost_tokens / entry.choices)
            entry.epoch, entry.attempt = entry.epoch + 1, entry.attempt + 1
            found = item.epoch, item.attempt, item.next_number, item.num_logged_tokens
            assert found == (entry.epoch, entry.attempt, entry.next, entry.tokens)
            entry.status, entry.holder = "claimed", worker
            entry.lease_ms = world.now_ms + LEASE_MS

    def check_order(self, entry: Entry, left: set[str], cost: float) -> None:
        """No job of the same tenant and lane stays behind that fits as well and goes before: by
        priority, the second of the deadline, then by age."""
        for other in map(self.ledger.__getitem__, left):
            is_same = (other.name[0], other.lane) == (entry.name[0], entry.lane)
            turn, own = ((e.priority, e.deadline_ms // 1000, e.name) for e in (other, entry))
            if other.has_session:
                continue
            if is_same and turn < own and other.status == "queued" and other.is_in_line:
                [other_cost] = self.world.field(other.name, "cost")
                assert int(other_cost) / other.choices > cost, f"{other.name} was passed"

    def append(self) -> None:
        """Some tokens, or an end, to one of a worker's jobs, and a token to others beside it."""
        rng, world = self.rng, self.world
        worker, name = self.a_held_job()
        fin = rng.choice(["", "", "", "succeeded", "failed"])
        terms: dict[str, Any] = {"shift": rng.choice([0] * 6 + [-1, 1]), "worker": worker}
        terms["result"] = REF if fin and self.flip(0.3) else None
        cached = rng.choice([0, 0, 1])
        says = [world.says(name, rng.choice([0, 1, 1, 2, 30]), fin, cached=cached, **terms)]
        others = [n for n in sorted(world.held[worker])[-3:] if n != name and self.flip(0.3)]
        says += [world.says(other, worker=worker) for other in others]
        renews = self.flip(0.7)
        expected = [self.verdict(worker, name_of(item.job_id), item, renews) for item in says]
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
            entry.lease_ms = self.world.now_ms + LEASE_MS
        return f"OK {entry.next}"

    def release(self) -> None:
        worker, name = self.a_held_job()
        epoch, _ = self.world.held[worker].get(name, (1, 1))
        kind = self.rng.choice(["drain", "error", "offer"])
        said, expected = self.world.release(name, kind, worker), self.fence(worker, name, epoch)
        if expected is None:
            entry = self.ledger[name]
            if self.expires(entry):
                expected = "expired"
            elif kind == "error" and entry.attempt >= MAX_ATTEMPTS:
                entry.end("failed", self.world.now_ms)
                expected = "failed"
            elif kind == "offer":
                expected = "OK"
            else:
                entry.attempt -= kind == "drain"
                expected = entry.give_back()
        assert said == expected

    def blame(self) -> None:
        worker, name = self.a_held_job()
        epoch, _ = self.world.held[worker].get(name, (1, 1))
        said, expected = (
            self.world.blame(name, MAX_CRASHES, worker),
            self.fence(worker, name, epoch),
        )
        if expected is None:
            entry = self.ledger[name]
            if not self.expires(entry):
                entry.crashes += 1
                if entry.crashes == MAX_CRASHES:
                    entry.end("failed", self.world.now_ms)
                else:
                    entry.give_back(is_suspect=True)
            expected = entry.status if entry.has_ended else "OK"
        assert said == expected

    def heartbeat(self) -> None:
        """The worker learns which jobs it has lost; the leases of the others last on."""
        worker, rng = self.rng.choice(WORKERS), self.rng
        held = dict(self.world.held[worker])
        capacity: dict[str, Any] = {"jobs": rng.choice([0, 3]), "tokens": rng.choice([0, 60])}
        state = rng.choice(["up", "up", "up", "draining", "gone"])
        lost = self.world.beat(worker, rng.choice([0.0, 7.0, 30.5]), state=state, **capacity)
        gone = {name for name, (epoch, _) in held.items() if self.fence(worker, name, epoch)}
        assert set(lost) == gone
        for name in held.keys() - gone:
            self.ledger[name].lease_ms = self.world.now_ms + LEASE_MS

    def mine(self) -> None:
        """What a lost reply gave a worker."""
        worker = self.rng.choice(WORKERS)
        known = set(self.world.held[worker])
        found = {name.removesuffix("!") for name in self.world.mine(worker)}
        assert found == {name for name, e in self.ledger.items() if e.holder == worker} - known
        for name in found:
            self.ledger[name].lease_ms = self.world.now_ms + LEASE_MS

    def warm(self) -> None:
        """A prompt goes once to a live worker that holds its beginning, unless it is paused."""
        rng, world = self.rng, self.world
        tenant, lane, worker = rng.choice(TENANTS), rng.choice(LANES), rng.choice(WORKERS)
        job = make_job(tenant, lane)
        job = replace(job, prompt_ids=(*range(100), self.num_submitted))
        mark = prefix_marks(tenant, job.prompt_ids[:64])
        hint = f"{world.now_ms // 60_000} {worker}"
        world.client.hset(world.keys.of("at", "m"), mark, hint)
        world.run(world.functions.warm(job, 64, lives_s=3.0))
        found = world.run(world.functions.warm_take(worker, "m", [tenant, 9, 3]))
        seen_ms = float(world.redis("ZSCORE", "workers:m", worker) or 0.0)
        is_paused = any(a in ("", lane) and b in ("", tenant) for a, b in self.paused)
        is_left = seen_ms >= world.now_ms - 15_000 and not is_paused
        assert found == ((3.0, (tenant, 64, job.prompt_ids)) if is_left else None)
        assert world.run(world.functions.warm_take(worker, "m", [])) is None

    # --- time, and the whole

    def sweep(self) -> None:
        """Deadlines first, then callers who are gone, leases, starts, and retentions."""
        now_ms, counts, num_begun = self.world.now_ms, [0, 0, 0, 0], 0
        for name, entry in list(self.ledger.items()):
            if entry.has_ended:
                if entry.forgotten_ms <= now_ms:
                    counts[3] += 1
                    del self.ledger[name]
            elif self.expires(entry):
                counts[1] += 1
            elif entry.attended_ms and entry.attended_ms <= now_ms:
                entry.end("cancelled", now_ms)
                counts[2] += 1
            elif entry.holder and entry.lease_ms <= now_ms:
                entry.give_back(is_suspect=entry.lapses > 0)
                entry.lapses += 1
                counts[0] += 1
            elif entry.start_ms and entry.start_ms <= now_ms:
                entry.start_ms, num_begun = 0, num_begun + 1
        assert self.world.sweep() == tuple(counts)
        assert self.world.reply.num_begun == num_begun

    def look(self) -> None:
        """What is watched is what is so. And calls that change no job."""
        call = self.world.functions.enter(self.rng.choice(TENANTS), TenantLimits(**self.limits))
        assert self.world.told(call) in (None, "JobRefused")
        name, tenant, entry = self.of_caller()
        assert self.world.status(name, tenant) == (entry.status if entry else "none")
        worker = self.rng.choice(WORKERS)
        is_live = self.world.redis("EXISTS", f"worker:{worker}") == 1
        assert self.world.drain(worker) == [is_live]
        for seen in self.world.run(self.world.functions.watch("m", LANES)).held:
            entry = self.ledger[name_of(seen.job_id)]
            assert (entry.holder, entry.tokens) == (seen.worker, seen.num_output_tokens)
        lanes = self.world.run(self.world.functions.snapshot("m", LANES)).lanes
        for lane, found in lanes.items():
            entries = [e for e in self.ledger.values() if e.lane == lane]
            assert found.num_queued == sum(e.status == "queued" and not e.start_ms for e in entries)
            assert found.num_running == sum(e.holder != "" for e in entries)

    def check(self) -> None:
        """Every record and every log is as the ledger has it."""
        names = ("state", "lane", "owner", "epoch", "attempt", "lapses", "crashes", "deadline")
        for name, entry in self.ledger.items():
            wanted = [entry.status, entry.lane, entry.holder, entry.epoch, entry.attempt]
            wanted += [entry.lapses, entry.crashes, entry.deadline_ms]
            assert self.world.field(name, *names) == list(map(str, wanted)), name
            view = self.world.view(name)
            assert (view.next_number, view.num_output_tokens) == (entry.next, entry.tokens)
        self.world.audit.check()

    def finish(self) -> None:
        """Without faults, as time passes, every job ends and nothing is left."""
        for seconds in (10_000, 10_000):
            self.world.pass_time(seconds)
            self.sweep()
        self.world.audit.check_all_ended()
        self.world.pass_time(10_000)
        self.sweep()
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
