"""How bytes of a connection become requests: what is rejected, limited, and when it is closed."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.types import Receive, Scope, Send

from gateway.http import connections
from gateway.http.limits import MAX_HEADER_BYTES
from tests.gateway.bare_connection import (
    LAST,
    REFUSED,
    Client,
    answer,
    bodies,
    connected,
    echo,
    streaming,
)

pytestmark = pytest.mark.anyio

GET = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
STREAM = GET.replace(b"/a", b"/stream")
POST = b"POST /a HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n"
OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMA\r\n"


@pytest.mark.parametrize(
    ("raw", "body"),
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
        "two equal lengths": (POST + b"content-length: 2, 2\r\n\r\nab", b"POST /a ab"),
        "a folded header": (POST + b"x: a\r\n b\r\n\r\n", b"POST /a "),
        "bare line ends": (POST.replace(b"\r\n", b"\n") + b"\n", b"POST /a "),
        "a later version": (b"GET /a HTTP/1.2\r\nhost: x\r\n\r\n", b"GET /a "),
        "two of them": ((POST + OFFER + b"\r\n") * 2, b"POST /a "),
    }.values(),
)
async def test_a_request_ends_at_its_declared_length(raw: bytes, body: bytes) -> None:
    """The next request on the connection is parsed too."""
    async with connected() as client:
        await client.send(raw + LAST)
        *firsts, last = bodies(await client.rest())
    assert set(firsts) == {body}
    assert last == b"GET /last "


@pytest.mark.parametrize(
    "raw",
    [
        POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        CHUNKED + b"content-length: 2\r\n\r\n0\r\n\r\n",
        CHUNKED + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        CHUNKED.replace(b"1.1", b"1.0") + b"\r\n0\r\n\r\n",
        POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: gzip\r\n\r\n",
        POST + b"transfer-encoding: identity\r\ncontent-length: 2\r\n\r\nab",
        POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab",
        POST + b"content-length: +2\r\n\r\nab",
        POST + b"content-length: -2\r\n\r\nab",
        POST + b"content-length: two\r\n\r\nab",
        POST + b"content-length: 0x2\r\n\r\nab",
        POST + b"content-length: 1 1\r\n\r\nab",
        POST + b"content-length: 99999999999999999999999\r\n\r\nab",
        POST + b"content-length:\r\n\r\nab",
        POST + b"content-length : 2\r\n\r\nab",
        POST + b"x: a\rb\r\n\r\n",
        POST + b"x: a\x00b\r\n\r\n",
        POST + b"x\x00: a\r\n\r\n",
        POST + b": a\r\n\r\n",
        POST + b"x\r\n\r\n",
        CHUNKED + b"\r\n0x2\r\nab\r\n0\r\n\r\n",
        CHUNKED + b"\r\nzz\r\n",
        CHUNKED + b"\r\n-2\r\nab\r\n0\r\n\r\n",
        CHUNKED + b"\r\n2\r\nabc0\r\n\r\n",
        CHUNKED + b"\r\nfffffffffffffffffffff\r\nab\r\n0\r\n\r\n",
        b"GET /a HTTP/1.1\r\n\r\n",
        POST + b"host: y\r\n\r\n",
        b"GET /a HTTP/1.0\r\nhost: x\r\nhost: y\r\n\r\n",
        b"GET /a\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        POST + b"x: " + b"y" * 2 * MAX_HEADER_BYTES,
    ],
)
async def test_a_malformed_or_ambiguous_request_is_refused(raw: bytes) -> None:
    """400, and the connection is closed."""
    async with connected() as client:
        await client.send(raw)
        refusal = await client.rest()
    assert refusal.startswith(b"HTTP/1.1 400 ")
    assert REFUSED in refusal or b'"bad_request"' in refusal
    assert refusal.count(b"HTTP/1.1") == 1


async def test_an_offer_to_upgrade_is_ignored() -> None:
    """Java's client offers HTTP/2 with its first POST. No byte of the body is lost, wherever the
    bytes are split. A request in HTTP/1.0 stays so: the connection is closed after it."""
    raw = POST + OFFER + b"content-length: 5\r\n\r\nhello"
    for at in range(1, len(raw)):
        async with connected() as client:
            await client.send(raw[:at])
            await client.send(raw[at:] + LAST)
            assert bodies(await client.rest()) == [b"POST /a hello", b"GET /last "], at
    async with connected() as client:
        await client.send(raw.replace(b"1.1", b"1.0"))
        assert bodies(await client.rest()) == [b"POST /a hello"]


@pytest.mark.parametrize("endless", [b"2\r\nab\r\n0\r\nx: ", b"2;a="], ids=["trailer", "extension"])
async def test_trailers_and_chunk_extensions_are_limited(endless: bytes) -> None:
    """The parser would buffer them."""
    async with connected() as client:
        await client.send(CHUNKED + b"\r\n" + endless)
        await client.send(b"y" * 2 * MAX_HEADER_BYTES)
        assert REFUSED in await client.rest()


async def test_a_long_body_does_not_count_as_head() -> None:
    """Bytes passed to the app do not count."""
    async with connected() as client:
        await client.send(POST + b"content-length: 100000\r\n\r\n")
        for _ in range(100):
            await client.send(b"y" * 1000)
        (received,) = bodies(await client.part())
    assert len(received) == len(b"POST /a ") + 100_000


async def answers_no(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers `/a` without reading its body."""
    if scope["path"] == "/a":
        await answer(send, b"no", [(b"content-length", b"2")])
    else:
        await echo(scope, receive, send)


@pytest.mark.parametrize("head", [POST + b"content-length: 9000000\r\n", CHUNKED])
async def test_the_rest_of_a_long_body_that_nobody_reads_is_dropped(head: bytes) -> None:
    """The client can send it all, and reads its answer, which says that the connection ends."""
    async with connected(answers_no) as client:
        await client.send(head + b"\r\n")
        for _ in range(90):
            await client.send(b"y" * 100_000)  # would be no chunk, if it were read
        received = await client.rest()
    assert bodies(received) == [b"no"]
    assert b"connection: close\r\n" in received.lower()


async def test_more_than_so_many_bytes_a_second_are_not_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that sends on is cut off, because reading takes time from others."""
    monkeypatch.setattr(connections, "_REST_BYTES_PER_S", 1_000_000)
    async with connected(answers_no) as client:
        await client.send(POST + b"content-length: 9000000\r\n\r\n")
        assert bodies(await client.part()) == [b"no"]
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            await client.send(b"y" * 9_000_000)


async def test_after_a_short_body_that_nobody_reads_comes_the_next_request() -> None:
    async with connected(answers_no) as client:
        await client.send(POST + b"content-length: 4\r\n\r\n")
        assert bodies(await client.part()) == [b"no"]
        await client.send(b"long" + LAST)
        assert bodies(await client.rest()) == [b"GET /last "]


@asynccontextmanager
async def begun(raw: bytes) -> AsyncIterator[tuple[Client, asyncio.Event]]:
    """A client whose stream has begun, and the event with which it goes on."""
    has_begun, goes_on = asyncio.Event(), asyncio.Event()
    async with connected(streaming(has_begun, goes_on)) as client:
        await client.send(raw)
        await has_begun.wait()
        yield client, goes_on


async def test_a_bad_pipelined_request_does_not_interrupt_a_stream() -> None:
    """The running response is completed; then the connection is closed."""
    async with begun(STREAM) as (client, goes_on):
        await client.send(b"\x00\x01\r\n\r\n")
        goes_on.set()
        received = await client.rest()
    stream, _, refusal = received.partition(b"\r\n\r\n")[2].partition(b"HTTP/1.1 400")
    assert stream == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
    assert REFUSED in refusal


async def test_pipelined_requests_are_not_read_early() -> None:
    """A client cannot fill the server's memory with pipelined requests."""
    async with begun(STREAM) as (client, _):
        num_sent = 0
        for _ in range(100):
            num_sent += client.send_what_fits(GET * 10_000)
            await asyncio.sleep(0)  # the server may read
        assert client.protocol.num_bytes < num_sent < 1_000_000


async def test_a_pipelined_request_is_not_begun_while_the_server_stops() -> None:
    """The stream may end; then the connection is closed."""
    async with begun(STREAM * 3) as (client, goes_on):
        client.protocol.shutdown()
        goes_on.set()
        received = await client.rest()
    assert received.count(b"HTTP/1.1 200 OK") == 1
    assert received.endswith(b"two\r\n0\r\n\r\n")


async def test_a_malformed_chunk_during_a_response_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The connection is closed. The parser's error would quote the body."""
    caplog.set_level(logging.DEBUG)
    async with begun(CHUNKED.replace(b"/a", b"/stream") + b"\r\n") as (client, goes_on):
        await client.send(b"canary\r\n")
        assert not (await client.rest()).endswith(b"0\r\n\r\n")
        goes_on.set()
    assert caplog.records
    assert "canary" not in caplog.text


async def test_a_response_may_take_longer_than_the_idle_timeout() -> None:
    """Also after an earlier response on the connection."""
    idle_s = 0.5

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/last":
            await asyncio.sleep(3 * idle_s)
        await echo(scope, receive, send)

    async with connected(app, idle_s=idle_s) as client:
        await client.send(GET)
        assert bodies(await client.part()) == [b"GET /a "]
        await client.send(LAST)
        assert bodies(await client.rest()) == [b"GET /last "]


async def test_nothing_follows_a_refusal() -> None:
    """The client reads the earlier response and the refusal; then the app gets a disconnect."""
    has_begun, is_told = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            has_begun.set()
            while (await receive())["type"] != "http.disconnect":
                pass
            is_told.set()
        await answer(send, b"x" * 4_000_000)

    async with connected(app) as client:
        await client.send(GET)
        await client.send(CHUNKED + b"\r\n")
        await has_begun.wait()
        await client.send(b"no number\r\n")
        received = await client.rest()
        async with asyncio.timeout(10):
            await is_told.wait()
    assert received.endswith(b"\r\n" + REFUSED + b"\r\n0\r\n\r\n")
    assert received.count(b"HTTP/1.1") == 2
