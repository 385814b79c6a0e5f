"""Runs `batchway up`: signals, order and exit status."""

import asyncio
import contextlib
import signal
import sys

from infra.child import Console, PartLost
from infra.lifeline import lifeline
from infra.local_stack import LocalStack, StackOptions

EXIT_FAILED = 1
EXIT_KILLED = 130  # the shell's status of a process ended by Ctrl-C
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Signals:
    """Records signals: the first requests a drain, the second an immediate end."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.kill = asyncio.Event()

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            # Keep SIGHUP ignored under nohup. Handle SIGINT always: a shell ignores it for any
            # process that it starts in the background.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._receive)

    def _receive(self) -> None:
        (self.kill if self.drain.is_set() else self.drain).set()


async def run_up(options: StackOptions) -> int:
    """Runs the stack until a signal or the loss of a part. Returns the exit status."""
    console = Console(sys.stderr)
    signals = _Signals()
    signals.listen()
    with lifeline() as fd:
        stack = LocalStack(options, console, fd)
        try:
            status = await _serve(stack, signals, console)
        except BaseException:
            await stack.kill()
            raise
        ending = asyncio.create_task(stack.end())
        if await _first(ending, signals.kill):
            console.line("batchway", "everything has ended")
            return status
        console.line("batchway", "second signal: killing the remaining processes")
        await stack.kill()
        return EXIT_KILLED


async def _serve(stack: LocalStack, signals: _Signals, console: Console) -> int:
    serving = asyncio.create_task(stack.serve())
    try:
        await _first(serving, signals.drain)
    except PartLost as lost:
        console.line("batchway", str(lost))
        return EXIT_FAILED
    console.line("batchway", "ending: running requests finish first; Ctrl-C again kills")
    return 0


async def _first(task: asyncio.Task[None], event: asyncio.Event) -> bool:
    """Whether the task ended before the event was set; otherwise cancels the task."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        await task
        return True
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return False
