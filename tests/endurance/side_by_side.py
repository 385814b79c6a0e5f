"""Concurrent callers that end together."""

import asyncio
from collections.abc import Coroutine

from contract.connection import end_tasks


async def side_by_side(*coroutines: Coroutine[None, None, None]) -> None:
    """Returns once all have ended. If one fails, or the task is cancelled, all are ended for
    certain: a TaskGroup cancels only once, and a cancel can get lost in redis-py."""
    running = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*running)
    finally:
        await end_tasks(*running)
