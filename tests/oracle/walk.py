"""A seeded random walk through a World.

Over 300 lines: how each step is drawn.
"""

import random
from typing import Any

from contract.function_types import (
    FairRoom,
    JobMark,
    LaneRoom,
    TenantLimits,
    Wanted,
    WorkerCapacity,
)
from contract.jobs import JobStatus
from contract.pauses import Line
from tests.oracle.world import CALLBACKS, COLOURS, LANES, STATES, TENANTS, WORKERS, World

# Steps and their weights. A world with all kinds of steps stays small and has many conflicts. The
# others have a long queue and many claims, or many refusals by limits, or much time that passes.
_EVERYTHING = {
    "submit": 16,
    "quote": 1,
    "read": 1,
    "cancel": 10,
    "reprioritise": 10,
    "attend": 2,
    "detach": 10,
    "delete": 9,
    "list": 8,
    "claim": 16,
    "mine": 5,
    "append": 34,
    "heartbeat": 7,
    "drain": 2,
    "release": 10,
    "blame": 9,
    "sweep": 8,
    "restart": 1,
    "fill_memory": 2,
    "pass_time": 8,
}
_QUEUES = {
    "enqueue": 40,
    "claim": 34,
    "append": 12,
    "reprioritise": 5,
    "release": 3,
    "cancel": 2,
    "read": 4,
}
_LIMITS = {
    "submit": 40,
    "quote": 4,
    "read": 10,
    "heartbeat": 10,
    "claim": 16,
    "append": 30,
    "cancel": 3,
    "reprioritise": 4,
    "fill_memory": 3,
    "pass_time": 8,
    "sweep": 3,
}
_TIMES = {
    "submit": 14,
    "attend": 4,
    "detach": 8,
    "claim": 20,
    "append": 10,
    "go_on": 4,
    "heartbeat": 5,
    "release": 3,
    "blame": 3,
    "sweep": 14,
    "pass_time": 14,
}
# Bytes that jobs may take: none, those of a few, of many, any number.
ROOMS = (0, 40_000, 120_000, 400_000, None, None)
STAGES = (_EVERYTHING, _QUEUES, _EVERYTHING, _LIMITS, _EVERYTHING, _TIMES)


class Walk:
    """Draws one step after another from one seed."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._rng = random.Random(seed)
        self._pausing = random.Random(seed)
        self._pauses = seed % 5 == 2  # the other worlds stay as they were
        self._paused: list[Line] = []
        self._limits = TenantLimits(
            requests_per_min=self._rng.choice([0, 0, 3]),
            tokens_per_min=self._rng.choice([0, 45]),
            concurrent_tokens=self._rng.choice([0, 0, 28]),
            lane_share=self._rng.choice([0.0, 0.4]),
        )
        self._weighing = random.Random(seed)  # its own, so that weights change no other step
        self._weights = (0.5, 1.0, 4.0) if seed % 2 else (1.0,)
        self._offering = random.Random(seed)
        self._offers = seed % 4 == 3
        self._entering = random.Random(seed)
        self._marking = random.Random(seed)
        self._batch_price = (1.0, 0.5, 0.3)[seed // 6 % 3]
        self._stage = STAGES[seed % len(STAGES)]
        self._measures = seed % 18 != 9  # in a third of the worlds of _LIMITS no worker does

    def step(self) -> None:
        if self._pauses and self._pausing.random() < 0.05:
            self._pause()
        if self._offers and self._offering.random() < 0.1:
            self._offer()
        [name] = self._rng.choices(list(self._stage), list(self._stage.values()))
        getattr(self, f"_{name}")()

    def _flip(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _job_id(self) -> str:
        """Mostly one of the newest jobs, sometimes none."""
        if not self._world.job_ids or self._flip(0.03):
            return "job-0-none"
        return self._rng.choice(self._world.job_ids[-8:])

    def _held(self) -> tuple[str, str]:
        """A worker and a job: mostly one that the worker believes to hold."""
        worker = self._rng.choice(WORKERS)
        held = sorted(self._world.beliefs[worker])[-4:]
        if held and self._flip(0.85):
            return worker, self._rng.choice(held)
        return worker, self._job_id()

    def _quote(self) -> None:
        self._submit(is_quote=True)

    def _enqueue(self) -> None:
        """Long deadlines, no limits, costs of every kind."""
        rng = self._rng
        cost = rng.choice([5, 8, 12, 30])
        num_choices = rng.choice([1, 1, 3])
        self._world.submit(
            rng.choice(TENANTS),
            rng.choice(LANES),
            cost,
            600,
            num_choices=num_choices,
            weight=self._weighing.choice(self._weights),
        )

    def _submit(self, is_quote: bool = False) -> None:
        rng = self._rng
        key = (
            rng.choice(["k1", "k2"]) + str(len(self._world.job_ids) // 5) if self._flip(0.3) else ""
        )
        repeats = None
        if self._flip(0.1) and self._world.job_ids:
            repeats, key = rng.choice(self._world.job_ids), ""
        self._world.submit(
            rng.choice(TENANTS),
            rng.choice(LANES),
            rng.choice([5, 8, 12, 30]),
            rng.choice([2, 8, 60, 200]),
            num_choices=rng.choice([1, 1, 3]),
            attendance_s=rng.choice([0, 0, 9]),
            key=key,
            body=rng.choice("ab") if key else "",
            repeats=repeats,
            retention_s=rng.choice([30, 600]),
            colour=rng.randrange(len(COLOURS)),
            is_stored=self._flip(0.2),
            is_quote=is_quote,
            weight=self._weighing.choice(self._weights),
            is_passing=self._weighing.random() < 0.5,
            enters=self._entering.random() < 0.3,
            **self._terms(),
            callback=rng.choice([None, None, *CALLBACKS]),
        )

    def _terms(self) -> dict[str, Any]:
        """Some jobs get this world's limits and bounds, the others none."""
        terms: dict[str, Any] = {"cold_start_s": self._rng.choice([0, 4])}
        terms["needs_worker"] = self._flip(0.1)
        terms["batch_price"] = self._batch_price
        if self._flip(0.8 if self._stage is _LIMITS else 0.2):
            terms["limits"] = self._limits
        if self._stage is _LIMITS and self._flip(0.4):
            terms["lane_bound_tokens"] = self._rng.choice([30, 45])
        if self._stage is _LIMITS and self._flip(0.4):
            terms["lane_bound_s"] = self._rng.choice([0.5, 3])
        if self._stage is _LIMITS and self._flip(0.3):
            terms[self._rng.choice(["max_stored_bytes", "max_tenant_stored_bytes"])] = 40_000
        return terms

    def _read(self) -> None:
        queued = [i for i, r in self._world.reference.records.items() if r.state == "queued"]
        job_id = self._rng.choice(queued) if queued and self._flip(0.9) else self._job_id()
        self._world.read(job_id, self._rng.choice(TENANTS))

    def _ended_or_any(self) -> str:
        """Often an ended job, each kind of end equally often: callers may be late."""
        ended: dict[str, list[str]] = {}
        for job_id, record in self._world.reference.records.items():
            if record.is_terminal:
                ended.setdefault(record.state, []).append(job_id)
        if not ended or self._flip(0.4):
            return self._job_id()
        return self._rng.choice(ended[self._rng.choice(sorted(ended))])

    def _cancel(self) -> None:
        self._world.cancel(self._ended_or_any(), self._rng.choice(TENANTS))

    def _reprioritise(self) -> None:
        lane = self._rng.choice(["", *LANES])
        deadline_s = self._rng.choice([None, 5, 40])
        tenant = self._rng.choice(TENANTS)
        self._world.reprioritise(self._ended_or_any(), tenant, lane, deadline_s)

    def _delete(self) -> None:
        job_id = self._held()[1] if self._flip(0.6) else self._ended_or_any()
        record = self._world.reference.records.get(job_id)
        tenant = self._rng.choice(TENANTS)
        if record is not None and self._flip(0.8):
            tenant = record.job.tenant
        self._world.delete(job_id, tenant)

    def _list(self) -> None:
        rng = self._rng
        if self._flip(0.3):
            self._world.list_after(self._job_id(), rng.choice(TENANTS))
            return
        wanted = rng.choice(
            [
                Wanted(),
                Wanted(statuses=frozenset(rng.sample(sorted(JobStatus), 3))),
                Wanted(lanes=frozenset([rng.choice(LANES)]), model=rng.choice(["", "m", "other"])),
                self._of_times(),
                Wanted(metadata=rng.choice(COLOURS)),
            ]
        )
        max_looks = rng.choice([2, 500])
        tenant = rng.choice(TENANTS)
        if self._pausing.random() < 0.3:
            tenant = ""
        self._world.list_jobs(tenant, wanted, max_looks=max_looks)

    def _of_times(self) -> Wanted:
        now_ms, draw = self._world.reference.now_ms, self._pausing.random()
        if draw < 0.3:
            return Wanted(created_before_ms=now_ms - 3000)
        if draw < 0.6:
            return Wanted(error_code="engine_error", created_before_ms=now_ms + 1)
        return Wanted(created_after_ms=now_ms - 9000)

    def _pause(self) -> None:
        """Pauses end more often than they begin."""
        rng = self._pausing
        if self._paused and rng.random() < 0.6:
            self._world.resume(self._paused.pop(rng.randrange(len(self._paused))))
            return
        lane, tenant = rng.choice(["", *LANES]), rng.choice(["", *TENANTS])
        line = Line(rng.choice(["", "m"]), lane, tenant)
        if rng.random() < 0.1:
            self._world.resume(line)  # mostly of none
            self._paused = [each for each in self._paused if each != line]
        elif lane or tenant:
            self._world.pause(line)
            self._paused = [*(each for each in self._paused if each != line), line]

    def _detach(self) -> None:
        rng = self._rng
        terms = (rng.choice([5, 40]), rng.choice([6, 900]))
        self._world.detach(self._ended_or_any(), rng.choice(TENANTS), *terms)

    def _attend(self) -> None:
        self._world.attend([self._job_id(), self._job_id()])

    def _claim(self) -> None:
        rng = self._rng
        worker = rng.choice(WORKERS)
        is_idle = not self._world.beliefs[worker] or self._flip(0.5)
        rooms = [(1, 30), (3, 9), (8, 1000)]
        if self._stage is _QUEUES:
            rooms = [(1, 30), (1, 14), (2, 14), (2, 9), (3, 1000)]
        room = rng.choice(rooms)
        by_lane = {
            "interactive": LaneRoom(*room),
            "batch": LaneRoom(*rng.choice([(0, 0), (1, 9), (2, 30)]), rng.choice([0, 1, 8])),
        }
        if self._flip(0.4):
            held = {t: (rng.randint(0, 3), rng.randint(0, 30)) for t in TENANTS if self._flip(0.6)}
            fair = FairRoom(rng.choice([2, 4, 7]), rng.choice([30, 60, 1000]), held)
            by_lane["batch"] = LaneRoom(0, 0, fair=fair)
        self._world.claim(
            worker,
            *room,
            is_idle=is_idle,
            loses_reply=self._flip(0.25),
            rooms=by_lane if self._flip(0.3) else None,
        )

    def _mine(self) -> None:
        self._world.mine(self._rng.choice(WORKERS))

    def _append(self) -> None:
        worker, job_id = self._held()
        self._world.append(
            worker,
            job_id,
            self._rng.choice([0, 1, 1, 1, 2, 30]),
            self._rng.choice([""] * 7 + ["succeeded", "succeeded", "failed"]),
            shift=self._rng.choice([0, 0, 0, 0, 0, 0, -1, 1]),
            loses_reply=self._flip(0.1),
            is_kept_elsewhere=self._flip(0.2),
            beside=sorted(self._world.beliefs[worker])[-3:] if self._flip(0.3) else (),
            renews=self._flip(0.6),
            marks=self._marks(),
        )

    def _marks(self) -> tuple[JobMark, ...]:
        rng = self._marking
        if rng.random() < 0.7:
            return ()
        chunks = JobMark("prefill", 900, rng.randint(0, 900), 3, 1500)
        return (chunks, JobMark("displaced", 7, 7, 1, 12)) if rng.random() < 0.5 else (chunks,)

    def _go_on(self) -> None:
        """A worker appends a token to some jobs, repeatedly for longer than a lease."""
        worker, job_id = self._held()
        beside = sorted(self._world.beliefs[worker])[-3:]
        for _ in range(3):
            self._world.append(worker, job_id, 1, "", shift=0, loses_reply=False, beside=beside)
            self._world.pass_time(6)
        self._world.sweep()

    def _heartbeat(self) -> None:
        rng = self._rng
        capacity = WorkerCapacity(
            tokens_per_s=rng.choice([0, 0, 7, 30.5]) if self._measures else 0.0,
            stream_tokens_per_s=rng.choice([0, 0, 1.5, 20]),
            max_tokens=rng.choice([0, 40]),
            max_jobs=rng.choice([0, 3]),
            lanes=LANES[:1] if self._flip(0.1) else LANES,
            min_shares=rng.choice([{}, {"interactive": 0.3, "batch": 0.45}]),
        )
        state = rng.choices(STATES, (8, 1, 1))[0]
        self._world.heartbeat(rng.choice(WORKERS), state, capacity)

    def _release(self) -> None:
        worker, job_id = self._held()
        self._world.release(worker, job_id, self._rng.choice(["drain", "error"]))

    def _offer(self) -> None:
        """A worker offers jobs, and another may have room for some; before, one of them may go on,
        move, be given back or blamed, or time pass."""
        rng, world = self._offering, self._world
        worker = rng.choice(WORKERS)
        held = sorted(world.beliefs[worker])
        offered = rng.sample(held, min(len(held), 3))
        for job_id in offered:
            world.release(worker, job_id, "offer")
        event = rng.choice(["", "", "append", "move", "drain", "blame", "time"])
        if offered and event == "append":
            world.append(worker, offered[0], 1, "", shift=0, loses_reply=False)
        elif offered and event == "move":
            world.reprioritise(offered[0], rng.choice(TENANTS), rng.choice(LANES))
        elif offered and event == "drain":
            world.release(worker, offered[0], "drain")
        elif offered and event == "blame":
            world.blame(worker, offered[0], 2)
        elif event == "time":
            world.pass_time(rng.choice([1, 2.5, 3]))
        room = rng.choice([(1, 8), (2, 30), (8, 1000)])
        rooms = {lane: LaneRoom(room[0], rng.choice([8, 1000])) for lane in LANES}
        if rng.random() < 0.5:
            del rooms[rng.choice(LANES)]
        world.claim(rng.choice(WORKERS), *room, is_idle=False, loses_reply=False, rooms=rooms)

    def _drain(self) -> None:
        self._world.drain(self._rng.choice(WORKERS))

    def _sweep(self) -> None:
        self._world.sweep()

    def _restart(self) -> None:
        self._world.restart()

    def _fill_memory(self) -> None:
        self._world.fill_memory(self._rng.choice(ROOMS))

    def _pass_time(self) -> None:
        self._world.pass_time(self._rng.choice([1, 3, 6, 11]))

    def _blame(self) -> None:
        self._world.blame(*self._held(), self._rng.choice([2, 3]))
