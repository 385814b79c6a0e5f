"""The layer around the routes, without an app of ours behind."""

import asyncio
import logging
from collections.abc import AsyncGenerator

import pytest
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contract.telemetry.tracing import Tracing
from gateway.http.limits import Limits
from gateway.http.metrics import GatewayMetrics
from gateway.http.middleware import Middleware
from gateway.http.sse import SseResponse
from gateway.settings import GatewaySettings
from tests.gateway.bare_connection import connected

pytestmark = pytest.mark.anyio

MAX_BODY_BYTES = 100


def front_of(routes: ASGIApp, metrics: GatewayMetrics | None = None) -> Middleware:
    settings = GatewaySettings(
        redis_url="redis://nowhere", allowed_hosts=("*",), max_body_bytes=MAX_BODY_BYTES
    )
    counted = metrics or GatewayMetrics()
    return Middleware(routes, Limits(settings), counted, Tracing("test"), lambda: 0.0)


async def test_a_caller_that_leaves_before_its_request_is_whole_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is answered, for nobody is there, and nothing is logged as unexpected."""
    sent: list[Message] = []

    async def reads_the_body(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()

    async def leaves() -> Message:
        return {"type": "http.disconnect"}

    async def keep(message: Message) -> None:
        sent.append(message)

    with caplog.at_level(logging.INFO):
        await front_of(reads_the_body)({"type": "http", "headers": []}, leaves, keep)

    assert sent == []
    assert caplog.records == []


async def test_a_body_that_nobody_waits_for_must_come_in_time_too() -> None:
    """A reader of a stream that announced one, before there is anything to stream."""
    was_told_gone: list[bool] = []

    async def nothing_yet() -> AsyncGenerator[bytes, None]:
        await asyncio.Event().wait()
        yield b""

    async def on_gone() -> None:
        was_told_gone.append(True)

    response = SseResponse(nothing_yet(), headers={}, on_gone=on_gone)
    async with connected(front_of(response), body_s=0.1) as client:
        await client.send(b"GET /a HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n")
        said = await client.rest()
    assert said.startswith(b"HTTP/1.1 408 ")
    assert not was_told_gone


async def test_a_body_that_is_asked_for_and_too_long_is_not_taken_in() -> None:
    """A client that waits for our word before it sends is told at once."""

    async def routes(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError

    length = b"%d" % (2 * MAX_BODY_BYTES)
    async with connected(front_of(routes)) as client:
        await client.send(
            b"POST /a HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
            b"content-length: " + length + b"\r\n\r\n"
        )
        assert (await client.rest()).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("num_taken", [0, 1, 2])
async def test_a_stream_that_is_not_taken_is_given_up(num_taken: int) -> None:
    """Its job must not go on for nobody, be it the head, an event or the end that fails."""
    sent: list[Message] = []
    was_told_gone: list[bool] = []

    async def one() -> AsyncGenerator[bytes, None]:
        yield b"one"

    async def on_gone() -> None:
        was_told_gone.append(True)

    async def stays() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def take(message: Message) -> None:
        if len(sent) == num_taken:
            raise ConnectionResetError
        sent.append(message)

    scope: Scope = {"type": "http", "headers": []}
    await SseResponse(one(), headers={}, on_gone=on_gone)(scope, stays, take)

    assert was_told_gone == [True]
    assert len(sent) == num_taken
