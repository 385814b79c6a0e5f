"""Runs child processes: shows their output, and restarts those that have ended.

A part is given up after a few quick failures, or if a restart would not help. If others can do
without it, it is tried again, at growing intervals and for ever.

Children notice that their parent has ended, even by SIGKILL: it holds the only write end of a pipe,
and they hold the read end, which then reaches its end.
"""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NoReturn, TextIO

_COLOURS = (36, 33, 35, 32, 34)  # cyan, yellow, magenta, green, blue
_NAME_WIDTH = len("batchway")


class Console:
    """Prints `name | line`, coloured on a terminal unless NO_COLOR is set."""

    def __init__(self, stream: TextIO, environ: Mapping[str, str] = os.environ) -> None:
        self._stream = stream
        self._is_coloured = stream.isatty() and not environ.get("NO_COLOR")
        self._colours: dict[str, int] = {}
        self._is_read = True

    def line(self, name: str, text: str) -> None:
        """Prints one line; a closed output is ignored."""
        if not self._is_read:
            return
        try:
            self._stream.write(f"{self._prefix(name)} {text}\n")
            self._stream.flush()
        except (OSError, ValueError):  # a closed pipe, a closed terminal, a closed file
            self._is_read = False

    def _prefix(self, name: str) -> str:
        prefix = f"{name:<{_NAME_WIDTH}} |"
        if not self._is_coloured:
            return prefix
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        return f"\x1b[{colour}m{prefix}\x1b[0m"


_POLL_S = 0.05
_READ_BYTES = 2**16
_OUTPUT_GRACE_S = 1.0  # for the last output of a child that has ended


@dataclass(eq=False)
class Child:
    """A process in its own session, so that a terminal's Ctrl-C does not reach it."""

    name: str
    _command: Sequence[str]
    _environ: Mapping[str, str]
    _console: Console
    _: KW_ONLY
    pass_fds: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output: asyncio.Task[None] | None = None
        self.last_line = ""  # of its output

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the process; its output is shown as it comes."""
        assert not self.is_running, "started twice"
        read_fd, write_fd = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                self._command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                pass_fds=self.pass_fds,
                start_new_session=True,
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        self._output = asyncio.create_task(self._show_output(read_fd))

    async def wait(self) -> int:
        """Returns the exit status (negative for a signal) after its last output."""
        assert self._process is not None, "not started"
        assert self._output is not None
        # Polling is the only portable way without threads or signals.
        while (status := self._process.poll()) is None:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        await asyncio.wait([self._output], timeout=_OUTPUT_GRACE_S)
        self._output.cancel()
        await asyncio.wait([self._output])
        return status

    async def stop(self, budget_s: float) -> None:
        """Sends SIGTERM, and SIGKILL when the budget is spent."""
        if not self.is_running:
            return
        os.kill(self.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(budget_s):
                await self.wait()
        except TimeoutError:
            self._console.line("batchway", f"{self.name} did not end in {budget_s:.0f} s: killed")
            self.kill()
            await self.wait()

    def kill(self) -> None:
        """Sends SIGKILL to the process and its own children."""
        if self.is_running:
            # macOS reports a group that has just ended as "not permitted".
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _show_output(self, read_fd: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb", buffering=0)
        )
        try:
            unfinished = b""
            while data := await reader.read(_READ_BYTES):
                *lines, unfinished = (unfinished + data).split(b"\n")
                for line in lines:
                    self._show(line)
            if unfinished:
                self._show(unfinished)
        finally:
            transport.close()

    def _show(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self.last_line = text.strip() or self.last_line
        self._console.line(self.name, text)


# --- restarts -----------------------------------------------------------------------------------

EXIT_USAGE = 2  # options that cannot work
EXIT_REFUSED = 3  # a model that cannot be served
_FINAL_STATUSES = frozenset({EXIT_USAGE, EXIT_REFUSED})  # a restart would not help

_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_TRIES_S = (15.0, 30.0, 60.0, 120.0, 300.0)  # between tries of a part that was given up
_JITTER = 0.2  # of such a pause: parts that ended together do not start together
_HEALTHY_AFTER_S = 60.0


class PartEnded(Exception):
    """A part has ended and will not be restarted. The message is one sentence."""


class Restarts:
    """Growing pauses between quick failures, and a limit on their number. `draw` returns random
    numbers from 0 to 1."""

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        self._draw = draw
        self._num_quick = 0
        self._num_tries = 0

    def next_pause_s(self, lived_s: float) -> float | None:
        """The pause before the next start; None after too many failures."""
        if lived_s >= _HEALTHY_AFTER_S:
            self._num_quick = self._num_tries = 0
        if self._num_quick >= len(_PAUSES_S):
            return None
        self._num_quick += 1
        return _PAUSES_S[self._num_quick - 1]

    def next_try_s(self) -> float:
        """The pause before the next try of a part that was given up."""
        pause_s = _TRIES_S[min(self._num_tries, len(_TRIES_S) - 1)]
        self._num_tries += 1
        return pause_s * (1 - _JITTER + 2 * _JITTER * self._draw())


async def _tell_nobody(starts_in_s: float) -> None:
    pass


GiveUp = Callable[[str, float], Awaitable[None]]  # told why, and the seconds until the next try


async def keep_running(
    child: Child,
    console: Console,
    announce: Callable[[float], Awaitable[None]] = _tell_nobody,
    give_up: GiveUp | None = None,
    restarts: Restarts | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> NoReturn:
    """Starts a child and restarts it whenever it ends. `announce` gets, before each start, the
    seconds until it. A part that is given up is told to `give_up`, or PartEnded is raised."""
    restarts = restarts or Restarts()
    await announce(0.0)
    while True:
        started_s = clock()
        child.start()
        status = await child.wait()
        how = describe_status(status)
        pause_s = restarts.next_pause_s(clock() - started_s)
        if status in _FINAL_STATUSES or pause_s is None:
            if give_up is None:
                raise PartEnded(_lost(child.name, status, how))
            pause_s = restarts.next_try_s()
            await give_up(f"{how}: {child.last_line}" if child.last_line else how, pause_s)
        console.line("batchway", f"{child.name} ended with {how}; starts again in {pause_s:.3g} s")
        await announce(pause_s)
        await sleep(pause_s)


@contextlib.asynccontextmanager
async def parts() -> AsyncIterator[asyncio.TaskGroup]:
    """A group of tasks that keep parts running. Raises PartEnded or OSError of the first lost."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as group_of_errors:
        lost = group_of_errors.subgroup((PartEnded, OSError))
        if lost is None:
            raise
        raise lost.exceptions[0] from None


async def kill_all(children: Sequence[Child]) -> None:
    """Kills those that run, and waits for them."""
    running = [child for child in children if child.is_running]
    for child in running:
        child.kill()
    await asyncio.gather(*(child.wait() for child in running))


def _lost(name: str, status: int, how: str) -> str:
    if status in _FINAL_STATUSES:
        return f"{name} cannot run ({how}); its last lines say why"
    return f"{name} ended again and again, at last with {how}: giving up"


def describe_status(status: int) -> str:
    """Describes an exit status as subprocess gives it: negative for a signal."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


LIFELINE_VARIABLE = "BATCHWAY_LIFELINE_FD"  # internal: set by `batchway up` for its children


@contextlib.contextmanager
def lifeline() -> Iterator[int]:
    """Yields the read end for children; this process keeps the write end."""
    read_fd, write_fd = os.pipe()
    try:
        yield read_fd
    finally:
        os.close(write_fd)
        os.close(read_fd)


def end_with_parent(grace_s: float) -> None:
    """Ends this process after its parent: SIGTERM, then SIGKILL after `grace_s`. Does nothing
    without a lifeline."""
    fd = os.environ.pop(LIFELINE_VARIABLE, None)
    if fd is None:
        return
    os.set_inheritable(int(fd), False)
    threading.Thread(
        target=_wait_and_end, args=(int(fd), grace_s), name="lifeline", daemon=True
    ).start()


def _wait_and_end(fd: int, grace_s: float) -> None:
    while os.read(fd, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)
