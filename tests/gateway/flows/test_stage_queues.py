"""Stages of a pipeline: calls of several jobs wait for each other, and none waits for ever."""

import asyncio

import pytest

from gateway.runners.flows.stage_queues import StagedJob, StageQueues

pytestmark = pytest.mark.anyio


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def turns(*staged_jobs: StagedJob, stage: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(staged_job.wait_turn(stage, "a")) for staged_job in staged_jobs]
    await asyncio.sleep(0)
    return tasks


async def test_a_job_alone_never_waits() -> None:
    """Nothing is before it that could join."""
    with StageQueues(2, Clock(), ()).staged_job("t", 1.0) as staged_job:
        await staged_job.wait_turn(0, "a")
        staged_job.ended()
        await staged_job.wait_turn(1, "a")


async def test_calls_of_a_later_stage_wait_for_those_before_them() -> None:
    """Until the batch is full, or until nothing before them can join it."""
    clock = Clock()
    stages = StageQueues(2, clock, ())
    with stages.staged_job("t", 1.0) as warm:
        for stage in (0, 1):  # a batch of one takes 10 s
            await warm.wait_turn(stage, "a")
            clock.now_s += 10.0
            warm.ended()
    with stages.staged_job("t", 1.0) as first, stages.staged_job("t", 1.0) as second:
        await turns(first, second, stage=0)
        first.ended()
        [waiting] = await turns(first, stage=1)
        assert not waiting.done(), "the second may join"
        second.ended()
        [joined] = await turns(second, stage=1)
        await asyncio.gather(waiting, joined)


async def test_a_job_that_leaves_holds_nobody() -> None:
    """Its place before the others is empty then."""
    clock = Clock()
    stages = StageQueues(2, clock, ())
    with stages.staged_job("t", 1.0) as first:
        await first.wait_turn(0, "a")
        clock.now_s += 10.0
        first.ended()
        await first.wait_turn(1, "a")
        clock.now_s += 10.0
        first.ended()
        with stages.staged_job("t", 1.0) as second:
            await second.wait_turn(0, "a")
            [waiting] = await turns(first, stage=1)
            assert not waiting.done()
        await waiting


async def test_a_slow_stage_holds_back_those_before_it() -> None:
    """At most two of its best batches run, of about ten calls, and not all of 300 jobs."""
    clock, num_jobs, most = Clock(), 300, [0, 0, 0]
    stages = StageQueues(3, clock, ())
    called: list[set[StagedJob]] = [set(), set(), set()]
    answered = asyncio.Queue[None]()
    release = [asyncio.Event() for _ in range(3)]

    async def run() -> None:
        with stages.staged_job("t", 1.0) as staged_job:
            for stage in range(3):
                await staged_job.wait_turn(stage, "a")
                called[stage].add(staged_job)
                most[stage] = max(most[stage], len(called[stage]))
                await release[stage].wait()
                called[stage].remove(staged_job)
                staged_job.ended()
        answered.put_nowait(None)

    async def answer(stage: int, seconds: float) -> None:
        """All calls of a stage, which take so long in all."""
        clock.now_s += seconds
        release[stage].set()
        release[stage] = asyncio.Event()
        await settled()

    async def settled() -> None:
        for _ in range(5 * num_jobs // 10):
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(run()) for _ in range(num_jobs)]
    await settled()
    while answered.qsize() < num_jobs:
        for stage in (0, 1, 0, 1):
            await answer(stage, 0.0)  # in no time: their best sizes grow
        await answer(2, 0.02 + 0.01 * len(called[2]))
    await asyncio.gather(*tasks)
    assert most[2] <= 2 * 16
    assert max(most) < num_jobs / 2


async def test_tenants_take_turns_by_weight_within_the_most_urgent_lane() -> None:
    """Of jobs that came tenant by tenant: one tenant's many hold no other up."""
    stages = StageQueues(1, Clock(), ("urgent", "batch"))
    for size in (1, 2):  # twice the calls take twice as long: the best size is 1
        stages._stages[0].batcher.ended(size, float(size))
    begin, sent = asyncio.Event(), list[str]()

    async def run(tenant: str, lane: str, weight: float) -> None:
        with stages.staged_job(tenant, weight) as staged_job:
            await staged_job.wait_turn(0, lane)
            sent.append(tenant)
            await begin.wait()

    first = [("first", "urgent", 1.0)] * 2  # so many may run at once
    many = [("many", "batch", 3.0)] * 60 + [("few", "batch", 1.0)] * 20
    jobs = [*first, *many, ("urgent", "urgent", 1.0)]
    tasks = [asyncio.create_task(run(*job)) for job in jobs]
    for _ in range(3):
        await asyncio.sleep(0)
    assert sent == ["first"] * 2
    begin.set()
    await asyncio.gather(*tasks)
    assert sent[2] == "urgent"
    shares = [sent[3:][start : start + 20].count("few") for start in range(0, 80, 20)]
    assert all(4 <= share <= 6 for share in shares)
