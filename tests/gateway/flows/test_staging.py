"""Stages of a pipeline: calls of several jobs wait for each other, and none waits for ever."""

import asyncio

import pytest

from gateway.flows.staging import Passage, Staging

pytestmark = pytest.mark.anyio


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def turns(*passages: Passage, stage: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(passage.turn(stage)) for passage in passages]
    await asyncio.sleep(0)
    return tasks


async def test_a_job_alone_never_waits() -> None:
    """Nothing is before it that could join."""
    with Staging(2, Clock()).passage() as passage:
        await passage.turn(0)
        passage.ended()
        await passage.turn(1)


async def test_calls_of_a_later_stage_wait_for_those_before_them() -> None:
    """Until the batch is full, or until nothing before them can join it."""
    clock = Clock()
    staging = Staging(2, clock)
    with staging.passage() as warm:
        for stage in (0, 1):  # a batch of one takes 10 s
            await warm.turn(stage)
            clock.now_s += 10.0
            warm.ended()
    with staging.passage() as first, staging.passage() as second:
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
    staging = Staging(2, clock)
    with staging.passage() as first:
        await first.turn(0)
        clock.now_s += 10.0
        first.ended()
        await first.turn(1)
        clock.now_s += 10.0
        first.ended()
        with staging.passage() as second:
            await second.turn(0)
            [waiting] = await turns(first, stage=1)
            assert not waiting.done()
        await waiting
