"""What gateway/http/uvicorn_compat.py needs of uvicorn beyond its manual. If a test fails after an
upgrade, adapt `Connection` or `StoppingServer`.
"""

import asyncio
import inspect
import socket

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from gateway.http.connections import Connection, ConnectionConfig
from gateway.http.uvicorn_compat import HttpProtocol, StoppingServer
from tests.gateway.bare_connection import connected, echo

pytestmark = pytest.mark.anyio


def config() -> ConnectionConfig:
    seconds = dict.fromkeys(("first_s", "idle_s", "head_s", "body_s", "upload_s"), 1)
    return ConnectionConfig(echo, **seconds, max_per_address=0, lifespan="off", log_config=None)


def test_the_protocol_is_the_one_that_http_h11_selects() -> None:
    """Otherwise another parser than the tested one would read requests."""
    selected = uvicorn.Config(echo, http="h11", log_config=None)
    selected.load()
    assert selected.http_protocol_class is HttpProtocol.__base__


def test_the_protocol_is_made_with_these_arguments() -> None:
    """Otherwise no connection can be accepted."""
    assert list(inspect.signature(HttpProtocol).parameters) == [
        *("config", "server_state", "app_state", "_loop")
    ]


async def test_the_protocol_and_its_subclass_have_no_attribute_in_common() -> None:
    """Otherwise one would overwrite the other's attributes."""
    state = uvicorn.Server(config()).server_state
    theirs = vars(HttpProtocol(config=config(), server_state=state, app_state={}))
    ours = set(vars(Connection(config(), {}, server_state=state))) - set(theirs)
    overridden = {name for name in vars(Connection) if not name.startswith("__")} & set(
        dir(HttpProtocol)
    )
    assert ours == {
        *("_bounds", "_counted_as", "_is_refused", "_is_in_head", "_num_requests", "_deadline"),
        *("_is_dropping", "_has_had_request"),
    }
    assert overridden <= set(dir(asyncio.Protocol))


async def test_the_protocol_tells_where_in_a_request_it_is() -> None:
    """Otherwise the first bytes of a body could be taken for the empty lines before a request."""
    async with connected(echo) as client:
        protocol = client.protocol
        assert protocol.awaits_request
        await client.send(b"POST / HTTP/1.1\r\nhost: x\r\n")
        assert not protocol.awaits_request
        assert not protocol.awaits_body
        await client.send(b"content-length: 2\r\n\r\n")
        assert not protocol.awaits_request
        assert protocol.awaits_body
        await client.send(b"\r\n")
        await client.part()
        assert protocol.awaits_request
        assert not protocol.awaits_body


async def test_the_server_calls_on_stop_before_it_waits_for_requests() -> None:
    """Otherwise streams would be cut off without a last event."""
    has_begun, is_told = asyncio.Event(), asyncio.Event()

    async def until_told(scope: Scope, receive: Receive, send: Send) -> None:
        has_begun.set()
        await is_told.wait()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = uvicorn.Config(until_told, lifespan="off", log_config=None)
        server = StoppingServer(settings, is_told.set, lambda _: True)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await has_begun.wait()
        server.should_exit = True
        assert (await reader.read()).startswith(b"HTTP/1.1 500 ")  # the app returned unanswered
        writer.close()
        await serving
