"""Runs one child process and shows its output."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import TextIO

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


class Child:
    """A process in its own session, so that a terminal's Ctrl-C does not reach it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        console: Console,
        *,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._command = command
        self._environ = environ
        self._console = console
        self._pass_fds = pass_fds
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
                pass_fds=self._pass_fds,
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
