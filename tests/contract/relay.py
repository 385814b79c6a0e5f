"""A proxy in front of Redis that speaks TLS, stops forwarding, or loses a reply."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

from tests.callbacks.test_tls import certificate


class Server(Protocol):
    @property
    def url(self) -> str: ...


class Relay:
    """Listens on loopback and forwards everything to a server until told otherwise."""

    def __init__(self, server: Server, tls: ssl.SSLContext | None = None) -> None:
        self._path = server.url.removeprefix("unix://")
        self._tls = tls
        self._passes = asyncio.Event()
        self._passes.set()
        self._loses_answer = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_connections = 0
        self.port = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Relay"]:
        listener = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = listener.sockets[0].getsockname()[1]
        try:
            async with listener:
                yield self
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def fall_silent(self) -> None:
        """Forwards nothing more, but closes no connection."""
        self._passes.clear()

    def lose_next_answer(self) -> None:
        """Closes the connection instead of forwarding the server's next reply."""
        self._loses_answer = True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_connections += 1
        from_server, to_server = await asyncio.open_unix_connection(self._path)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(reader, to_server))
                group.create_task(self._pass_on(from_server, writer, are_answers=True))
        finally:
            self._tasks.discard(task)
            for end in (writer, to_server):
                end.transport.abort()

    async def _pass_on(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, are_answers: bool = False
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(2**16):
                await self._passes.wait()
                if are_answers and self._loses_answer:
                    self._loses_answer = False
                    break
                sink.write(data)
                await sink.drain()
        sink.transport.abort()


@contextlib.asynccontextmanager
async def with_tls(server: Server, folder: Path) -> AsyncIterator[tuple[Relay, str]]:
    """A relay that speaks TLS, and the URL whose certificate clients trust."""
    pem = certificate(folder / "server.pem", "localhost")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pem)
    async with Relay(server, tls).running() as relay:
        yield relay, f"rediss://localhost:{relay.port}?ssl_ca_certs={pem}"
