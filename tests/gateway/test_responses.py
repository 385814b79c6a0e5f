"""How an application's responses are written: each ends where its head says, or the connection
is closed."""

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from tests.gateway.bare_connection import LAST, answer, bodies, connected, echo, streaming

pytestmark = pytest.mark.anyio

GET = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
START: Message = {"type": "http.response.start", "status": 200, "headers": []}


async def test_an_http_1_0_client_gets_no_chunks() -> None:
    """HTTP/1.0 has no chunks; the connection's end ends the response."""
    goes_on = asyncio.Event()
    goes_on.set()
    async with connected(streaming(asyncio.Event(), goes_on)) as client:
        await client.send(b"GET /stream HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert b"chunked" not in head
    assert body == b"onetwo"


@pytest.mark.parametrize("end", [b"\r\n", b"\n", b"\r"])
@pytest.mark.parametrize("is_name", [False, True])
async def test_a_line_end_in_a_header_is_rejected(end: bytes, is_name: bool) -> None:
    """A client would take what follows for a header of the gateway."""
    bad = b"a" + end + b"set-cookie: b"

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, b"", [(bad, b"x") if is_name else (b"x", bad)])

    async with connected(app) as client:
        await client.send(GET)
        assert await client.rest() == b""


PART: Message = {"type": "http.response.body", "body": b"one", "more_body": True}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("parts", "last"), [([], b"\r\n\r\n"), ([PART], b"\r\n\r\n3\r\none\r\n")])
async def test_an_answer_that_breaks_off_is_not_ended(
    fails: bool, parts: list[Message], last: bytes
) -> None:
    """The connection is closed before the last chunk, so the client knows that something is
    missing."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in (START, *parts):
            await send(message)
        if fails:
            raise ValueError

    async with connected(app) as client:
        await client.send(GET)
        received = await client.rest()
    assert b"transfer-encoding: chunked" in received.lower()
    assert received.endswith(last)
    assert not received.endswith(b"0\r\n\r\n")


async def test_the_text_of_an_error_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """It may quote a prompt. Type and place of the error are logged."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("canary")

    async with connected(app) as client:
        await client.send(GET)
        assert (await client.rest()).startswith(b"HTTP/1.1 500 ")
    assert f"unexpected ValueError ({__file__}:" in caplog.text
    assert "canary" not in caplog.text


@pytest.mark.parametrize(
    ("parts", "said_last"),
    [([b"abcdef"], b"\r\n\r\n"), ([b"ab", b"cdef"], b"\r\n\r\nab")],
)
async def test_a_body_longer_than_its_content_length_is_cut(
    parts: list[bytes], said_last: bytes
) -> None:
    """The client would read the rest as the next response."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({**START, "headers": [(b"content-length", b"4")]})
        for i, part in enumerate(parts, 1):
            more = i < len(parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})

    async with connected(app) as client:
        await client.send(GET)
        assert (await client.rest()).endswith(said_last)


async def test_nothing_is_sent_after_the_end_of_a_response() -> None:
    """An app that sends more fails; its connection serves the next request."""
    failed: list[Exception] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await echo(scope, receive, send)
        for message in (START, {"type": "http.response.body", "body": b"more"}):
            try:
                await send(message)
            except RuntimeError as exc:
                failed.append(exc)

    async with connected(app) as client:
        await client.send(GET + LAST)
        assert bodies(await client.rest()) == [b"GET /a ", b"GET /last "]
    assert len(failed) >= 2


@pytest.mark.parametrize(
    ("method", "status", "headers"),
    [
        (b"HEAD", 200, []),
        (b"HEAD", 200, [(b"content-length", b"3")]),
        (b"GET", 204, []),
        (b"GET", 304, []),
    ],
)
async def test_an_answer_without_a_body_ends_with_its_head(
    method: bytes, status: int, headers: list[tuple[bytes, bytes]]
) -> None:
    """The next response on the connection follows at once."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/last":
            await echo(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": status, "headers": headers})
        body = b"" if status != 200 else b"one"
        await send({"type": "http.response.body", "body": body})

    async with connected(app) as client:
        await client.send(GET.replace(b"GET", method) + LAST)
        head, _, rest = (await client.rest()).partition(b"\r\n\r\n")
    assert head.count(b"HTTP/1.1") == 1
    assert bodies(rest) == [b"GET /last "]


ASKS = b"POST /a HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"


async def test_a_client_that_expects_100_continue_gets_it() -> None:
    """`100 Continue`, as soon as the app reads the body."""
    async with connected() as client:
        await client.send(ASKS)
        assert await client.part() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"ab" + LAST)
        assert bodies(await client.rest()) == [b"POST /a ab", b"GET /last "]
