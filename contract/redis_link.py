"""A connection to Redis that redis-py opens, and whose replies then go straight to who waits.

redis-py knows addresses, TLS, users and databases. Between a socket and whoever waits for a reply
it runs dozens of functions, however, and code that is run once in a while is slow:
docs/decisions/first-token.md. Here the event loop gives what comes to hiredis, and that to a
callback.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import hiredis
from redis.asyncio.connection import AbstractConnection, DefaultParser
from redis.exceptions import ConnectionError, InvalidResponse
from redis.typing import EncodableT

_UNFINISHED = object()  # of a reply


class RedisLink(asyncio.Protocol):
    """`on_reply` hears each reply, an error as an exception; `on_end` that no more will come."""

    def __init__(
        self,
        connection: AbstractConnection,
        on_reply: Callable[[Any], None],
        on_end: Callable[[], None],
    ) -> None:
        """Takes a connection that was not opened yet, and that nobody else has."""
        self._connection = connection
        self._on_reply = on_reply
        self._on_end = on_end
        self._transport: asyncio.WriteTransport | None = None  # as long as it is open
        self._ended = asyncio.Event()
        self._reader = hiredis.Reader(
            protocolError=InvalidResponse,
            replyError=DefaultParser.parse_error,
            notEnoughData=_UNFINISHED,
        )

    async def open(self) -> None:
        """Raises what redis-py raises."""
        connection = self._connection
        await connection.connect_check_health(retry_socket_connect=False)
        reader, writer = connection._reader, connection._writer
        connection._reader = connection._writer = None
        if reader is None or writer is None:
            raise ConnectionError("closed as it was opened")
        transport = writer.transport
        if reader.at_eof() or transport.is_closing():  # of that we would not hear again
            transport.abort()
            raise ConnectionError("closed as it was opened")
        # redis-py has read all replies. Keep the writer; dropping it closes the socket.
        self._writer, self._transport = writer, transport
        transport.set_protocol(self)

    def write(self, command: bytes) -> None:
        """Sends a packed command; nothing where the link has ended, as `on_end` was told. What does
        not leave at once is kept in memory: whoever writes waits for the reply.
        """
        if self._transport is not None:
            self._transport.write(command)

    def close(self) -> None:
        """At once; `on_end` hears of it as of every other end."""
        if self._transport is not None:
            self._transport.abort()

    async def aclose(self) -> None:
        """Closes, and waits until that is done."""
        if self._transport is not None:
            self.close()
            await self._ended.wait()

    # --- what the event loop calls ------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        reader.feed(data)
        while (reply := reader.gets()) is not _UNFINISHED:
            self._on_reply(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._ended.set()
        self._on_end()


def packed(*words: EncodableT) -> bytes:
    """A command as it is sent. In redis-py's Python that takes the longer part of a call with
    hundreds of arguments, and a worker makes one each step.
    """
    command: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]
    return command
