"""The gateway's side of a process for untrusted input; see child.py.

A chat template or a grammar may need unlimited time or memory. In a process of its own, that fails
one request only. Reasons and costs: docs/decisions/template-process.md.
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
    """Limits of a process. `cpu_s` and `wall_s` apply to each request, and to the start."""

    max_memory_bytes: int = 256 * 2**20  # of address space, with the interpreter
    cpu_s: int = 2
    wall_s: float = 8.0
    turn_s: float = 10.0  # for requests to wait for earlier ones


class ChildFailed(Exception):
    """The process died during this request, or could not start. The message is the reason."""


class ChildBusy(Exception):
    """The process is busy with earlier requests."""


class ChildUnreadable(Exception):
    """The process cannot use its start message."""


class ChildProcess:
    """A process that the first request starts. It answers one request at a time, in order. A
    request that ends it makes the next one start it again."""

    def __init__(self, module: str, start: Mapping[str, Any], limits: ChildLimits) -> None:
        """`start` is passed to the module's `prepare`."""
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
        """The process id, while the process runs."""
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
        """Ends the process, now or after its current request. A later request starts another one
        for itself."""
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
            # The reply would otherwise be taken for that of the next request.
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
    """The process and the gateway's end of the socket pair. The gateway's end closes when the
    gateway dies, which ends the process."""

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
            ours.close()  # this ends the process
            raise

    async def ask(self, request: Any) -> tuple[Reply, str]:
        """The kind and text of the reply. Raises OSError, IncompleteReadError if the process ends,
        and ValueError for a malformed reply."""
        raw = msgspec.json.encode(request)
        self._writer.write(REQUEST_HEAD.pack(len(raw)) + raw)
        kind, num_bytes = REPLY_HEAD.unpack(await self.reader.readexactly(REPLY_HEAD.size))
        if num_bytes > _MAX_REPLY_BYTES:
            raise ValueError("the reply is too long")
        return Reply(kind), (await self.reader.readexactly(num_bytes)).decode()

    async def end(self) -> None:
        if self.process.returncode is None:
            # `Process.kill` could reap a process that has just ended, and lose its status.
            with suppress(ProcessLookupError):  # it has ended, but asyncio does not know yet
                os.kill(self.process.pid, signal.SIGKILL)
        self._writer.transport.abort()
        await self.process.wait()


def _environment() -> dict[str, str]:
    """Python's search path and the time zone; no address and no secret."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TZ") if name in os.environ}
    return {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), **kept}
