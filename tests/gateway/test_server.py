"""The gateway's listening socket."""

import asyncio
import socket

import pytest

from gateway.http.listener import bind
from tests.gateway.conftest import make_settings

pytestmark = pytest.mark.anyio


async def test_answers_do_not_wait_for_acknowledgements() -> None:
    """Accepted connections send small writes at once."""
    taken: asyncio.Queue[int] = asyncio.Queue()

    async def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock: socket.socket = writer.get_extra_info("socket")
        taken.put_nowait(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = bind(make_settings("redis://127.0.0.1:1"), "127.0.0.1", 0)
    async with await asyncio.start_server(take, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await taken.get()
        writer.close()
        await writer.wait_closed()
