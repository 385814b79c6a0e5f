"""The gateway's end of a process that computes what callers or models send; see child.py.

A chat template or a grammar may take for ever, or gigabytes: in a process of its own that costs one
request. Why, and what it costs: docs/decisions/template-process.md.
"""

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process, create_subprocess_exec
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from gateway.openai.child import REPLY_HEAD, REQUEST_HEAD, Refused, Reply

_MAX_REPLY_BYTES = 4 * 4 * 1024 * 1024  # four for each character that a template may write
TOO_LONG = "it takes too long"


class ChildLimits(msgspec.Struct, frozen=True):
    """What a process may use. `cpu_s` and `wall_s` are of one request, and of the start; a busy
    machine takes longer than the computing."""

    max_memory_bytes: int = 256 * 2**20  # of address space, the interpreter's included
    cpu_s: int = 2
    wall_s: float = 8.0
    turn_s: float = 10.0  # that a request waits for those before it


class ChildFailed(Exception):
    """The process did not survive this request, or could not start; the message says why."""


class ChildBusy(Exception):
    """Earlier requests keep the process busy."""


class ChildUnreadable(Exception):
    """The process cannot read what it is started with."""


class ChildProcess:
    """Started by the first request; answers one request at a time, in order; started anew after a
    request that ended it."""

    def __init__(self, module: str, start: Mapping[str, Any], limits: ChildLimits) -> None:
        """`start` goes to the `prepare` of the module."""
        self._module = module
        self._limits = limits
        self._start = {
            **start,
            "max_memory_bytes": limits.max_memory_bytes,
            "cpu_s": limits.cpu_s,
        }
        self._turn = asyncio.Lock()
        self._child: _Child | None = None
        self._is_unreadable = False
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Of the process, where there is one."""
        return None if self._child is None else self._child.process.pid

    async def ask(self, request: Any) -> str:
        """Raises Refused, ChildFailed, ChildBusy, ChildUnreadable."""
        try:
            async with asyncio.timeout(self._limits.turn_s):
                await self._turn.acquire()
        except TimeoutError:
            raise ChildBusy from None
        try:
            return await self._answer(request)
        finally:
            if self._is_closed:
                await self._end()
            self._turn.release()

    async def aclose(self) -> None:
        """Ends the process, now or after its current request. A later request starts another, for
        itself alone."""
        self._is_closed = True
        if not self._turn.locked():
            await self._end()

    async def _answer(self, request: Any) -> str:
        if self._is_unreadable:
            raise ChildUnreadable
        try:
            child = await self._running()
            kind, text = await self._ask(child, request)
        except BaseException:
            # A later reply of this process would be to this request.
            await self._end()
            raise
        if kind is Reply.REFUSED:
            raise Refused(text)
        if kind is not Reply.DONE:
            await self._end()
            raise ChildFailed("it needs too much memory")
        return text

    async def _running(self) -> "_Child":
        if self._child is not None and not self._child.reader.at_eof():
            return self._child
        await self._end()
        try:
            self._child = await _Child.start(self._module)
        except OSError as exc:
            raise ChildFailed(f"its process cannot start ({type(exc).__name__})") from exc
        kind, _ = await self._ask(self._child, self._start)
        if kind is not Reply.READY:
            self._is_unreadable = True
            raise ChildUnreadable
        return self._child

    async def _ask(self, child: "_Child", request: Any) -> tuple[Reply, str]:
        """Raises ChildFailed."""
        try:
            async with asyncio.timeout(self._limits.wall_s):
                return await child.ask(request)
        except TimeoutError:
            raise ChildFailed(TOO_LONG) from None
        except (OSError, asyncio.IncompleteReadError, ValueError):
            await child.end()
            has_met_limit = child.process.returncode == -signal.SIGXCPU
            raise ChildFailed(TOO_LONG if has_met_limit else "its process ended") from None

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.end()


class _Child:
    """The process, and our end of the socket pair. Whatever ends us closes that, so that no process
    is left behind.
    """

    def __init__(
        self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self.reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, module: str) -> "_Child":
        """Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await create_subprocess_exec(
                    *(sys.executable, "-S", "-P", "-m", module),
                    stdin=theirs.fileno(),
                    stdout=DEVNULL,
                    stderr=DEVNULL,  # a traceback could quote a message
                    env=_environment(),
                )
            return cls(process, *await asyncio.open_connection(sock=ours))
        except BaseException:
            ours.close()  # and so the process ends
            raise

    async def ask(self, request: Any) -> tuple[Reply, str]:
        """The kind and the text of the reply. Raises OSError, IncompleteReadError where the process
        ends, ValueError where its reply is none.
        """
        raw = msgspec.json.encode(request)
        self._writer.write(REQUEST_HEAD.pack(len(raw)) + raw)
        kind, num_bytes = REPLY_HEAD.unpack(await self.reader.readexactly(REPLY_HEAD.size))
        if num_bytes > _MAX_REPLY_BYTES:
            raise ValueError("the reply is too long")
        return Reply(kind), (await self.reader.readexactly(num_bytes)).decode()

    async def end(self) -> None:
        if self.process.returncode is None:
            # `Process.kill` may reap a process that has just ended, and its status would be lost.
            with suppress(ProcessLookupError):  # it has ended, and asyncio has not said so yet
                os.kill(self.process.pid, signal.SIGKILL)
        self._writer.transport.abort()
        await self.process.wait()


def _environment() -> dict[str, str]:
    """Where Python finds what it loads, and the time zone: no address and no secret of ours."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TZ") if name in os.environ}
    return {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), **kept}
