"""Redis has one thread: while it runs a function, every other call waits. No function takes it
long, however much waits, runs and is kept.

Processor time, not the clock, and as a multiple of the cheapest `submit` on the same machine.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from contract.batches import BatchStatus, Part
from contract.errors import BrokerFull, JobRefused
from contract.function_types import MAX_CLAIM, Blame, FairRoom, JobMark, LaneRoom, Release, Wanted
from contract.jobs import Job, JobStatus
from contract.library import library_source  # before tests set a clock in it
from contract.operations import OperationKind
from contract.pauses import PauseLine
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


class Case(NamedTuple):
    function: str
    what: str
    calls: Callable[[CrowdedRedis], Calls]


CASES: list[Case] = []


def case(function: str, what: str) -> Callable[[Callable[[CrowdedRedis], Calls]], None]:
    """Adds calls of one kind: an iterator prepares each and yields it to be measured."""
    return lambda calls: CASES.append(Case(function, what, calls))


def simple(function: str, what: str, call: Callable[[CrowdedRedis, int], Any]) -> None:
    """Adds fifteen calls without preparations."""

    async def calls(crowd: CrowdedRedis) -> Calls:
        for n in range(15):
            yield call(crowd, n)

    CASES.append(Case(function, what, calls))


async def refused(call: Awaitable[Any]) -> None:
    with pytest.raises((JobRefused, BrokerFull)):
        await call


def new_jobs(crowd: CrowdedRedis, number: int, **fields: Any) -> Iterator[Job]:
    return (crowd.job(TENANTS[n], LANES[n % 2], **fields) for n in range(number))


# --- callers


simple("enter", "counts a call", lambda c, n: c.functions.enter(TENANTS[n], LIMITS))


@case("submit", "with metadata and a callback")
async def _(crowd: CrowdedRedis) -> Calls:
    for job in new_jobs(crowd, 20):
        yield crowd.submit(job, callback=crowd.callback())


@case("submit", "with the longest prompt that is kept in Redis")
async def _(crowd: CrowdedRedis) -> Calls:
    for job in new_jobs(crowd, 5, num_prompt=3_500, tools={f"f{n}": ("a", "b") for n in range(50)}):
        yield crowd.submit(job, callback=crowd.callback())


@case("submit", "refused: the lane is full")
async def _(crowd: CrowdedRedis) -> Calls:
    for job in new_jobs(crowd, 5):
        yield refused(crowd.submit(job, lane_bound_tokens=1_000))


@case("quote", "with metadata and a callback")
async def _(crowd: CrowdedRedis) -> Calls:
    for job in new_jobs(crowd, 5):
        yield crowd.functions.quote(job, crowd.submission(job, callback=crowd.callback()))


async def waiting_jobs(crowd: CrowdedRedis, number: int, **terms: Any) -> list[Job]:
    return await crowd.submit_many(number, "", LANES[1], **terms)


simple("attend", "2,000 followed jobs", lambda c, n: c.functions.attend(c.attended[:2_000]))


@case("reprioritise", "a waiting job: lane and deadline")
async def _(crowd: CrowdedRedis) -> Calls:
    for job in await waiting_jobs(crowd, 5):
        yield crowd.functions.reprioritise(job.id, job.tenant, lane=LANES[0], deadline_s=FOREVER_S)


@case("reprioritise", "a running job: lane and deadline")
async def _(crowd: CrowdedRedis) -> Calls:
    for held in await crowd.running(5):
        job = held.job
        yield crowd.functions.reprioritise(job.id, job.tenant, lane=LANES[0], deadline_s=FOREVER_S)


@case("detach", "a running job")
async def _(crowd: CrowdedRedis) -> Calls:
    for held in await crowd.running(5):
        terms = {"deadline_s": FOREVER_S, "retention_s": FOREVER_S}
        yield crowd.functions.detach(held.job.id, held.job.tenant, **terms)


@case("cancel", "a waiting job with a callback")
async def _(crowd: CrowdedRedis) -> Calls:
    for job in await waiting_jobs(crowd, 5, callback=crowd.callback()):
        yield crowd.functions.cancel(job.id, job.tenant)


@case("cancel", "a running job with a long answer")
async def _(crowd: CrowdedRedis) -> Calls:
    for held in crowd.take_long(3):
        yield crowd.functions.cancel(held.job.id, held.job.tenant)


@case("delete", "a job with a long answer")
async def _(crowd: CrowdedRedis) -> Calls:
    for job in crowd.take_ended(3):
        yield crowd.functions.delete(job.id, job.tenant)


@case("read", "500 events of a long answer that runs")
async def _(crowd: CrowdedRedis) -> Calls:
    for after in (0, 3_000, 6_000):
        job = crowd.long[0].job
        yield crowd.functions.read(job.id, job.tenant, after=after, max_events=500)


@case("read", "500 events of a long answer that has ended")
async def _(crowd: CrowdedRedis) -> Calls:
    for after in (0, 3_000, 6_000):
        job = crowd.ended[0]
        yield crowd.functions.read(job.id, job.tenant, after=after, max_events=500)


@case("read", "the place of a job that waits")
async def _(crowd: CrowdedRedis) -> Calls:
    for job in await waiting_jobs(crowd, 5):
        yield crowd.functions.read(job.id, job.tenant, after=0, max_events=500)


# Their filters admit all, or nothing but what was looked at.
ALL, NONE = Wanted(model=MODEL), Wanted(metadata={"team": "another"})
simple("list", "100 jobs of a tenant", lambda c, n: c.functions.list_jobs(BIG, ALL, max_jobs=100))
simple("list", "no match of a tenant", lambda c, n: c.functions.list_jobs(BIG, NONE, max_jobs=100))
simple("list", "100 jobs of all", lambda c, n: c.functions.list_jobs("", ALL, max_jobs=100))
simple("list", "no match of all", lambda c, n: c.functions.list_jobs("", NONE, max_jobs=100))


@case("list", "100 jobs of all, from the middle")
async def _(crowd: CrowdedRedis) -> Calls:
    for job_id in crowd.attended[1_000:1_003]:
        yield crowd.functions.list_jobs("", ALL, after=job_id, max_jobs=100)


simple("snapshot", "five lanes", lambda c, n: c.functions.snapshot(MODEL, SERVED))
simple("watch", "five lanes", lambda c, n: c.functions.watch(MODEL, SERVED))


# --- workers


async def claim(crowd: CrowdedRedis, **terms: Any) -> None:
    fields: dict[str, Any] = {
        "lease_s": LEASE_S,
        "max_jobs": 0,
        "max_tokens": 0,
        "config_version": "bea6cb1e",
        "min_shares": {"batch": 0.05, "scoring": 0.1},
    }
    await crowd.functions.claim(CLAIMER, MODEL, SERVED, **(fields | terms))


def rooms(max_jobs: int, max_tokens: int) -> dict[str, LaneRoom]:
    return dict.fromkeys(SERVED, LaneRoom(max_jobs, max_tokens))


simple("claim", "all that a call may", lambda c, n: claim(c, rooms=rooms(MAX_CLAIM, 4_000_000)))
simple("claim", "no waiting job fits", lambda c, n: claim(c, rooms=rooms(MAX_CLAIM, 1)))


@case("claim", "for tenants below their share of a full worker")
async def _(crowd: CrowdedRedis) -> Calls:
    held = dict.fromkeys(TENANTS[::2], (1, 2_500))
    fair = LaneRoom(0, 0, fair=FairRoom(256, 4_000_000, held))
    for _ in range(5):
        yield claim(crowd, rooms=dict.fromkeys(LANES, fair))


@case("claim", "past waiting jobs that have expired")
async def _(crowd: CrowdedRedis) -> Calls:
    for _ in range(3):
        for job in await crowd.submit_many(256, "", URGENT):
            await crowd.functions.reprioritise(job.id, job.tenant, deadline_s=0)
        yield claim(crowd, rooms=rooms(MAX_CLAIM, 4_000_000))
        await crowd.sweep()


@case("claim", "past returned jobs of a tenant that is paused")
async def _(crowd: CrowdedRedis) -> Calls:
    held = await crowd.running(256, TENANTS[-1])
    await crowd.functions.release(HOLDER, [Release(h.job.id, h.epoch, "drain") for h in held])
    line = PauseLine(lane=URGENT, tenant=TENANTS[-1])
    await crowd.pauses.pause(line, "operator")
    for _ in range(3):
        yield claim(crowd, rooms=rooms(MAX_CLAIM, 4_000_000))
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


@case("append", "a step of 512 jobs with log probabilities")
async def _(crowd: CrowdedRedis) -> Calls:
    for _ in range(5):
        yield crowd.run((*crowd.held, *crowd.long), 1)


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


simple("drain", "64 workers", lambda c, n: c.functions.drain(WORKERS))


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
        items = [Blame(each.job.id, each.epoch, '{"prompt": "ab12"}') for each in held]
        yield crowd.functions.blame(HOLDER, items, max_crashes=max_crashes)
        if max_crashes > 1:
            await crowd.finish(await crowd.claimed(256))


@case("blame", "a job with a long answer, for the last time")
async def _(crowd: CrowdedRedis) -> Calls:
    for held in crowd.take_long(3):
        blamed = Blame(held.job.id, held.epoch, '{"prompt": "ab12"}')
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
        await waiting_jobs(crowd, 200, attendance_s=0.001)
        yield crowd.functions.sweep()
        await crowd.sweep()


@case("sweep", "200 jobs after their retention")
async def _(crowd: CrowdedRedis) -> Calls:
    for _ in range(3):
        for job in await waiting_jobs(crowd, 200, retention_s=0.001):
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
    for _ in range(3):
        await crowd.client.delete(crowd.keys.of("memory"))
        yield refused(crowd.submit(crowd.job(TENANTS[1], LANES[0])))
    await crowd.client.config_set("maxmemory", 8 * 2**30)
    await crowd.client.delete(crowd.keys.of("memory"))


# --- callbacks


@case("outbox_take", "messages of 256 tenants")
async def _(crowd: CrowdedRedis) -> Calls:
    for _ in range(4):
        yield crowd.taken()


async def take_some(crowd: CrowdedRedis, number: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < number:
        found += await crowd.taken()
    return found[:number]


@case("outbox_start", "an attempt")
async def _(crowd: CrowdedRedis) -> Calls:
    for taken in await take_some(crowd, 5):
        yield crowd.outbox.start(taken, lease_s=LEASE_S)


@case("outbox_done", "a letter that is dead")
async def _(crowd: CrowdedRedis) -> Calls:
    for taken in await take_some(crowd, 5):
        await crowd.outbox.start(taken, lease_s=LEASE_S)
        yield crowd.outbox.done(taken, "dead", note="status 500")


simple("outbox_dead", "a page", lambda c, n: c.outbox.dead(BIG, limit=100))


@case("outbox_replay", "a dead letter")
async def _(crowd: CrowdedRedis) -> Calls:
    for letter in await crowd.outbox.dead(BIG, limit=5):
        yield crowd.outbox.replay(letter.record.job_id, BIG)


@case("outbox_take", "of ten tenants, each with a hundred servers that are all busy")
async def _(crowd: CrowdedRedis) -> Calls:
    tenants, terms = TENANTS[100:110], {"max_messages": 32, "max_per_target": 1}
    for _ in range(3):
        await at_once(crowd.post(tenant, to) for tenant in tenants for to in range(100))
        yield crowd.outbox.take(lease_s=LEASE_S, **terms)
        while await crowd.outbox.take(lease_s=LEASE_S, **terms):
            pass


# --- operations


@case("operation_add", "with 524 open ones")
async def _(crowd: CrowdedRedis) -> Calls:
    for tenant in TENANTS[5:10]:
        yield crowd.add_operation(tenant, Wanted())


@case("operation_take", "the last that is free")
async def _(crowd: CrowdedRedis) -> Calls:
    while await crowd.operations.take("held", lease_s=LEASE_S) is not None:
        pass
    for n in range(5):
        yield crowd.operations.take(f"token-{n}", lease_s=LEASE_S)


async def stepped(
    crowd: CrowdedRedis,
    tenant: str,
    wanted: Wanted,
    kind: OperationKind,
    num: int = 3,
    **terms: Any,
) -> Calls:
    operation_id = await crowd.add_operation(tenant, wanted, kind)
    await crowd.operations.take("t", lease_s=LEASE_S, only=operation_id)
    for _ in range(num):
        yield crowd.operations.step(operation_id, "t", lease_s=LEASE_S, **terms)
    await crowd.operations.stop(operation_id)


@case("operation_step", "cancels waiting jobs of a tenant")
async def _(crowd: CrowdedRedis) -> Calls:
    wanted = Wanted(metadata={"team": "a"}, statuses=frozenset([JobStatus.QUEUED]))
    async for call in stepped(crowd, BIG, wanted, OperationKind.CANCEL):
        yield call


@case("operation_step", "finds no job that it is for")
async def _(crowd: CrowdedRedis) -> Calls:
    async for call in stepped(crowd, BIG, NONE, OperationKind.CANCEL, num=1):
        yield call


@case("operation_step", "replays callbacks")
async def _(crowd: CrowdedRedis) -> Calls:
    async for call in stepped(crowd, BIG, Wanted(), OperationKind.REPLAY_CALLBACKS):
        yield call


@case("operation_stop", "an open one")
async def _(crowd: CrowdedRedis) -> Calls:
    for tenant in TENANTS[20:25]:
        operation_id = await crowd.add_operation(tenant, Wanted())
        yield crowd.operations.stop(operation_id)


# --- files and batches


simple("file_begin", "a file", lambda c, n: c.files.begin(f"file-{n:032}"))


@case("file_add", "a file")
async def _(crowd: CrowdedRedis) -> Calls:
    for _ in range(5):
        yield crowd.add_file(BIG)


simple(
    "file_read",
    "a page of 500",
    lambda c, n: c.files.page(BIG, purpose="", after="", is_oldest_first=True, max_files=500),
)


@case("file_drop", "a file")
async def _(crowd: CrowdedRedis) -> Calls:
    for _ in range(5):
        yield crowd.files.drop(await crowd.add_file(BIG), BIG)


@case("objects_due", "a page")
async def _(crowd: CrowdedRedis) -> Calls:
    await at_once(crowd.add_file(TENANTS[3], lifetime_s=0.001) for _ in range(200))
    for _ in range(5):
        yield crowd.files.due()


@case("batch_add", "with 602 open ones")
async def _(crowd: CrowdedRedis) -> Calls:
    for tenant in TENANTS[5:10]:
        yield crowd.add_batch(tenant)


@case("batch_take", "batches to check")
async def _(crowd: CrowdedRedis) -> Calls:
    for n in range(5):
        token = f"token-{n}"
        yield crowd.batches.take(token, lease_s=LEASE_S, in_progress=False, max_batches=2)


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


@case("batch_cancel", "a batch")
async def _(crowd: CrowdedRedis) -> Calls:
    for tenant in TENANTS[30:35]:
        yield crowd.batches.cancel(await crowd.add_batch(tenant), tenant)


# --- pauses


@case("pause", "with 100 others")
async def _(crowd: CrowdedRedis) -> Calls:
    for tenant in TENANTS[120:125]:
        yield crowd.pauses.pause(PauseLine(model=MODEL, lane=URGENT, tenant=tenant), "tenant")


@case("resume", "with 100 others")
async def _(crowd: CrowdedRedis) -> Calls:
    for tenant in TENANTS[120:125]:
        yield crowd.pauses.resume(PauseLine(model=MODEL, lane=URGENT, tenant=tenant), "tenant")


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
