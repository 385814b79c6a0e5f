"""Bytes on a connection to requests and answers, without an app of ours behind: strict where two
readers could differ, whole however the bytes are cut, bounded in what is held.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from contract.tasks import end
from gateway.connections import ConnectionConfig, PatientProtocol
from gateway.limits import MAX_HEADER_BYTES

pytestmark = pytest.mark.anyio

POST = b"POST /a HTTP/1.1\r\nhost: x\r\n"
LAST = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n"
OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMA\r\n"
REFUSED = b"Invalid HTTP request received."


class HeardProtocol(PatientProtocol):
    """Tells how much it has been given."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_bytes = 0
        self.heard = asyncio.Condition()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.num_bytes += len(data)
        self.said = asyncio.ensure_future(self._say())

    async def _say(self) -> None:
        async with self.heard:
            self.heard.notify_all()

    async def has(self, num_bytes: int) -> None:
        async with self.heard:
            await self.heard.wait_for(lambda: self.num_bytes >= num_bytes)


class Client:
    """The other end of the connection."""

    def __init__(self, protocol: HeardProtocol, ours: socket.socket) -> None:
        self.protocol = protocol
        self._socket = ours
        self._num_sent = 0

    async def send(self, raw: bytes) -> None:
        """Returns when the protocol has been given all of it."""
        await asyncio.get_running_loop().sock_sendall(self._socket, raw)
        self._num_sent += len(raw)
        await self.protocol.has(self._num_sent)

    async def part(self) -> bytes:
        """What has come by now, or comes next."""
        return await asyncio.get_running_loop().sock_recv(self._socket, 1_000_000)

    async def rest(self) -> bytes:
        """All until the connection is closed."""
        parts = b""
        while part := await self.part():
            parts += part
        return parts

    def has_been_sent_some(self) -> bool:
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False

    def leave(self) -> None:
        self._socket.close()


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with what it was asked: method, path, body."""
    body, is_complete = b"", False
    while not is_complete:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        is_complete = not message["more_body"]
    said = b"%b %b %b" % (scope["method"].encode(), scope["path"].encode(), body)
    await answer(send, said, [(b"content-length", b"%d" % len(said))])


async def answer(send: Send, said: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": headers or []})
    await send({"type": "http.response.body", "body": said})


@asynccontextmanager
async def connected(app: ASGIApp = echo, *, idle_s: float = 20) -> AsyncIterator[Client]:
    config = ConnectionConfig(
        app,
        idle_s=idle_s,
        head_s=20,
        body_s=20,
        stall_s=20,
        max_per_address=0,
        lifespan="off",
        log_config=None,
    )
    state = ServerState()
    protocol = HeardProtocol(config, state, {})
    ours, theirs = socket.socketpair()
    for end_ in (ours, theirs):
        end_.setblocking(False)
    await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, theirs)
    try:
        yield Client(protocol, ours)
    finally:
        ours.close()
        protocol.transport.abort()
        await end(*state.tasks)


def bodies(said: bytes) -> list[bytes]:
    """Of answers with a length."""
    found = []
    while said:
        head, _, said = said.partition(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        found.append(said[:length])
        said = said[length:]
    return found


@pytest.mark.parametrize(
    ("raw", "said"),
    {
        "a length": (POST + b"content-length: 2\r\n\r\nab", b"POST /a ab"),
        "no body": (POST + b"\r\n", b"POST /a "),
        "chunks": (CHUNKED + b"\r\n1\r\na\r\n1\r\nb\r\n0\r\n\r\n", b"POST /a ab"),
        "an extension": (CHUNKED + b"\r\n2;a=b\r\nab\r\n0\r\n\r\n", b"POST /a ab"),
        "a trailer": (CHUNKED + b"\r\n2\r\nab\r\n0\r\nhost: y\r\n\r\n", b"POST /a ab"),
        "an offer": (POST + OFFER + b"content-length: 2\r\n\r\nab", b"POST /a ab"),
        "an offer, chunks": (CHUNKED + OFFER + b"\r\n2\r\nab\r\n0\r\n\r\n", b"POST /a ab"),
        "an offer, no body": (POST + OFFER + b"\r\n", b"POST /a "),
        "a percent sign": (b"GET /%61 HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /a "),
        "a value above ASCII": (POST + b"x: \xc3\xa4\r\n\r\n", b"POST /a "),
        "a line end before": (b"\r\n" + POST + b"\r\n", b"POST /a "),
        "two of them": ((POST + OFFER + b"\r\n") * 2, b"POST /a "),
    }.values(),
)
async def test_a_request_ends_where_it_says(raw: bytes, said: bytes) -> None:
    """The next one on the connection is understood too."""
    async with connected() as client:
        await client.send(raw + LAST)
        *firsts, last = bodies(await client.rest())
    assert set(firsts) == {said}
    assert last == b"GET /last "


@pytest.mark.parametrize(
    "raw",
    [
        POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        CHUNKED + b"content-length: 2\r\n\r\n0\r\n\r\n",
        CHUNKED + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: gzip\r\n\r\n",
        POST + b"transfer-encoding: identity\r\ncontent-length: 2\r\n\r\nab",
        POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab",
        POST + b"content-length: 2, 2\r\n\r\nab",
        POST + b"content-length: +2\r\n\r\nab",
        POST + b"content-length: -2\r\n\r\nab",
        POST + b"content-length: 0x2\r\n\r\nab",
        POST + b"content-length: 1 1\r\n\r\nab",
        POST + b"content-length: 99999999999999999999999\r\n\r\nab",
        POST + b"content-length:\r\n\r\nab",
        POST + b"content-length : 2\r\n\r\nab",
        POST + b"x: a\r\n b\r\n\r\n",
        POST + b"x: a\rb\r\n\r\n",
        POST + b"x: a\x00b\r\n\r\n",
        POST + b"x: a\x7fb\r\n\r\n",
        POST + b"x\x00: a\r\n\r\n",
        POST + b": a\r\n\r\n",
        POST + b"x\r\n\r\n",
        POST.replace(b"\r\n", b"\n") + b"\n",
        CHUNKED + b"\r\n0x2\r\nab\r\n0\r\n\r\n",
        CHUNKED + b"\r\n-2\r\nab\r\n0\r\n\r\n",
        CHUNKED + b"\r\n2\nab\n0\n\n",
        CHUNKED + b"\r\n2\r\nabc0\r\n\r\n",
        CHUNKED + b"\r\nfffffffffffffffffffff\r\nab\r\n0\r\n\r\n",
        b"GET /a HTTP/1.1\r\n\r\n",
        POST + b"host: y\r\n\r\n",
        b"GET /a HTTP/1.0\r\nhost: x\r\nhost: y\r\n\r\n",
        b"GET /a HTTP/1.2\r\nhost: x\r\n\r\n",
        b"GET /a HTTP/2.0\r\nhost: x\r\n\r\n",
        b"GET /a\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        POST + b"x: " + b"y" * 2 * MAX_HEADER_BYTES,
    ],
)
async def test_what_two_readers_could_take_differently_is_refused(raw: bytes) -> None:
    """400, and nothing more of the connection is read."""
    async with connected() as client:
        await client.send(raw)
        refusal = await client.rest()
    assert refusal.startswith(b"HTTP/1.1 400 ")
    assert refusal.endswith(REFUSED)
    assert refusal.count(b"HTTP/1.1") == 1


async def test_an_offer_of_another_protocol_costs_no_byte_of_the_body() -> None:
    """Java's own client offers HTTP/2 with its first POST; it is passed over, wherever the bytes of
    the request are cut.
    """
    raw = POST + OFFER + b"content-length: 5\r\n\r\nhello"
    for at in range(1, len(raw)):
        async with connected() as client:
            await client.send(raw[:at])
            await client.send(raw[at:] + LAST)
            assert bodies(await client.rest()) == [b"POST /a hello", b"GET /last "], at


async def test_an_offer_of_an_old_client_is_passed_over_too() -> None:
    """It stays one of HTTP/1.0, which is sent no more on this connection."""
    async with connected() as client:
        await client.send(POST.replace(b"1.1", b"1.0") + OFFER + b"content-length: 2\r\n\r\nab")
        assert bodies(await client.rest()) == [b"POST /a ab"]


async def test_what_comes_behind_a_body_is_bounded() -> None:
    """A trailer without an end, which the parser would hold whole."""
    async with connected() as client:
        await client.send(CHUNKED + b"\r\n2\r\nab\r\n0\r\nx: ")
        await client.send(b"y" * 2 * MAX_HEADER_BYTES)
        assert (await client.rest()).endswith(REFUSED)


async def test_what_comes_between_chunks_is_bounded() -> None:
    """An extension without an end."""
    async with connected() as client:
        await client.send(CHUNKED + b"\r\n2;a=")
        await client.send(b"y" * 2 * MAX_HEADER_BYTES)
        assert (await client.rest()).endswith(REFUSED)


async def test_a_long_body_in_many_pieces_is_no_long_head() -> None:
    """What the app is told of does not count."""
    async with connected() as client:
        await client.send(POST + b"content-length: 100000\r\n\r\n")
        for _ in range(100):
            await client.send(b"y" * 1000)
        (said,) = bodies(await client.part())
    assert len(said) == len(b"POST /a ") + 100_000


def streaming(
    has_begun: asyncio.Event, goes_on: asyncio.Event
) -> Callable[[Scope, Receive, Send], Any]:
    """An app whose answer to `/stream` comes in two parts."""

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


async def test_a_head_comes_with_the_first_part_of_its_body() -> None:
    """In one write: who waits for a first token gets it with one segment."""
    has_sent, goes_on = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        has_sent.set()
        await goes_on.wait()
        await send({"type": "http.response.body", "body": b"one"})

    async with connected(app) as client:
        await client.send(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n")
        await has_sent.wait()
        assert not client.has_been_sent_some()
        goes_on.set()
        head, _, body = (await client.part()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding: chunked" in head
    assert body == b"3\r\none\r\n0\r\n\r\n"


async def test_a_client_of_old_is_sent_no_chunks() -> None:
    """HTTP/1.0 knows none: the answer ends with its connection."""
    goes_on = asyncio.Event()
    goes_on.set()
    async with connected(streaming(asyncio.Event(), goes_on)) as client:
        await client.send(b"GET /stream HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"chunked" not in head
    assert body == b"onetwo"


async def test_a_bad_request_behind_a_stream_does_not_break_into_it() -> None:
    """What was asked properly is answered to its end; then the connection is closed."""
    has_begun, goes_on = asyncio.Event(), asyncio.Event()
    async with connected(streaming(has_begun, goes_on)) as client:
        await client.send(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
        await has_begun.wait()
        await client.send(b"\x00\x01\r\n\r\n")
        goes_on.set()
        said = await client.rest()
    assert said.partition(b"\r\n\r\n")[2] == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


async def test_so_many_requests_may_wait_behind_one() -> None:
    """Each takes memory before its turn; then no more is read."""
    async with connected() as client:
        await client.send(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n" * 500)
        assert bodies(await client.rest()) == [b"GET /a "] * 33


async def test_a_client_that_leaves_is_noticed_though_it_has_asked_for_more() -> None:
    """The request that runs is told, not only the one that came last."""
    told: list[Message] = []
    is_told = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        told.append(await receive())
        is_told.set()

    async with connected(app) as client:
        await client.send(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n")
        await client.send(b"GET /b HTTP/1.1\r\nhost: x\r\n\r\n")
        client.leave()
        client.protocol.flow.resume_reading()  # paused by what waits, as with any server
        async with asyncio.timeout(10):
            await is_told.wait()
    assert told == [{"type": "http.disconnect"}]


async def test_an_answer_may_last_longer_than_a_connection_may_idle() -> None:
    """Also where another was given before on the connection, and the wait for the next began."""
    idle_s = 0.5

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/last":
            await asyncio.sleep(3 * idle_s)
        await echo(scope, receive, send)

    async with connected(app, idle_s=idle_s) as client:
        await client.send(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n")
        assert bodies(await client.part()) == [b"GET /a "]
        await client.send(LAST)
        assert bodies(await client.rest()) == [b"GET /last "]


async def test_a_line_end_in_a_header_is_never_written(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever an app puts there: a client would take what follows for a header of ours."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, b"", [(b"x", b"a\r\nset-cookie: b")])

    async with connected(app) as client:
        await client.send(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n")
        said = await client.rest()
    assert b"set-cookie" not in said
    assert "Exception in ASGI application" in caplog.text
