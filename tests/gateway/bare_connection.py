"""A connection to the gateway's HTTP protocol without a gateway: a client, and small apps."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from contract.connection import end_tasks
from gateway.http.connections import Connection, ConnectionConfig

LAST = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
REFUSED = b"Invalid HTTP request received."


class CountingConnection(Connection):
    """Counts the bytes that it receives."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.num_bytes = 0
        self.received = asyncio.Condition()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.num_bytes += len(data)
        self.notifying = asyncio.ensure_future(self._notify())

    async def _notify(self) -> None:
        async with self.received:
            self.received.notify_all()

    async def has(self, num_bytes: int) -> None:
        async with self.received:
            await self.received.wait_for(lambda: self.num_bytes >= num_bytes)


class Client:
    """The client's end of the connection."""

    def __init__(self, protocol: CountingConnection, ours: socket.socket) -> None:
        self.protocol = protocol
        self._socket = ours
        self._num_sent = 0

    async def send(self, raw: bytes) -> None:
        """Returns when the protocol has received everything."""
        await asyncio.get_running_loop().sock_sendall(self._socket, raw)
        self._num_sent += len(raw)
        await self.protocol.has(self._num_sent)

    async def part(self) -> bytes:
        """Returns the bytes received so far, or waits for the next."""
        return await asyncio.get_running_loop().sock_recv(self._socket, 1_000_000)

    async def rest(self) -> bytes:
        """Reads until the connection is closed."""
        parts = b""
        while part := await self.part():
            parts += part
        return parts

    def send_what_fits(self, raw: bytes) -> int:
        """Returns how many bytes the socket's buffer accepted."""
        try:
            return self._socket.send(raw)
        except BlockingIOError:
            return 0

    def leave(self) -> None:
        self._socket.close()


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the request's method, path and body."""
    body, is_complete = b"", False
    while not is_complete:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        is_complete = not message["more_body"]
    content = b"%b %b %b" % (scope["method"].encode(), scope["path"].encode(), body)
    await answer(send, content, [(b"content-length", b"%d" % len(content))])


async def answer(
    send: Send, content: bytes, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": headers or []})
    await send({"type": "http.response.body", "body": content})


@asynccontextmanager
async def connected(
    app: ASGIApp = echo, *, idle_s: float = 20, head_s: float = 20, body_s: float = 20
) -> AsyncIterator[Client]:
    config = ConnectionConfig(
        app,
        first_s=idle_s,
        idle_s=idle_s,
        head_s=head_s,
        body_s=body_s,
        upload_s=body_s,
        max_per_address=0,
        lifespan="off",
        log_config=None,
    )
    state = uvicorn.Server(config).server_state
    protocol = CountingConnection(config=config, server_state=state, app_state={})
    ours, theirs = socket.socketpair()
    for end_ in (ours, theirs):
        end_.setblocking(False)
    await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, theirs)
    try:
        yield Client(protocol, ours)
    finally:
        ours.close()
        if protocol in state.connections:  # not lost already
            protocol.transport.abort()
        await end_tasks(*state.tasks)


def bodies(responses: bytes) -> list[bytes]:
    """The bodies of responses that have a Content-Length."""
    found = []
    while responses:
        head, _, responses = responses.partition(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        found.append(responses[:length])
        responses = responses[length:]
    return found


def streaming(
    has_begun: asyncio.Event, goes_on: asyncio.Event
) -> Callable[[Scope, Receive, Send], Any]:
    """An app that answers `/stream` in two parts."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/stream":
            await echo(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        has_begun.set()
        await goes_on.wait()
        await send({"type": "http.response.body", "body": b"two", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app
