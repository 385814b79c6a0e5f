"""The gateway's side of processes for untrusted input; see child.py.

A chat template or a grammar may need unlimited time or memory. In a process of its own, that fails
one request only. Reasons and costs: docs/decisions/template-process.md.
"""

import asyncio
import ctypes
import hashlib
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, Process, create_subprocess_exec
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
from cachetools import TTLCache

from gateway.child import REPLY_HEAD, REQUEST_HEAD, Refused, Reply
from gateway.confinement import hide_memory
from gateway.turns import Busy, Owner, Turns, turn

_MAX_REPLY_BYTES = 4 * 4 * 1024 * 1024  # four for each character that a template may write
_PIECE_BYTES = 256 * 1024  # of a request; between them other tasks run
_NICENESS = 10
_LIBC = ctypes.CDLL(None)
_MAX_IDLE, _MAX_GIVEN_WAY = 2, 1
_NUM_TRIES = 2  # of a request that ends its process
# Runs a module as `-m` does, with the search path that follows its name.
_RUN = (
    "import runpy, sys; _, module, *sys.path = sys.argv; "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)
_MAX_DEATHS, _DEATHS_S = 1024, 300.0  # requests that are remembered, and for how long


class ChildLimits(msgspec.Struct, frozen=True):
    """Limits of a process. `cpu_s` and `wall_s` apply to each request, and to the start. A request
    that takes `wall_s` without using `cpu_s` shows that the machine is busy."""

    max_memory_bytes: int = 256 * 2**20  # of address space, with the interpreter
    cpu_s: int = 2
    wall_s: float = 8.0
    long_s: float = 0.05  # of a request's processor time; then its process gives way to others


class ChildFailed(Exception):
    """The process died during this request, or could not start. The message is the reason."""


class ChildUnreadable(Exception):
    """The process cannot use its start message."""


def encoded(request: Any) -> bytes:
    """Raises ChildFailed."""
    try:
        return msgspec.json.encode(request)
    except UnicodeEncodeError:
        raise ChildFailed("it has half of a surrogate pair") from None


class ChildPool:
    """Processes that answer the same kind of request, started when the first request comes. Each
    answers one request at a time, when its owner's turn comes (turns.py). If a request uses much
    processor time, its process gets a lower priority, and spare processes start. A request that
    ended two processes is refused for some minutes."""

    def __init__(self, module: str, start: Mapping[str, Any], limits: ChildLimits) -> None:
        """`start` is passed to the module's `prepare`."""
        self._module = module
        self._limits = limits
        self._start_message = msgspec.json.encode(
            {
                **start,
                "max_memory_bytes": limits.max_memory_bytes,
                "cpu_s": limits.cpu_s,
                "time_zone": os.environ.get("TZ"),
            }
        )
        self._turns = Turns(2)  # of requests without an owner
        self._idle: list[_Child] = []
        self._given_way: list[_Child] = []  # idle, too
        self._starting: asyncio.Task[None] | None = None
        self._deaths: TTLCache[bytes, tuple[int, str]] = TTLCache(_MAX_DEATHS, _DEATHS_S)
        self._is_unreadable = False
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The id of the process that answers next; None if there is none."""
        return self._idle[-1].process.pid if self._idle else None

    async def ask(self, request: Any) -> str:
        """Raises Refused, ChildFailed, ChildUnreadable, Busy."""
        raw = encoded(request)
        digest = hashlib.sha256(raw).digest()
        num_deaths, reason = self._deaths.get(digest, (0, ""))
        if num_deaths >= _NUM_TRIES:
            raise ChildFailed(reason)
        async with turn(self._turns) as owner:
            child = await self._taken(owner)
            try:
                return await self._answer(child, raw)
            except ChildFailed as failure:
                self._deaths[digest] = num_deaths + 1, str(failure)
                raise

    async def aclose(self) -> None:
        """Ends the processes, at once or after their current requests. A later request starts
        one."""
        self._is_closed = True
        if self._starting is not None:
            await asyncio.wait([self._starting])
        for idle in (self._idle, self._given_way):
            while idle:
                await idle.pop().end()

    async def _answer(self, child: "_Child", raw: bytes) -> str:
        self._watch(child, child.processor_s() + self._limits.long_s)
        try:
            kind, text = await self._ask(child, raw)
        except BaseException:
            # The reply would otherwise be taken for that of the next request.
            await child.end()
            raise
        finally:
            child.watch.cancel()
        if kind not in (Reply.DONE, Reply.REFUSED):
            await child.end()
            raise ChildFailed("it needs too much memory")
        idle, most = self._idle, _MAX_IDLE
        if child.has_given_way:
            idle, most = self._given_way, _MAX_GIVEN_WAY
        if self._is_closed or len(idle) >= most:
            await child.end()
        else:
            idle.append(child)
        if kind is Reply.REFUSED:
            raise Refused(text)
        return text

    async def _taken(self, owner: Owner) -> "_Child":
        """Marks a ready process as busy. Raises ChildFailed, ChildUnreadable, Busy."""
        while True:
            while idle := (not owner.is_attended and self._given_way) or self._idle:
                child = idle.pop()
                if not child.reader.at_eof():
                    return child
                await child.end()
            await asyncio.shield(self._started())  # a process is not left half started

    def _watch(self, child: "_Child", until_s: float) -> None:
        """Lowers the priority of a request that takes long: by its process's time, because on busy
        cores all take long by the clock. Spare processes answer the others; there are several,
        because another request may take long, too."""
        if child.processor_s() < until_s:
            later = asyncio.get_running_loop().call_later
            child.watch = later(self._limits.long_s, self._watch, child, until_s)
            return
        child.give_way()
        self._keep_spares()

    def _keep_spares(self) -> None:
        def go_on(start: asyncio.Task[None]) -> None:
            if not start.cancelled() and start.exception() is None:
                self._keep_spares()

        if len(self._idle) < _MAX_IDLE and not self._is_closed:
            self._started().add_done_callback(go_on)

    def _started(self) -> asyncio.Task[None]:
        """Returns the task that starts a process; starts it if there is none."""
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._starting

    async def _start(self) -> None:
        """Starts a process, which reads its start message. Raises ChildFailed, ChildUnreadable,
        Busy."""
        if self._is_unreadable:
            raise ChildUnreadable
        try:
            child = await _Child.start(self._module)
        except OSError as exc:
            raise ChildFailed(f"its process cannot start ({type(exc).__name__})") from exc
        try:
            kind, _ = await self._ask(child, self._start_message)
            if kind is not Reply.READY:
                self._is_unreadable = True
                raise ChildUnreadable
        except BaseException:
            await child.end()
            raise
        self._idle.append(child)

    async def _ask(self, child: "_Child", raw: bytes) -> tuple[Reply, str]:
        """Raises ChildFailed, Busy."""
        try:
            async with asyncio.timeout(self._limits.wall_s):
                return await child.ask(raw)
        except TimeoutError:
            raise Busy(self._limits.wall_s) from None
        except (OSError, asyncio.IncompleteReadError, ValueError):
            await child.end()
            is_long = child.process.returncode == -signal.SIGXCPU
            raise ChildFailed("it takes too long" if is_long else "its process ended") from None


class _Child:
    """The process and the gateway's end of the socket pair. The gateway's end closes when the
    gateway dies, which ends the process."""

    def __init__(
        self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self.has_given_way = False  # for good: a lowered priority cannot be raised again
        self.watch: asyncio.TimerHandle
        self.reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, module: str) -> "_Child":
        """Raises OSError."""
        hide_memory()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await create_subprocess_exec(
                    *(sys.executable, "-I", "-S", "-c", _RUN, module),
                    *map(os.path.abspath, sys.path),
                    stdin=theirs.fileno(),
                    stdout=DEVNULL,
                    stderr=DEVNULL,  # a traceback could quote a message
                    env=_environment(),
                )
            return cls(process, *await asyncio.open_connection(sock=ours))
        except BaseException:
            ours.close()  # this ends the process
            raise

    async def ask(self, raw: bytes) -> tuple[Reply, str]:
        """Sends a request, and returns the kind and text of the reply. Raises OSError,
        IncompleteReadError if the process ends, and ValueError for a malformed reply."""
        self._writer.write(REQUEST_HEAD.pack(len(raw)))
        for start in range(0, len(raw), _PIECE_BYTES):
            self._writer.write(raw[start : start + _PIECE_BYTES])
            await self._writer.drain()
        kind, num_bytes = REPLY_HEAD.unpack(await self.reader.readexactly(REPLY_HEAD.size))
        if num_bytes > _MAX_REPLY_BYTES:
            raise ValueError("the reply is too long")
        return Reply(kind), (await self.reader.readexactly(num_bytes)).decode()

    def processor_s(self) -> float:
        """The processor time so far, or the clock's where the system does not tell it (macOS)."""
        find, clock = getattr(_LIBC, "clock_getcpuclockid", None), ctypes.c_int()
        with suppress(OSError):  # it has ended
            if find is not None and not find(self.process.pid, ctypes.byref(clock)):
                return time.clock_gettime(clock.value)
        return time.monotonic()

    def give_way(self) -> None:
        """Lowers the priority of the process."""
        self.has_given_way = True
        with suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, self.process.pid, _NICENESS)

    async def end(self) -> None:
        if self.process.returncode is None:
            # `Process.kill` could reap a process that has just ended, and lose its status.
            with suppress(ProcessLookupError):  # it has ended, but asyncio does not know yet
                os.kill(self.process.pid, signal.SIGKILL)
        self._writer.transport.abort()
        await self.process.wait()


def _environment() -> dict[str, str]:
    """Empty, unless Python finds its own libraries by a variable, as on Lambda."""
    name = "LD_LIBRARY_PATH"
    return {name: os.environ[name]} if name in os.environ else {}
