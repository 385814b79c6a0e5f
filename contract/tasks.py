"""Ends tasks for certain."""

import asyncio

_AGAIN_S = 0.05


async def end(*tasks: asyncio.Task[object] | asyncio.Future[object]) -> None:
    """Cancels tasks and waits until they are done; their results and errors are dropped.

    One cancel is not enough: `asyncio.wait_for` before Python 3.12, which redis-py sends commands
    through, loses it where the send has just ended.
    """
    waiting = set(tasks)
    while waiting:
        for task in waiting:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=_AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()
