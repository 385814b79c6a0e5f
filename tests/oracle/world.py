"""A small world of callers, workers and time, run on Redis and on the reference at once.

Every reply is compared, and after every step the invariants are audited. The caller chooses the
steps: Hypothesis, or a random walk.

Over 300 lines: one method for each function.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import redis
import redis.asyncio
from msgspec.structs import replace

from contract.callbacks import Callback, CallbackKind, OutboxState
from contract.connection import connect
from contract.errors import BatchwayError, BrokerFull, JobRefused
from contract.events import ChoiceDelta, Tokens
from contract.function_types import (
    Append,
    Blame,
    Claimed,
    JobMark,
    JobPage,
    LaneRoom,
    Quote,
    Release,
    Submission,
    Submitted,
    Swept,
    Wanted,
    WorkerCapacity,
    WorkerState,
)
from contract.functions import Functions
from contract.jobs import (
    TERMINAL_STATUSES,
    Endpoint,
    Job,
    JobStatus,
    ObjectRef,
    Pooling,
    SamplingParams,
    StoredPrompt,
)
from contract.keys import Keys
from contract.library import library_source
from contract.pauses import Line, Pause, Pauses
from tests.clock import TEST_CLOCK, with_test_clock
from tests.oracle.audit import Audit
from tests.oracle.clerks import Clerks
from tests.oracle.feeders import Feeders
from tests.oracle.postmen import Postmen
from tests.oracle.reference import Reference
from tests.oracle.reference_admission import Lengths
from tests.oracle.reference_operations import MAX_OPEN

LANES = ("interactive", "batch")
MIN_SHARES = {"batch": 0.3}
TENANTS = ("t", "u")
WORKERS = ("w1", "w2", "w3")
STATES: tuple[WorkerState, ...] = ("up", "draining", "gone")
LEASE_S = 10.0
COLOURS: tuple[dict[str, str], ...] = ({}, {"colour": "red"}, {"colour": "blue", "size": "1"})
REF = ObjectRef("store", "key", "0" * 64, 1)
CALLBACKS = (
    Callback(kind=CallbackKind.URL, target="https://a/x"),
    Callback(kind=CallbackKind.URL, target="https://b/x", notifies_start=True, progress_tokens=2),
)
MAX_PASSED = 3  # few, so that short walks reach it
MIN_LENGTHS = 2
GROWTH = 1

EXPECTED = (0, 0, 4, 500)  # tokens, as callers say
GRAMMARS = ("", '{"grammars": [{"lark_grammar": "start: /[0-9]+/"}]}')

T = TypeVar("T")


@dataclass
class World:
    """One partition, its reference, and the jobs that each worker believes to hold."""

    redis_url: str
    source: str = field(default_factory=library_source)
    keys: Keys = field(default_factory=lambda: Keys("world"))
    audit_every: int = 1  # steps
    reference: Reference = field(default_factory=lambda: Reference(MAX_PASSED, MIN_LENGTHS, GROWTH))
    beliefs: dict[str, dict[str, tuple[int, int]]] = field(
        default_factory=lambda: {worker: {} for worker in WORKERS}
    )  # worker → job id → (epoch, next number)
    replies: Counter[str] = field(default_factory=Counter)
    job_ids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._num_steps = 0
        self._num_jobs = 0
        self.loop = asyncio.new_event_loop()
        self.client = redis.Redis.from_url(self.redis_url)
        self.client.flushall()
        source = with_test_clock(self.source)
        source = source.replace("MAX_PASSED = 8 ", f"MAX_PASSED = {MAX_PASSED} ")
        source = source.replace("MIN_LENGTHS = 5 ", f"MIN_LENGTHS = {MIN_LENGTHS} ")
        source = source.replace("GROWTH = 32 ", f"GROWTH = {GROWTH} ")
        source = source.replace(
            "tonumber(argv[7])) then return {'FULL'}", f"{MAX_OPEN}) then return {{'FULL'}}"
        )
        # The memory is as a step has set it, not as it is.
        source = source.replace("num_trusted = 0 ", "num_trusted = 2 ^ 52 ")
        self.client.function_load(source, replace=True)
        self.client.set(self.keys.of("memory"), "free")
        # As if short outputs were known: many jobs of this tenant draw more than is predicted.
        for lane in LANES:
            self.reference.lengths["m", lane, TENANTS[0]] = Lengths(0.5, 9)
            self.client.set(self.keys.of("lengths", "m", lane, TENANTS[0]), "0.5 9")
        self.async_client = connect(self.redis_url, self.keys)
        self.functions = Functions(self.async_client, self.keys)
        self.pauses = Pauses(self.async_client, self.keys)
        self.audit = Audit(self.client, self.keys)
        self.postmen = Postmen(self)
        self.feeders = Feeders(self)
        self.clerks = Clerks(self)
        self._freeze_clock()
        self._hints: Any = self.client.pubsub(  # type: ignore[no-untyped-call]
            ignore_subscribe_messages=True
        )
        self._hints.subscribe(self.keys.of("wake", "m"))
        self._hints.get_message(timeout=5)  # the confirmation: from now on it receives messages

    def close(self) -> None:
        self._hints.close()
        self.loop.run_until_complete(self.async_client.aclose())
        self.loop.close()
        self.client.delete(TEST_CLOCK)
        self.client.close()

    # --- time ---------------------------------------------------------------------------------

    def _freeze_clock(self) -> None:
        """Steps take no time: the clock of the functions moves only when a step moves it."""
        seconds, _ = self.client.time()
        self.reference.now_ms = seconds * 1000
        self.hold_clock()

    def hold_clock(self) -> None:
        self.client.set(TEST_CLOCK, f"={self.reference.now_ms}")

    def pass_time(self, seconds: float) -> None:
        self.reference.now_ms += int(seconds * 1000)

    # --- callers ------------------------------------------------------------------------------

    def submit(
        self,
        tenant: str,
        lane: str,
        cost: int,
        deadline_s: float,
        *,
        attendance_s: float = 0.0,
        key: str = "",
        body: str = "",
        repeats: str | None = None,
        retention_s: float = 600,
        colour: int = 0,
        is_stored: bool = False,
        num_choices: int = 1,
        weight: float = 1.0,
        is_quote: bool = False,
        callback: Callback | None = None,
        enters: bool = False,
        **terms: Any,
    ) -> None:
        """`cost`: prompt and output cap; `terms`: limits and bounds, as Submission has them. Some
        jobs are prefill-only, with two prompts of that cost."""
        self._num_jobs += 1
        is_prefill = self._num_jobs % 7 == 6
        prompts = ((1,), (2,) * (cost - 1)) if is_prefill else ((1, 2, 3),)
        num_prompt = sum(map(len, prompts))
        job = Job(
            id=repeats or f"job-0-{self._num_jobs:032x}",
            tenant=tenant,
            model="m",
            lane=lane,
            endpoint=Endpoint.COMPLETIONS,
            prompt_ids=() if is_stored or is_prefill else prompts[0],
            prompt_list=prompts if is_prefill and not is_stored else (),
            stored_prompt=StoredPrompt(REF, num_prompt, len(prompts)) if is_stored else None,
            pooling=Pooling() if is_prefill else None,
            params=SamplingParams(max_tokens=0, seed=0)
            if is_prefill
            else SamplingParams(
                max_tokens=cost - 3,
                expected_tokens=EXPECTED[self._num_jobs % len(EXPECTED)],
                seed=0,
                n=num_choices,
                grammar=GRAMMARS[self._num_jobs % 4 == 0],
            ),
            created_s=0,
            weight=weight,
        )
        submission = Submission(
            max_output_tokens=cost - num_prompt,
            deadline_s=deadline_s,
            retention_s=retention_s,
            max_attempts=2,
            idempotency_key=key,
            body_hash=body,
            attendance_s=attendance_s,
            metadata=COLOURS[colour],
            callback=callback,
            **terms,
        )
        if enters:
            if self._both("enter", tenant, submission.limits) is not None:
                return
            submission = msgspec.structs.replace(submission, is_counted=not is_quote)
        if is_quote:
            self._both("quote", job, submission)
            return
        reply = self._both("submit", job, submission)
        if repeats is None and getattr(reply, "is_new", False):
            self.job_ids.append(job.id)

    def cancel(self, job_id: str, tenant: str) -> None:
        self._both("cancel", job_id, tenant)

    def reprioritise(
        self, job_id: str, tenant: str, lane: str = "", deadline_s: float | None = None
    ) -> None:
        self._both("reprioritise", job_id, tenant, lane=lane, deadline_s=deadline_s)

    def delete(self, job_id: str, tenant: str) -> None:
        self._both("delete", job_id, tenant)

    def list_jobs(
        self, tenant: str, wanted: Wanted, *, max_jobs: int = 3, max_looks: int = 500
    ) -> None:
        """Reads the whole list, page by page."""
        after = ""
        while True:
            page = self._both(
                "list_jobs", tenant, wanted, after=after, max_jobs=max_jobs, max_looks=max_looks
            )
            after = page.position if page is not None else ""
            if not after:
                return

    def list_after(self, job_id: str, tenant: str) -> None:
        self._both("list_jobs", tenant, Wanted(), after=job_id)

    def detach(self, job_id: str, tenant: str, deadline_s: float, retention_s: float) -> None:
        self._both("detach", job_id, tenant, deadline_s=deadline_s, retention_s=retention_s)

    def pause(self, line: Line) -> None:
        self._both("pause", line, "operator")

    def resume(self, line: Line) -> None:
        self._both("resume", line, "operator")

    def attend(self, job_ids: list[str]) -> None:
        self._both("attend", job_ids)

    # --- workers ------------------------------------------------------------------------------

    def claim(
        self,
        worker: str,
        max_jobs: int,
        max_tokens: int,
        *,
        is_idle: bool,
        loses_reply: bool,
        rooms: dict[str, LaneRoom] | None = None,
    ) -> None:
        room: dict[str, Any] = {"max_jobs": max_jobs, "max_tokens": max_tokens, "is_idle": is_idle}
        room |= {"lease_s": LEASE_S, "min_shares": MIN_SHARES, "rooms": rooms}
        claimed = self._both("claim", worker, "m", LANES, **room)
        if not loses_reply:
            self._believe(worker, claimed)

    def mine(self, worker: str) -> None:
        known = sorted(self.beliefs[worker])
        self._believe(worker, self._both("mine", worker, known, lease_s=LEASE_S, sort=True))

    def append(
        self,
        worker: str,
        job_id: str,
        num_tokens: int,
        fin: str,
        *,
        shift: int,
        loses_reply: bool,
        is_kept_elsewhere: bool = False,
        beside: Sequence[str] = (),
        renews: bool = True,
        marks: tuple[JobMark, ...] = (),
    ) -> None:
        """`shift` 0 is the next event; −1 repeats one, +1 leaves a gap. A token of each job in
        `beside` comes first."""
        result = REF if fin and is_kept_elsewhere else None
        items = [self._said(worker, other, 1) for other in beside if other != job_id]
        said = self._said(worker, job_id, num_tokens, shift, fin, result)
        items.append(replace(said, marks=marks))
        lease_s = LEASE_S if renews else 0.0
        verdicts = self._both("append", worker, items, lease_s=lease_s)
        for item, (verdict, next_number) in zip(items, verdicts, strict=True):
            is_heard = item is not items[-1] or (shift == 0 and not loses_reply)
            if verdict == "OK" and is_heard:
                self.beliefs[worker][item.job_id] = (item.epoch, next_number)

    def _said(
        self,
        worker: str,
        job_id: str,
        num_tokens: int,
        shift: int = 0,
        fin: str = "",
        result: ObjectRef | None = None,
    ) -> Append:
        """An append by the worker's knowledge of its job; the tokens continue where the log
        ends."""
        epoch, number = self.beliefs[worker].get(job_id, (1, 1))
        record = self.reference.records.get(job_id)
        start = record.num_tokens if record is not None else 0
        event = Tokens((ChoiceDelta(0, start, tuple(range(num_tokens)), "x" * num_tokens),))
        return Append(
            job_id,
            epoch,
            max(1, number + shift),
            event if num_tokens else None,
            num_tokens,
            fin and JobStatus(fin),  # type: ignore[arg-type]
            "engine_error" if fin == "failed" else "",
            "it broke" if fin == "failed" else "",
            result,
        )

    def drain(self, worker: str) -> None:
        self._both("drain", [worker])

    def heartbeat(
        self,
        worker: str,
        state: WorkerState = "up",
        capacity: WorkerCapacity = WorkerCapacity(),  # noqa: B008 - it is frozen
    ) -> None:
        held = [(job_id, epoch) for job_id, (epoch, _) in sorted(self.beliefs[worker].items())]
        says: dict[str, Any] = {"info": "{}", "capacity": capacity, "state": state}
        lost = self._both("heartbeat", worker, "m", held, lease_s=LEASE_S, **says)
        for job_id in lost:
            del self.beliefs[worker][job_id]

    def release(self, worker: str, job_id: str, kind: str) -> None:
        epoch, _ = self.beliefs[worker].get(job_id, (1, 1))
        release = Release(job_id, epoch, kind, "engine_error", "it broke")  # type: ignore[arg-type]
        self._both("release", worker, [release])

    def blame(self, worker: str, job_id: str, max_crashes: int) -> None:
        epoch, _ = self.beliefs[worker].get(job_id, (1, 1))
        self._both("blame", worker, [Blame(job_id, epoch, "{}")], max_crashes=max_crashes)

    def sweep(self) -> None:
        self._both("sweep", 1000)

    def restart(self) -> None:
        """As if Redis had been restarted: the next sweep sees another run id."""
        if self.client.exists(self.keys.of("runid")):
            self.client.set(self.keys.of("runid"), "another 0")
            self.reference.restart()

    def fill_memory(self, room: int | None) -> None:
        """Sets the bytes that jobs may take; None: without a bound."""
        self.client.set(self.keys.of("memory"), "free" if room is None else room)
        self.reference.memory_room = math.inf if room is None else room

    # --- the comparison -----------------------------------------------------------------------

    def settle(self) -> None:
        """Without faults, as time passes, everything must end."""
        self.clerks.settle()
        self.pass_time(10_000)
        self.sweep()  # perhaps the one after a restart
        self.pass_time(10_000)
        self.sweep()
        self.audit.check_all_ended()
        self.pass_time(10_000)
        self.sweep()
        self.feeders.settle()
        self.postmen.deliver_all()
        self.hold_clock()
        self.audit.check_at_rest()
        self.audit.check_files_at_rest()

    def _both(self, name: str, *args: Any, sort: bool = False, **options: Any) -> Any:
        """Calls function and reference, compares replies and records, and audits Redis."""
        self.hold_clock()
        functions = self.pauses if name in ("pause", "resume") else self.functions
        there = _comparable(self._call(getattr(functions, name), *args, **options))
        here = _comparable(_outcome(lambda: getattr(self.reference, name)(*args, **options)))
        if sort:
            there, here = _by_id(there), _by_id(here)
        assert there == here, f"{name}: Redis said {there!r}, the reference {here!r}"
        self.job_ids = [job_id for job_id in self.job_ids if job_id in self.reference.records]
        self.replies.update(f"{name} {kind}" for kind in _kinds(there))
        self._compare_hints()
        self.after_step()
        return there

    def after_step(self) -> None:
        self._num_steps += 1
        if self._num_steps % self.audit_every == 0:
            self._compare_records()
            self.postmen.compare()
            self.feeders.compare(TENANTS)
            self.clerks.compare(TENANTS)
            self.audit.check()

    def _call(self, call: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> Any:
        async def run() -> Any:
            try:
                return await call(*args, **options)
            except JobRefused as refused:
                return _refusal(refused)
            except BrokerFull as refused:
                return refused.code

        return self.loop.run_until_complete(run())

    def _compare_hints(self) -> None:
        """The hint that a job waits is published to the workers of its model, once, with its
        lane."""
        self._hints.ping()  # its reply follows all earlier messages
        there = []
        while (message := self._hints.get_message(timeout=10)) is None or message["type"] != "pong":
            if message is not None:
                there.append(("m", message["data"].decode()))
        assert there == self.reference.wakes, (
            f"hints: {there}, the reference {self.reference.wakes}"
        )
        self.reference.wakes.clear()

    def _compare_records(self) -> None:
        rows: Any = self.client.zrange(self.keys.of("workers", "m"), 0, -1)
        there_live = {row.decode() for row in rows}
        here_live = self.reference.live_workers("m")
        assert there_live == here_live, f"workers: {there_live}, the reference {here_live}"
        fields = ("state", "lane", "owner", "epoch", "attempt", "lapses", "crashes", "cost")
        records = self.reference.records
        with self.client.pipeline(transaction=False) as pipe:
            for job_id in records:
                pipe.hmget(self.keys.of("job", job_id), fields)
            replies: Any = pipe.execute()
        for (job_id, record), values in zip(records.items(), replies, strict=True):
            there = {name: value.decode() for name, value in zip(fields, values, strict=True)}
            here = {
                "state": record.state.value,
                "lane": record.lane,
                "owner": record.owner,
                "epoch": str(record.epoch),
                "attempt": str(record.attempt),
                "lapses": str(record.lapses),
                "crashes": str(record.crashes),
                "cost": str(record.cost),
            }
            assert there == here, f"{job_id}: Redis has {there}, the reference {here}"
        for of, known in self.reference.lengths.items():
            raw: Any = self.client.get(self.keys.of("lengths", *of))
            estimate, num_seen = (raw or b"0 0").split()
            assert (float(estimate), int(num_seen)) == (known.estimate, known.num_seen), of
        for lane in LANES:
            waits: Any = self.client.lrange(self.keys.of("calibration", "m", lane), 0, -1)
            noted = self.reference.calibrations.get(("m", lane), [])
            assert [tuple(map(int, wait.split())) for wait in waits] == noted, f"waits in {lane}"
        self._compare_snapshot()
        orphaned: Any = self.client.smembers(self.keys.of("orphaned"))
        forgotten = {job_id.decode() for job_id in orphaned}
        assert forgotten == self.reference.orphaned, forgotten ^ self.reference.orphaned

    def _compare_snapshot(self) -> None:
        """The figures for metrics: totals as counted by the reference, lanes as in its records."""
        self.hold_clock()
        snapshot = self.loop.run_until_complete(self.functions.snapshot("m", LANES))
        there = {
            field: value
            for field, value in snapshot.totals.items()
            if value and not field.rpartition(":")[2].isdigit()  # of a bucket
        }
        assert there == self.reference.totals["m"], "totals"
        for lane, found in snapshot.lanes.items():
            states = [r.state for r in self.reference.records.values() if r.lane == lane]
            num_queued = states.count(JobStatus.QUEUED)
            num_running = sum(state not in TERMINAL_STATUSES for state in states) - num_queued
            assert (found.num_queued, found.num_running) == (num_queued, num_running), lane
        aside = {each.worker.incarnation: (each.state, each.for_s) for each in snapshot.aside}
        now_ms = self.reference.now_ms
        here = {w: (s, (now_ms - ms) / 1000) for w, (s, ms) in self.reference.aside.items()}
        assert aside == here, f"workers that claim no jobs: {aside}, the reference {here}"
        self.replies["snapshot totals"] += 1
        watched = self.loop.run_until_complete(self.functions.watch("m", LANES))
        for job in watched.held:
            record = self.reference.records[job.job_id]
            known = record.owner, record.job.tenant, record.lane, record.attempt, record.num_tokens
            seen = job.worker, job.tenant, job.lane, job.attempt, job.num_output_tokens
            assert seen == known, job.job_id
        posted = [entry.state for entry in self.reference.outbox.entries.values()]
        counted = watched.num_due_callbacks, watched.num_dead_callbacks
        assert counted == (posted.count(OutboxState.DUE), posted.count(OutboxState.DEAD))
        self.replies["watch some" if watched.held else "watch none"] += 1

    def read(self, job_id: str, tenant: str) -> None:
        """Compares the reported place of a job."""
        self.hold_clock()
        found = self.loop.run_until_complete(self.functions.read(job_id, tenant))
        there = found[0].position if found is not None else None
        here = self.reference.position(job_id, tenant)
        assert there == here, f"{job_id}: Redis sees it at {there}, the reference at {here}"
        self.replies["read " + ("nothing" if there is None else "place")] += 1

    def _believe(self, worker: str, claimed: list[Claimed]) -> None:
        for item in claimed:
            self.beliefs[worker][item.job.id] = (item.epoch, item.next_number)


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except JobRefused as refused:
        return _refusal(refused)
    except BrokerFull as refused:
        return refused.code
    except BatchwayError as error:
        return type(error).__name__


def _refusal(refused: JobRefused) -> tuple[Any, ...]:
    """All fields of a refusal."""
    figures = (refused.limit, refused.retry_after_s, refused.rates)
    return ("refused", str(refused.code), refused.message, *figures)


def _comparable(reply: Any) -> Any:
    """Exceptions equal only themselves, so a quote's exception is replaced by its fields."""
    if isinstance(reply, Quote) and reply.refusal is not None:
        return replace(reply, refusal=_refusal(reply.refusal))
    return reply


def _by_id(claimed: Any) -> Any:
    return sorted(claimed, key=lambda item: item.job.id)


def _kinds(reply: Any) -> list[str]:
    """Short names of replies, for counting them."""
    if isinstance(reply, list):
        return [kind for part in reply for kind in _kinds(part)] or ["nothing"]
    if isinstance(reply, Claimed):
        return ["alone" if reply.is_alone else "job"]
    if isinstance(reply, Submitted):
        return ["new" if reply.is_new else "known"]
    if isinstance(reply, Quote):
        refused: Any = reply.refusal
        return _kinds(refused) if refused else ["OK"]
    if isinstance(reply, Swept):
        found = {
            "lapsed": reply.num_lapsed,
            "expired": reply.num_expired,
            "unattended": reply.num_unattended,
            "forgotten": reply.num_forgotten,
        }
        return [word for word, number in found.items() if number] or ["nothing"]
    if isinstance(reply, JobPage):
        return [("some" if reply.views else "none") + (" and more" if reply.position else "")]
    if isinstance(reply, tuple) and reply[0] == "refused":
        _, code, _, limit = reply[:4]
        return [f"{code} {limit}" if code in ("tenant_quota", "lane_full") else code]
    if isinstance(reply, tuple):
        return [str(reply[0])]
    if isinstance(reply, Pause):
        return ["paused"]
    if isinstance(reply, bool):
        return [str(reply)]
    if isinstance(reply, int):
        return ["some" if reply else "none"]
    return ["lost" if str(reply).startswith("job-") else str(reply)]
