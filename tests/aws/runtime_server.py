"""A Lambda Runtime API for tests: hands out events, takes streamed answers, may hang up."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import h11

from contract.tasks import end
from gateway.aws.runtime_api import RuntimeApi
from gateway.aws.stream_loop import serve

_PRELUDE_END = b"\0" * 8


@dataclass
class Reply:
    """What one invocation was answered: as it arrives, and when it is over."""

    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    chunks: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    trailers: dict[bytes, bytes] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def prelude(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body.partition(_PRELUDE_END)[0])
        return found

    @property
    def content(self) -> bytes:
        return self.body.partition(_PRELUDE_END)[2]

    async def until(self, text: bytes) -> None:
        """Waits until the content holds a text."""
        while text not in self.content:
            await self.chunks.get()


@dataclass
class RuntimeServer:
    """One environment's Runtime API: one invocation at a time."""

    address: str = ""
    replies: dict[str, Reply] = field(default_factory=dict)
    takes: asyncio.Event = field(default_factory=asyncio.Event)  # answers, while it is set
    _events: asyncio.Queue[tuple[str, float, dict[str, Any]]] = field(default_factory=asyncio.Queue)
    _writers: dict[str, asyncio.StreamWriter] = field(default_factory=dict)

    def send(self, event: dict[str, Any], *, time_left_s: float = 900.0) -> Reply:
        """Queues an invocation."""
        request_id = f"id-{len(self.replies)}"
        self.replies[request_id] = Reply()
        self._events.put_nowait((request_id, time.time() + time_left_s, event))
        return self.replies[request_id]

    async def has_handed_out_all(self) -> None:
        """Waits until the loop has asked for what was sent."""
        await self._events.join()

    def hang_up(self, reply: Reply) -> None:
        """Cuts the connection that an answer comes on."""
        [request_id] = [key for key, value in self.replies.items() if value is reply]
        self._writers[request_id].transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http = h11.Connection(h11.SERVER)
        try:
            await self._exchange(http, reader, writer)
        except (ConnectionError, h11.RemoteProtocolError):
            pass
        finally:
            writer.close()

    async def _exchange(
        self, http: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        request = await _next(http, reader)
        assert isinstance(request, h11.Request)
        path = request.target.decode()
        if path.endswith("/next"):
            request_id, deadline_s, event = await self._events.get()
            self._events.task_done()
            head = {
                "Lambda-Runtime-Aws-Request-Id": request_id,
                "Lambda-Runtime-Deadline-Ms": str(int(deadline_s * 1000)),
            }
            await _respond(http, writer, 200, head, json.dumps(event).encode())
            return
        request_id, kind = path.split("/")[-2:]
        reply = self.replies[request_id]
        reply.headers = dict(request.headers)
        self._writers[request_id] = writer
        try:
            await self._take(http, reader, reply)
        finally:
            reply.over.set()
        if kind == "error":
            reply.error = json.loads(reply.body)
        await _respond(http, writer, 202, {}, b'{"status":"OK"}')

    async def _take(self, http: h11.Connection, reader: asyncio.StreamReader, reply: Reply) -> None:
        while True:
            await self.takes.wait()
            event = await _next(http, reader)
            if isinstance(event, h11.EndOfMessage):
                reply.trailers = dict(event.headers)
                return
            assert isinstance(event, h11.Data)
            reply.body += event.data
            reply.chunks.put_nowait(event.data)


async def _next(http: h11.Connection, reader: asyncio.StreamReader) -> Any:
    while (event := http.next_event()) is h11.NEED_DATA:
        http.receive_data(await reader.read(65536))
    if isinstance(event, h11.ConnectionClosed):
        raise ConnectionResetError
    return event


async def _respond(
    http: h11.Connection,
    writer: asyncio.StreamWriter,
    status: int,
    headers: dict[str, str],
    body: bytes,
) -> None:
    head = h11.Response(
        status_code=status, headers=[*headers.items(), ("Content-Length", str(len(body)))]
    )
    for event in (head, h11.Data(data=body), h11.EndOfMessage()):
        writer.write(http.send(event) or b"")
    await writer.drain()


@asynccontextmanager
async def running_runtime_api() -> AsyncIterator[RuntimeServer]:
    runtime = RuntimeServer()
    runtime.takes.set()
    server = await asyncio.start_server(runtime.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    runtime.address = f"{host}:{port}"
    try:
        yield runtime
    finally:
        server.close()


@asynccontextmanager
async def looping(app: Any, *, stall_s: float = 30.0) -> AsyncIterator[RuntimeServer]:
    """The loop around an app, and the Runtime API that it asks for events."""
    async with running_runtime_api() as runtime:
        loop = asyncio.create_task(serve(app, RuntimeApi(runtime.address), stall_s=stall_s))
        yield runtime
        await end(loop)
