"""The gateway's end of the process that renders a model's chat template.

A template may loop, or ask for gigabytes: in a process of its own that costs one request, and no
other model. Why so, and what it costs: docs/decisions/template-process.md.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process, create_subprocess_exec
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.http.errors import ModelUnreadable, TemplateBusy, TemplateFailed, TemplateRefused
from gateway.openai import template_child
from gateway.openai.template_child import MAX_REPLY_BYTES, REPLY_HEAD, REQUEST_HEAD, Reply

_TOO_LONG = "it takes too long for these messages"

log = logging.getLogger("batchway.gateway")


class TemplateLimits(msgspec.Struct, frozen=True):
    """What a template may use. `cpu_s` and `wall_s` are of one request, and of reading the
    template; a machine with little to spare takes longer than the computing.
    """

    max_memory_bytes: int = 256 * 2**20  # of address space, the interpreter's included
    cpu_s: int = 2
    wall_s: float = 8.0
    turn_s: float = 10.0  # that a request waits for those before it


_DEFAULT_LIMITS = TemplateLimits()


class TemplateProcess:
    """One model's chat template. Its process is started by the first request, renders one request
    at a time in the order in which they came, and is started anew after one that ended it.
    """

    def __init__(
        self,
        model: str,
        source: str,
        special_tokens: Mapping[str, str],
        limits: TemplateLimits = _DEFAULT_LIMITS,
    ) -> None:
        self._model = model
        self._limits = limits
        self._start = {
            "source": source,
            "special_tokens": dict(special_tokens),
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

    async def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text, up to where the assistant's answer starts.

        Raises TemplateRefused, TemplateFailed, TemplateBusy, ModelUnreadable.
        """
        try:
            async with asyncio.timeout(self._limits.turn_s):
                await self._turn.acquire()
        except TimeoutError:
            raise TemplateBusy from None
        try:
            return await self._render(messages)
        finally:
            if self._is_closed:
                await self._end()
            self._turn.release()

    async def aclose(self) -> None:
        """Ends the process, now or after the request that it renders. What is rendered later is
        rendered all the same.
        """
        self._is_closed = True
        if not self._turn.locked():
            await self._end()

    async def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        if self._is_unreadable:
            raise ModelUnreadable(self._model, "chat template")
        try:
            child = await self._running()
            kind, text = await self._ask(child, messages)
        except BaseException:
            # A later reply of this process would be to this request.
            await self._end()
            raise
        if kind is Reply.REFUSED:
            raise TemplateRefused(text)
        if kind is not Reply.RENDERED:
            await self._end()
            raise self._failure("it needs too much memory for these messages")
        return text

    async def _running(self) -> "_Child":
        if self._child is not None and not self._child.reader.at_eof():
            return self._child
        await self._end()
        try:
            self._child = await _Child.start()
        except OSError as exc:
            raise self._failure(f"its process cannot start ({type(exc).__name__})") from exc
        kind, _ = await self._ask(self._child, self._start)
        if kind is not Reply.READY:
            self._is_unreadable = True
            log.error("chat template refused: jinja2 cannot read it model=%s", self._model)
            raise ModelUnreadable(self._model, "chat template")
        return self._child

    async def _ask(self, child: "_Child", request: Any) -> tuple[Reply, str]:
        """Raises TemplateFailed."""
        try:
            async with asyncio.timeout(self._limits.wall_s):
                return await child.ask(request)
        except TimeoutError:
            raise self._failure(_TOO_LONG) from None
        except (OSError, asyncio.IncompleteReadError, ValueError):
            await child.end()
            has_met_limit = child.process.returncode == -signal.SIGXCPU
            raise self._failure(_TOO_LONG if has_met_limit else "its process ended") from None

    def _failure(self, reason: str) -> TemplateFailed:
        log.warning("chat template failed: %s model=%s", reason, self._model)
        return TemplateFailed(f"the model's chat template failed: {reason}")

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
    async def start(cls) -> "_Child":
        """Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await create_subprocess_exec(
                    *(sys.executable, "-S", "-P", "-m", template_child.__name__),
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
        if num_bytes > MAX_REPLY_BYTES:
            raise ValueError("the reply is too long")
        return Reply(kind), (await self.reader.readexactly(num_bytes)).decode()

    async def end(self) -> None:
        if self.process.returncode is None:
            # `Process.kill` may reap a process that has just ended, and its status would be lost.
            os.kill(self.process.pid, signal.SIGKILL)
        self._writer.transport.abort()
        await self.process.wait()


def _environment() -> dict[str, str]:
    """Where Python finds what it loads, and the time zone: no address and no secret of ours."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TZ") if name in os.environ}
    return {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), **kept}
