"""The supervisor's end of the engine process: starts it, speaks frames, sees it end."""

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Self

import msgspec

from workers.messages import EngineOptions, FromEngine, ToEngine, decoder_from_engine, encode_frame

log = logging.getLogger(__name__)

_READ_BYTES = 2**18
GRACE_S = 5.0


class EngineClient:
    """One engine process. When this process dies, however, the engine ends by itself."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, module: str, options: EngineOptions) -> Self:
        """Spawns `python -m module` with one end of a socket pair."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                "--fd",
                str(theirs.fileno()),
                "--options",
                msgspec.json.encode(options).decode(),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, messages: Sequence[ToEngine]) -> None:
        """Sends one frame. Nothing is raised where the engine is gone: `messages` ends then."""
        if messages and not self._writer.is_closing():
            self._writer.write(encode_frame(messages))

    async def messages(self) -> AsyncIterator[list[FromEngine]]:
        """What the engine says, as it comes; ends with the engine."""
        decoder = decoder_from_engine()
        try:
            while data := await self._reader.read(_READ_BYTES):
                batch = decoder.feed(data)
                if batch:
                    yield batch
        except ConnectionError:
            return

    async def stop(self, grace_s: float = GRACE_S) -> int:
        """Ends the process if it still runs; returns its exit status."""
        self._writer.close()
        try:
            return await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            log.warning("the engine process did not end in %.1f s: killed", grace_s)
            self.kill()
            return await self._process.wait()

    def kill(self) -> None:
        """At once, whatever it does; `messages` ends then."""
        with contextlib.suppress(ProcessLookupError):  # it ended this very moment
            self._process.kill()
