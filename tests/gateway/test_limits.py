"""Middlewares and streams, with routes of the test's own."""

import asyncio
import gzip
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Body, FastAPI, Request
from starlette.responses import Response
from starlette.types import Message, Scope

from gateway.app import create_app
from gateway.http.sse import EventStream, sse_response
from gateway.routes.requests import GuardedRoute, open_to_all
from gateway.settings import GatewaySettings
from tests.gateway.bare_connection import connected

pytestmark = pytest.mark.anyio

MAX_BODY_BYTES = 100
KEY = "a-gateway-s-own-key"


def app_of(endpoint: Callable[..., Any] | None = None) -> FastAPI:
    """The gateway's app with the test's endpoint at /a."""
    settings = GatewaySettings(
        redis_url="redis://nowhere", allowed_hosts=("*",), max_body_bytes=MAX_BODY_BYTES
    )
    app = create_app(settings)
    if endpoint is not None:
        app.router.add_api_route(
            "/a", endpoint, methods=["GET", "POST"], route_class_override=GuardedRoute
        )
    return app


@open_to_all
async def never(fields: Annotated[dict[str, str], Body()]) -> None:
    raise AssertionError


async def test_a_disconnect_during_a_request_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is logged as unexpected."""
    sent: list[Message] = []

    async def leaves() -> Message:
        return {"type": "http.disconnect"}

    async def keep(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/a", "headers": headers}
    with caplog.at_level(logging.INFO, "batchway"):
        await app_of(never)({**scope, "query_string": b"", "scheme": "http"}, leaves, keep)

    assert sent[0]["status"] == 499
    assert [record for record in caplog.records if record.name.startswith("batchway")] == []


async def test_an_unread_body_has_a_deadline_too() -> None:
    """A GET stream that announced a body, before there is anything to stream."""
    was_told_gone: list[bool] = []

    async def nothing_yet() -> AsyncGenerator[bytes, None]:
        await asyncio.Event().wait()
        yield b""

    async def on_gone() -> None:
        was_told_gone.append(True)

    @open_to_all
    async def stream(request: Request) -> Response:
        return await sse_response(request, nothing_yet(), headers={}, on_gone=on_gone)

    async with connected(app_of(stream), body_s=0.1) as client:
        await client.send(b"GET /a HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n")
        received = await client.rest()
    assert received.startswith(b"HTTP/1.1 408 ")
    assert not was_told_gone


async def test_a_body_announced_as_too_long_is_rejected_before_it_is_sent() -> None:
    """A client that waits for `100 Continue` gets the refusal at once."""
    length = b"%d" % 2**20
    async with connected(app_of(never)) as client:
        await client.send(
            b"POST /a HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
            b"content-length: " + length + b"\r\n\r\n"
        )
        assert (await client.rest()).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("num_taken", [0, 1, 2])
async def test_a_stream_that_cannot_be_sent_is_closed(num_taken: int) -> None:
    """Its job must not run on without a reader, whether the head, an event or the end fails."""
    sent: list[Message] = []
    was_told_gone: list[bool] = []

    async def none() -> AsyncGenerator[bytes, None]:
        return
        yield

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
    await EventStream(b"one", none(), headers={}, on_gone=on_gone)(scope, stays, take)

    assert was_told_gone == [True]
    assert len(sent) == num_taken


async def asked(app: FastAPI, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.get(path, headers=headers)


async def test_long_headers_are_refused() -> None:
    answer = await asked(app_of(), "/livez", {"x": "a" * 20_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (431, "headers_too_large")


async def test_an_added_middleware_takes_effect() -> None:
    """It sees requests and responses with the gateway's own headers."""
    app = app_of()
    seen: list[str] = []

    @app.middleware("http")
    async def stamp(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        response = await call_next(request)
        seen.append(response.headers["x-request-id"])
        response.headers["x-stamp"] = "1"
        return response

    answer = await asked(app, "/livez")
    assert (answer.status_code, answer.headers["x-stamp"]) == (200, "1")
    assert seen == [answer.headers["x-request-id"]]


class Teapot(Exception):
    pass


@pytest.mark.parametrize("handled", [None, Teapot, Exception, 500])
async def test_an_added_exception_handler_takes_effect(
    handled: int | type[Exception] | None,
) -> None:
    """For other exceptions, and instead of the gateway's handler for unexpected ones."""
    app = app_of()

    @app.get("/tea")
    async def tea() -> None:
        raise Teapot

    async def short_and_stout(_: Request, __: Exception) -> Response:
        return Response(status_code=418)

    if handled is not None:
        app.exception_handler(handled)(short_and_stout)
    answer = await asked(app, "/tea")
    assert answer.headers["x-request-id"]
    if handled is None:
        assert answer.json()["error"]["code"] == "internal_error"
    else:
        assert answer.status_code == 418


@pytest.mark.parametrize("encode", [None, gzip.compress])
@pytest.mark.parametrize("limit", [4 * 2**20, 1_000])
async def test_a_body_may_have_4_mib_or_what_the_operator_sets(
    limit: int, encode: Callable[[bytes], bytes] | None
) -> None:
    """The refusal names the limit and its setting. Encoded bodies have it too, once decoded."""
    settings = GatewaySettings(redis_url="redis://127.0.0.1:1", api_key=KEY)
    if limit != settings.max_body_bytes:
        settings = settings.model_copy(update={"max_body_bytes": limit})
    app = create_app(settings)
    headers = {"content-type": "application/json", "x-api-key": KEY}
    if encode is not None:
        headers["content-encoding"] = "gzip"

    async def post(content: bytes) -> httpx.Response:
        content = content if encode is None else encode(content)
        path = "/v1/chat/completions"
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            return await http.post(path, content=content, headers=headers)

    fits, long = await post(b'{"x":' + b" " * (limit - 5)), await post(b" " * (limit + 1))
    await app.state.gateway.bodies.aclose()
    assert fits.status_code == 400
    error = long.json()["error"]
    assert (long.status_code, error["code"]) == (413, "body_too_large")
    assert (
        error["message"]
        == f"the body has more than {limit} bytes, the limit that BATCHWAY_MAX_BODY_BYTES sets"
    )
