"""A TCP port in front of a server's unix socket that loses, cuts, delays and refuses on demand.

Knows bytes and connections but not the Redis protocol: a reply is what the server sends after a
client has sent something.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

_READ_BYTES = 2**16

Doom = Literal["lose", "cut"]


class Link:
    """One client's link to the server. Without faults it forwards every byte at once.

    `effects` counts what was done to connections, by name.
    """

    def __init__(self, socket_path: Callable[[], Path]) -> None:
        self._socket_path = socket_path
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._is_refusing = False
        self.delay_s = 0.0  # of every reply
        self.passes_replies = asyncio.Event()
        self.passes_replies.set()
        self.dooms: list[Doom] = []  # for the next connections that send something
        self.effects: Counter[str] = Counter()
        self.struck = asyncio.Event()  # set by each effect of a doom

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._is_refusing = True
            self.drop_all()
            self._server = None
            await asyncio.gather(*(connection.ended.wait() for connection in self._connections))

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        assert self._server is not None, "not started"
        return int(self._server.sockets[0].getsockname()[1])

    def doom(self, kind: Doom) -> None:
        """The next command is delivered. Its reply is lost or truncated, and the connection is
        closed."""
        self.struck.clear()
        self.dooms.append(kind)

    def drop_all(self) -> None:
        """Closes every connection, whatever is in transit."""
        for connection in self._connections:
            connection.drop()

    @contextlib.contextmanager
    def refused(self) -> Iterator[None]:
        """Closes all connections and accepts none."""
        self._is_refusing = True
        self.drop_all()
        try:
            yield
        finally:
            self._is_refusing = False

    async def before_reply(self, command: bytes, reply: bytes) -> None:
        """Returns once a reply may pass; `command` is what the client has sent last."""
        del command, reply
        await self.passes_replies.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self, reader, writer)
        self._connections.add(connection)
        try:
            if not self._is_refusing:
                await connection.run(self._socket_path())
        finally:
            writer.transport.abort()
            self._connections.discard(connection)
            connection.ended.set()


class _Connection:
    """Two pumps. The connection ends with the first of them."""

    def __init__(
        self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.ended = asyncio.Event()
        self._link = link
        self._reader = reader
        self._writer = writer
        self._doom: Doom | None = None
        self._command = b""  # what the client has sent last
        self._task: asyncio.Task[object] | None = None

    def drop(self) -> None:
        self._writer.transport.abort()
        if self._task is not None:
            self._task.cancel()

    async def run(self, socket_path: Path) -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(str(socket_path))
        except OSError:
            return  # the server is away: the client sees its connection end
        try:
            async with asyncio.TaskGroup() as group:
                self._task = group.create_task(self._both(reader, writer))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    async def _both(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pumps = [
            asyncio.ensure_future(self._pass_commands(writer)),
            asyncio.ensure_future(self._pass_replies(reader)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pass_commands(self, to_server: asyncio.StreamWriter) -> None:
        while data := await self._reader.read(_READ_BYTES):
            self._command = data
            if self._doom is None and self._link.dooms:
                self._doom = self._link.dooms.pop(0)
            to_server.write(data)
            await to_server.drain()

    async def _pass_replies(self, from_server: asyncio.StreamReader) -> None:
        link = self._link
        while data := await from_server.read(_READ_BYTES):
            if link.delay_s:
                link.effects["delayed"] += 1
                await asyncio.sleep(link.delay_s)
            await link.before_reply(self._command, data)
            if self._doom is not None:
                link.effects[self._doom] += 1
                link.struck.set()
                if self._doom == "cut":
                    self._writer.write(data[: max(1, len(data) // 2)])
                    await self._writer.drain()
                    self._writer.close()  # what was cut off short must still arrive
                    await asyncio.sleep(0.01)
                return
            self._writer.write(data)
            await self._writer.drain()
