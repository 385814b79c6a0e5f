"""When a silent engine hangs, and when it does not."""

import asyncio

import pytest

from workers.supervisor.engine_keeper import Watchdog

pytestmark = pytest.mark.anyio

LIMIT_S = 0.01


async def test_silence_with_work_is_a_hang() -> None:
    async with asyncio.timeout(20):
        await Watchdog(LIMIT_S, lambda: True).engine_hangs()


async def test_an_idle_engine_may_be_silent() -> None:
    """A check without work in between restarts the count."""
    looks = 0

    def has_work() -> bool:
        nonlocal looks
        looks += 1
        return looks % 10 != 0 or looks > 30

    async with asyncio.timeout(20):
        await Watchdog(LIMIT_S, has_work).engine_hangs()
    assert looks == 40


async def test_an_engine_that_sends_messages_does_not_hang() -> None:
    """Each message restarts the count."""
    looks = 0

    def has_work() -> bool:
        nonlocal looks
        looks += 1
        if looks <= 30:
            watchdog.reset()
        return True

    watchdog = Watchdog(LIMIT_S, has_work)
    async with asyncio.timeout(20):
        await watchdog.engine_hangs()
    assert looks == 39
