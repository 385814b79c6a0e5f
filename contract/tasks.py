"""Ends tasks for certain."""

import asyncio

_CANCEL_AGAIN_S = 0.05


async def end(*tasks: asyncio.Task[object] | asyncio.Future[object]) -> None:
    """Cancels tasks and waits until they are done; drops their results and errors.

    Cancels repeatedly: `asyncio.wait_for` before Python 3.12, through which redis-py sends
    commands, loses a cancellation that arrives as the send ends.
    """
    waiting = set(tasks)
    while waiting:
        for task in waiting:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=_CANCEL_AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()
