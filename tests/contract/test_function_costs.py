"""Redis has one thread: while it runs a function, every other call waits. No function takes it
long, however much waits, runs and is kept.

Processor time, not the clock, and as a multiple of the cheapest `submit` on the same machine.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from inspect import isawaitable
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from contract.batches import BatchStatus, Part
from contract.errors import BrokerFull, JobRefused
from contract.function_types import MAX_CLAIM, Blame, FairRoom, JobMark, LaneRoom, Release, Wanted
from contract.jobs import Job, JobStatus
from contract.library import library_source  # before tests set a clock in it
from contract.operations import OperationKind
from contract.pauses import PauseLine
from contract.residence import prefix_marks
from infra.embedded_redis import EmbeddedRedis
from tests.contract.crowded_redis import (
    BIG,
    CLAIMER,
    FOREVER_S,
    HOLDER,
    LANES,
    LEASE_S,
    LIMITS,
    MODEL,
    SERVED,
    TENANTS,
    URGENT,
    WORKERS,
    CrowdedRedis,
    at_once,
)

pytestmark = [pytest.mark.anyio, pytest.mark.campaign]

LUA = Path(__file__).parents[2] / "contract" / "lua"
MAX_MS, MAX_TIMES = 2.0, 10
MAX_ENDS = 8  # of one append of a worker

Calls = AsyncIterator[Awaitable[Any]]
Items = Callable[[CrowdedRedis], Any]
Call = Callable[[CrowdedRedis, Any], Awaitable[Any]]


class Case(NamedTuple):
    function: str
    what: str
    calls: Callable[[CrowdedRedis], Calls]


CASES: list[Case] = []


def case(function: str, what: str) -> Callable[[Callable[[CrowdedRedis], Calls]], None]:
    """Adds calls of one kind: an iterator prepares each and yields it to be measured."""
    return lambda calls: CASES.append(Case(function, what, calls))


def each(function: str, what: str, items: Items | int = 15, call: Call | None = None) -> None:
    """Adds a call for each item, by default that of `CALL`. Items are prepared before the first
    call; a number needs no preparation."""

    async def calls(crowd: CrowdedRedis) -> Calls:
        found = range(items) if isinstance(items, int) else items(crowd)
        for item in await found if isawaitable(found) else found:
            yield (call or CALL[function])(crowd, item)

    CASES.append(Case(function, what, calls))


async def refused(call: Awaitable[Any]) -> None:
    with pytest.raises((JobRefused, BrokerFull)):
        await call


def of(item: Any) -> tuple[str, str]:
    """The id and the tenant of a job, or of one that is claimed."""
    job = getattr(item, "job", item)
    return job.id, job.tenant


def new_jobs(number: int, **fields: Any) -> Items:
    return lambda c: (c.job(TENANTS[n], LANES[n % 2], **fields) for n in range(number))


def waiting(number: int, **terms: Any) -> Items:
    return lambda c: c.submit_many(number, "", LANES[1], **terms)


def running(number: int) -> Items:
    return lambda c: c.running(number)


def long(number: int) -> Items:
    return lambda c: c.take_long(number)


def tenants(first: int) -> Items:
    return lambda c: TENANTS[first : first + 5]


async def claim(crowd: CrowdedRedis, **terms: Any) -> None:
    fields: dict[str, Any] = {
        "lease_s": LEASE_S,
        "max_jobs": 0,
        "max_tokens": 0,
        "config_version": "bea6cb1e",
        "min_shares": {"batch": 0.05, "scoring": 0.1},
        "prompt_token_s": 1e-3,
    }
    await crowd.functions.claim(CLAIMER, MODEL, SERVED, **(fields | terms))


def rooms(max_jobs: int, max_tokens: int) -> dict[str, LaneRoom]:
    return dict.fromkeys(SERVED, LaneRoom(max_jobs, max_tokens))


async def take_some(crowd: CrowdedRedis, number: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < number:
        found += await crowd.taken()
    return found[:number]


def line_of(tenant: str) -> PauseLine:
    return PauseLine(model=MODEL, lane=URGENT, tenant=tenant)


MOVED: dict[str, Any] = {"lane": LANES[0], "deadline_s": FOREVER_S}
KEPT: dict[str, Any] = {"deadline_s": FOREVER_S, "retention_s": FOREVER_S}
# Filters that admit all, or nothing but what was looked at.
ALL, NONE = Wanted(model=MODEL), Wanted(metadata={"team": "another"})
PAGE: dict[str, Any] = {"purpose": "", "after": "", "is_oldest_first": True, "max_files": 500}
TO_CHECK: dict[str, Any] = {"lease_s": LEASE_S, "in_progress": False, "max_batches": 2}
FAIR = FairRoom(256, 4_000_000, dict.fromkeys(TENANTS[::2], (1, 2_500)))
ALL_ROOM = rooms(MAX_CLAIM, 4_000_000)
LATER_S = 4e9  # Unix time
POISON = '{"prompt": "ab12"}'

CALL: dict[str, Call] = {
    "enter": lambda c, n: c.functions.enter(TENANTS[n], LIMITS),
    "submit": lambda c, job: c.submit(job, callback=c.callback()),
    "quote": lambda c, job: c.functions.quote(job, c.submission(job, callback=c.callback())),
    "attend": lambda c, _: c.functions.attend(c.attended[:2_000]),
    "reprioritise": lambda c, job: c.functions.reprioritise(*of(job), **MOVED),
    "detach": lambda c, job: c.functions.detach(*of(job), **KEPT),
    "cancel": lambda c, job: c.functions.cancel(*of(job)),
    "delete": lambda c, job: c.functions.delete(*of(job)),
    "read": lambda c, job: c.functions.read(*of(job), after=0, max_events=500),
    "snapshot": lambda c, _: c.functions.snapshot(MODEL, SERVED),
    "watch": lambda c, _: c.functions.watch(MODEL, SERVED),
    "append": lambda c, _: c.run((*c.held, *c.long), 1),
    "drain": lambda c, _: c.functions.drain(WORKERS),
    "outbox_take": lambda c, _: c.taken(),
    "outbox_start": lambda c, taken: c.outbox.start(taken, lease_s=LEASE_S),
    "outbox_dead": lambda c, _: c.outbox.dead(BIG, limit=100),
    "outbox_replay": lambda c, letter: c.outbox.replay(letter.record.job_id, BIG),
    "operation_add": lambda c, tenant: c.add_operation(tenant, Wanted()),
    "operation_stop": lambda c, operation_id: c.operations.stop(operation_id),
    "file_begin": lambda c, n: c.files.begin(f"file-{n:032}"),
    "file_add": lambda c, _: c.add_file(BIG),
    "file_read": lambda c, _: c.files.page(BIG, **PAGE),
    "file_drop": lambda c, file_id: c.files.drop(file_id, BIG),
    "batch_add": lambda c, tenant: c.add_batch(tenant),
    "batch_take": lambda c, n: c.batches.take(f"token-{n}", **TO_CHECK),
    "batch_cancel": lambda c, batch_id: c.batches.cancel(batch_id, BIG),
    "batch_move": lambda c, batch_id: c.batches.move(batch_id, "another", LATER_S),
    "pause": lambda c, tenant: c.pauses.pause(line_of(tenant), "tenant"),
    "resume": lambda c, tenant: c.pauses.resume(line_of(tenant), "tenant"),
}

# --- callers

each("enter", "counts a call")
each("submit", "with metadata and a callback", new_jobs(20))
TOOLS = {f"f{n}": ("a", "b") for n in range(50)}
LONGEST = new_jobs(5, num_prompt=3_500, tools=TOOLS)
each("submit", "with the longest prompt that is kept in Redis", LONGEST)
each(
    "submit",
    "refused: the lane is full",
    new_jobs(5),
    lambda c, job: refused(c.submit(job, lane_bound_tokens=1_000)),
)
each("quote", "with metadata and a callback", new_jobs(5))
each("attend", "2,000 followed jobs")
each("reprioritise", "a waiting job: lane and deadline", waiting(5))
each("reprioritise", "a running job: lane and deadline", running(5))
each(
    "reprioritise",
    "a waiting job: its start",
    waiting(5),
    lambda c, job: c.functions.reprioritise(*of(job), start_at_s=LATER_S),
)
each("detach", "a running job", running(5))
each("cancel", "a waiting job with a callback", lambda c: waiting(5, callback=c.callback())(c))
each("cancel", "a running job with a long answer", long(3))
each("delete", "a job with a long answer", lambda c: c.take_ended(3))
each("read", "the place of a job that waits", waiting(5))
each("snapshot", "five lanes")
each("watch", "five lanes")


def read_after(job_of: Callable[[CrowdedRedis], Any]) -> tuple[Items, Call]:
    """Pages of a long answer."""
    return lambda c: (0, 3_000, 6_000), lambda c, after: c.functions.read(
        *of(job_of(c)), after=after, max_events=500
    )


def listed(tenant: str, wanted: Wanted) -> Call:
    return lambda c, _: c.functions.list_jobs(tenant, wanted, max_jobs=100)


each("read", "500 events of a long answer that runs", *read_after(lambda c: c.long[0]))
each("read", "500 events of a long answer that has ended", *read_after(lambda c: c.ended[0]))
each("list", "100 jobs of a tenant", call=listed(BIG, ALL))
each("list", "no match of a tenant", call=listed(BIG, NONE))
each("list", "100 jobs of all", call=listed("", ALL))
each("list", "no match of all", call=listed("", NONE))


@case("list", "100 jobs of all, from the middle")
async def _(crowd: CrowdedRedis) -> Calls:
    for job_id in crowd.attended[1_000:1_003]:
        yield crowd.functions.list_jobs("", ALL, after=job_id, max_jobs=100)


# --- workers


def claimed(found: dict[str, LaneRoom]) -> Call:
    return lambda c, _: claim(c, rooms=found)


BELOW_SHARE = claimed(dict.fromkeys(LANES, LaneRoom(0, 0, fair=FAIR)))
each("append", "a step of 512 jobs with log probabilities", 5)
each("claim", "all that a call may", call=claimed(ALL_ROOM))
each("claim", "no waiting job fits", call=claimed(rooms(MAX_CLAIM, 1)))
each("claim", "for tenants below their share of a full worker", 5, BELOW_SHARE)


@case("claim", "past waiting jobs that have expired")
async def _(crowd: CrowdedRedis) -> Calls:
    for _ in range(3):
        for job in await crowd.submit_many(256, "", URGENT):
            await crowd.functions.reprioritise(job.id, job.tenant, deadline_s=0)
        yield claim(crowd, rooms=ALL_ROOM)
        await crowd.sweep()


@case("claim", "past jobs whose sessions another worker holds")
async def _(crowd: CrowdedRedis) -> Calls:
    named = {"fields": {"session": "s", "num_prompt": 2_000}}
    for tenant in TENANTS[-8:]:
        await crowd.submit_many(1, tenant, URGENT, **named)
    args: dict[str, Any] = {"lease_s": LEASE_S, "max_jobs": 8, "max_tokens": 10**9}
    await crowd.functions.claim(WORKERS[9], MODEL, [URGENT], prompt_token_s=1e-3, **args)
    for tenant in TENANTS[-8:]:
        await crowd.submit_many(16, tenant, URGENT, **named)
    for _ in range(5):
        yield claim(crowd, rooms=ALL_ROOM)


@case("claim", "past returned jobs of a tenant that is paused")
async def _(crowd: CrowdedRedis) -> Calls:
    held = await crowd.running(256, TENANTS[-1])
    await crowd.functions.release(HOLDER, [Release(h.job.id, h.epoch, "drain") for h in held])
    line = PauseLine(lane=URGENT, tenant=TENANTS[-1])
    await crowd.pauses.pause(line, "operator")
    for _ in range(15):
        yield claim(crowd, rooms=ALL_ROOM)
    await crowd.pauses.resume(line, "operator")
    for held_job in held:
        await crowd.functions.cancel(held_job.job.id, TENANTS[-1])


@case("mine", "a lost claim of a worker with 512 jobs")
async def _(crowd: CrowdedRedis) -> Calls:
    known = [each.job.id for each in (*crowd.held, *crowd.long)]
    found = await crowd.running(MAX_CLAIM)
    for _ in range(5):
        yield crowd.functions.mine(HOLDER, known, lease_s=LEASE_S)
    await crowd.finish(found)


@case("append", "the first output of 256 jobs, with marks")
async def _(crowd: CrowdedRedis) -> Calls:
    for _ in range(3):
        held = await crowd.running(256, num_steps=0)
        marks = (JobMark("prefill", 300, 10, 2, 2_000),)
        items = crowd.items(held, marks=marks)
        yield crowd.functions.append(HOLDER, items, lease_s=LEASE_S)
        await crowd.finish(held)


@case("append", "a step of 256 jobs, each of which posts its progress")
async def _(crowd: CrowdedRedis) -> Calls:
    held = await crowd.running(256, callback=crowd.callback(3, progress_tokens=1))
    for _ in range(3):
        yield crowd.run(held, 1)
    await crowd.finish(held)


@case("append", "the ends of eight long answers")
async def _(crowd: CrowdedRedis) -> Calls:
    for _ in range(3):
        ended = crowd.take_long(MAX_ENDS)
        items = crowd.items(ended, fin=JobStatus.SUCCEEDED)
        yield crowd.functions.append(HOLDER, items, lease_s=LEASE_S)


@case("heartbeat", "of a worker with 512 jobs")
async def _(crowd: CrowdedRedis) -> Calls:
    held = [(each.job.id, each.epoch) for each in (*crowd.held, *crowd.long)]
    series = [f"{name}:{lane}:{n}" for name in "ab" for lane in SERVED for n in range(10)]
    for n in range(1, 6):
        counted = dict.fromkeys(series, n)
        yield crowd.report(HOLDER, {"batching": "bea6cb1e"}, held, counted=counted)


each("drain", "64 workers")


@case("release", "the 256 jobs of a worker that drains")
async def _(crowd: CrowdedRedis) -> Calls:
    for _ in range(3):
        held = await crowd.running(256)
        items = [Release(each.job.id, each.epoch, "drain") for each in held]
        yield crowd.functions.release(HOLDER, items)
        await crowd.finish(await crowd.claimed(256))


@case("blame", "the 256 jobs of a lost engine")
async def _(crowd: CrowdedRedis) -> Calls:
    for max_crashes in (9, 1):
        held = await crowd.running(256)
        items = [Blame(each.job.id, each.epoch, POISON) for each in held]
        yield crowd.functions.blame(HOLDER, items, max_crashes=max_crashes)
        if max_crashes > 1:
            await crowd.finish(await crowd.claimed(256))


@case("blame", "a job with a long answer, for the last time")
async def _(crowd: CrowdedRedis) -> Calls:
    for held in crowd.take_long(3):
        blamed = Blame(held.job.id, held.epoch, POISON)
        yield crowd.functions.blame(HOLDER, [blamed], max_crashes=1)


# --- what becomes due


@case("sweep", "200 lapsed leases")
async def _(crowd: CrowdedRedis) -> Calls:
    for _ in range(3):
        await crowd.running(200, lease_s=0)
        yield crowd.functions.sweep()
        await crowd.sweep()
        await crowd.finish(await crowd.claimed(200))


@case("sweep", "200 expired jobs")
async def _(crowd: CrowdedRedis) -> Calls:
    for _ in range(3):
        for held in await crowd.running(200):
            await crowd.functions.reprioritise(held.job.id, held.job.tenant, deadline_s=0)
        yield crowd.functions.sweep()
        await crowd.sweep()


@case("sweep", "expired jobs with long answers")
async def _(crowd: CrowdedRedis) -> Calls:
    for _ in range(2):
        for held in crowd.take_long(4):
            await crowd.functions.reprioritise(held.job.id, held.job.tenant, deadline_s=0)
        yield crowd.functions.sweep()


@case("sweep", "200 jobs that nobody waits for")
async def _(crowd: CrowdedRedis) -> Calls:
    for _ in range(3):
        await waiting(200, attendance_s=0.001)(crowd)
        yield crowd.functions.sweep()
        await crowd.sweep()


@case("sweep", "200 jobs whose start has come")
async def _(crowd: CrowdedRedis) -> Calls:
    for _ in range(3):
        for job in await waiting(200, start_at_s=LATER_S)(crowd):
            member = f"{await crowd.created_ms(job.id):015} {job.id}"
            await crowd.client.zadd(crowd.keys.of("later"), {member: 0})
        yield crowd.functions.sweep()
        await crowd.sweep()


@case("sweep", "200 jobs after their retention")
async def _(crowd: CrowdedRedis) -> Calls:
    for _ in range(3):
        for job in await waiting(200, retention_s=0.001)(crowd):
            await crowd.functions.cancel(job.id, job.tenant)
        yield crowd.functions.sweep()
        await crowd.sweep()


@case("sweep", "the first after a restart of Redis")
async def _(crowd: CrowdedRedis) -> Calls:
    for key in ("leases", "attended"):  # all are to lapse within the grace
        name = crowd.keys.of(key)
        await crowd.client.zunionstore(name, {name: 0.0})
    for n in range(3):
        await crowd.client.set(crowd.keys.of("runid"), f"{n:040} 0")
        yield crowd.functions.sweep()
    await crowd.functions.attend(crowd.attended)
    held = [(each.job.id, each.epoch) for each in (*crowd.held, *crowd.long)]
    await crowd.report(HOLDER, {"batching": "bea6cb1e"}, held)


@case("submit", "that forgets results of long answers, for memory")
async def _(crowd: CrowdedRedis) -> Calls:
    [old] = crowd.take_ended(1)
    jobs = await crowd.submit_many(64, "", LANES[0], is_ephemeral=True)
    for each in jobs:
        await crowd.functions.cancel(each.id, each.tenant)
    log: Any = await crowd.client.dump(crowd.keys.of("log", old.id))
    await at_once(
        crowd.client.restore(crowd.keys.of("log", each.id), 0, log, replace=True) for each in jobs
    )
    passing = crowd.keys.of("stored", "passing", LANES[0])
    await crowd.client.zunionstore(passing, {passing: 0.0})  # they ended long ago
    used = (await crowd.client.info("memory"))["used_memory"]
    await crowd.client.config_set("maxmemory", int(used * 1.05))
    for _ in range(12):
        await crowd.client.delete(crowd.keys.of("memory"))
        yield refused(crowd.submit(crowd.job(TENANTS[1], LANES[0])))
    await crowd.client.config_set("maxmemory", 8 * 2**30)
    await crowd.client.delete(crowd.keys.of("memory"))


# --- callbacks

each("outbox_take", "messages of 256 tenants", 4)
each("outbox_start", "an attempt", lambda c: take_some(c, 5))
each("outbox_dead", "a page")
each("outbox_replay", "a dead letter", lambda c: c.outbox.dead(BIG, limit=5))


@case("outbox_done", "a letter that is dead")
async def _(crowd: CrowdedRedis) -> Calls:
    for taken in await take_some(crowd, 5):
        await crowd.outbox.start(taken, lease_s=LEASE_S)
        yield crowd.outbox.done(taken, "dead", note="status 500")


@case("outbox_take", "of ten tenants, each with a hundred servers that are all busy")
async def _(crowd: CrowdedRedis) -> Calls:
    tenants, terms = TENANTS[100:110], {"max_messages": 32, "max_per_target": 1}
    for _ in range(3):
        await at_once(crowd.post(tenant, to) for tenant in tenants for to in range(100))
        yield crowd.outbox.take(lease_s=LEASE_S, **terms)
        while await crowd.outbox.take(lease_s=LEASE_S, **terms):
            pass


# --- operations

each("operation_add", "with 524 open ones", tenants(5))


@case("operation_take", "the last that is free")
async def _(crowd: CrowdedRedis) -> Calls:
    while await crowd.operations.take("held", lease_s=LEASE_S) is not None:
        pass
    for n in range(5):
        yield crowd.operations.take(f"token-{n}", lease_s=LEASE_S)


def stepped(what: str, wanted: Wanted, kind: OperationKind, num: int = 3) -> None:
    @case("operation_step", what)
    async def _(crowd: CrowdedRedis) -> Calls:
        operation_id = await crowd.add_operation(BIG, wanted, kind)
        await crowd.operations.take("t", lease_s=LEASE_S, only=operation_id)
        for _ in range(num):
            yield crowd.operations.step(operation_id, "t", lease_s=LEASE_S)
        await crowd.operations.stop(operation_id)


WAITING = Wanted(metadata={"team": "a"}, statuses=frozenset([JobStatus.QUEUED]))
stepped("cancels waiting jobs of a tenant", WAITING, OperationKind.CANCEL)
stepped("finds no job that it is for", NONE, OperationKind.CANCEL, num=1)
stepped("replays callbacks", Wanted(), OperationKind.REPLAY_CALLBACKS)
each(
    "operation_stop",
    "an open one",
    lambda c: at_once(c.add_operation(tenant, Wanted()) for tenant in TENANTS[20:25]),
)

# --- files and batches

each("file_begin", "a file")
each("file_add", "a file", 5)
each("file_read", "a page of 500")
each("file_drop", "a file", lambda c: at_once(c.add_file(BIG) for _ in range(5)))
each("batch_add", "with 602 open ones", tenants(5))
each("batch_take", "batches to check", 5)
each("batch_cancel", "a batch", lambda c: at_once(c.add_batch(BIG) for _ in range(5)))
each("batch_move", "a batch", lambda c: at_once(c.add_batch("another", LATER_S) for _ in range(5)))


@case("objects_due", "a page")
async def _(crowd: CrowdedRedis) -> Calls:
    await at_once(crowd.add_file(TENANTS[3], lifetime_s=0.001) for _ in range(200))
    for _ in range(5):
        yield crowd.files.due()


@case("batch_save", "a part, then the end, with errors of a thousand lines")
async def _(crowd: CrowdedRedis) -> Calls:
    terms: dict[str, Any] = {"lease_s": LEASE_S}
    [batch_id] = await crowd.batches.take("t", in_progress=False, max_batches=1, **terms)
    part = Part("t", 60, 4, 10**6, 10**4, False, 10**5, 10**5, 0)
    status: Any = BatchStatus.IN_PROGRESS
    for number in range(4):
        yield crowd.batches.save(batch_id, "t", status=status, part=(number, part), **terms)
        status = None
    fields: dict[str, Any] = {"completed": 240, "failed": 16, "errors": b"\x90" * 100_000}
    yield crowd.batches.save(batch_id, "t", status=BatchStatus.FAILED, fields=fields, **terms)


# --- prompts to warm


async def longest(crowd: CrowdedRedis) -> list[Job]:
    """A long prompt of which a worker holds the beginning, for eight calls."""
    job = replace(crowd.job(BIG, LANES[0]), prompt_ids=tuple(range(110_000)))
    mark = prefix_marks(BIG, job.prompt_ids[:64])
    value = f"{int(time.time() / 60)} {WORKERS[9]}"
    await crowd.client.hset(crowd.keys.of("at", MODEL), mapping={mark: value})
    return [job] * 8


def warm(crowd: CrowdedRedis, job: Job) -> Awaitable[bool]:
    return crowd.functions.warm(job, 64, lives_s=60.0)


each("warm", "110,000 tokens", longest, warm)


@case("warm_take", "110,000 tokens")
async def _(crowd: CrowdedRedis) -> Calls:
    for job in await longest(crowd):
        await warm(crowd, job)
    for _ in range(8):
        yield crowd.functions.warm_take(WORKERS[9], MODEL, [BIG, 100, 10] * 8)


# --- pauses

each("pause", "with 100 others", tenants(120))
each("resume", "with 100 others", tenants(120))

# --- the measurement


async def of_an_empty_redis(crowd: CrowdedRedis) -> Calls:
    for _ in range(20):
        yield crowd.submit(crowd.job(BIG, LANES[0]))


SUBMIT = Case("submit", "of an empty Redis", of_an_empty_redis)


async def opened(server: EmbeddedRedis) -> CrowdedRedis:
    crowd = CrowdedRedis(server)
    await crowd.client.function_load(library_source())  # without the clock that tests set
    await crowd.client.config_set("auto-aof-rewrite-percentage", 0)  # it forks
    return crowd


async def cost_ms(crowd: CrowdedRedis, case: Case) -> tuple[float, float]:
    """The median and the least of the case's calls, less the median of a PING; where a call takes
    several of Redis, those of the longest. The calls of a case do the same: what one takes beyond
    the least, other programs have added, which share caches and cores."""
    crowd.meter.is_on = True
    crowd.meter.spent.clear()
    for _ in range(20):
        await crowd.client.ping()
    ping_ns, parts = median(crowd.meter.spent["PING"]), list[list[int]]()
    crowd.meter.is_on = False
    async for call in case.calls(crowd):
        crowd.meter.spent.clear()
        crowd.meter.is_on = True
        await call
        crowd.meter.is_on = False
        parts.append(crowd.meter.spent[case.function])
    by_part = zip_longest(*parts)
    found = [[ns for ns in part if ns is not None] for part in by_part]
    longest = max(found, key=median)
    return (median(longest) - ping_ns) / 1e6, (min(longest) - ping_ns) / 1e6


async def test_no_function_takes_redis_long(capsys: pytest.CaptureFixture[str]) -> None:
    functions = {path.stem for path in LUA.glob("[a-z]*.lua")}
    assert functions == {each.function for each in CASES}

    rows = list[tuple[Case, float, float, float]]()
    with EmbeddedRedis() as empty_server, EmbeddedRedis(max_memory_bytes=8 * 2**30) as server:
        empty, crowd = await opened(empty_server), await opened(server)
        await crowd.fill(num_long=40, num_ended=8)
        for each in CASES:
            await crowd.report_workers()
            submit_ms, _ = await cost_ms(empty, SUBMIT)  # at the same time: other programs run, too
            rows.append((each, *await cost_ms(crowd, each), submit_ms))
        await empty.aclose()
        await crowd.aclose()

    lines = [
        f"{case.function:16}{case.what:64}{ms:9.3f}{least_ms:9.3f}{ms / submit_ms:8.1f}"
        for case, ms, least_ms, submit_ms in rows
    ]
    with capsys.disabled():
        submit_ms = median(row[3] for row in rows)
        print(f"\nms, least, times submit of an empty Redis ({submit_ms:.3f} ms)", *lines, sep="\n")
    over = [
        line
        for line, (_, _, least_ms, submit_ms) in zip(lines, rows, strict=True)
        if least_ms > max(MAX_MS, MAX_TIMES * submit_ms)
    ]
    assert over == []
