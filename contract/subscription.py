"""Follows channels over one connection: what is said there, as it comes. Knows no reconnecting."""

import asyncio
from collections.abc import Callable
from typing import Any, Never, Self

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError, TimeoutError

from contract.redis_link import RedisLink, packed

LOOK_S = 5.0  # from one look at the connection to the next
_PING = packed("PING")


class Subscription:
    """`on_message` hears a channel and what was said in it; `on_confirmed` that from now on nothing
    said in a channel is missed, as long as the connection lives."""

    def __init__(
        self,
        connection: AbstractConnection,
        on_message: Callable[[bytes, bytes], None],
        on_confirmed: Callable[[bytes], None],
        look_s: float = LOOK_S,
    ) -> None:
        """Takes a connection that was not opened yet, and that nobody else has."""
        self._link = RedisLink(connection, self._take, self._note_end)
        self._on_message = on_message
        self._on_confirmed = on_confirmed
        self._look_s = look_s
        self._has_heard = True  # since the last look
        self._timer: asyncio.TimerHandle | None = None
        self._has_ended = asyncio.Event()
        self._why: Exception = ConnectionError("Redis closed the connection")

    async def __aenter__(self) -> Self:
        """Connects. Raises what redis-py raises."""
        await self._link.open()
        self._look()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._link.aclose()

    def subscribe(self, *channels: bytes) -> None:
        """Nothing where the connection has ended: `end` says so."""
        self._link.write(packed("SUBSCRIBE", *channels))

    def unsubscribe(self, channel: bytes) -> None:
        self._link.write(packed("UNSUBSCRIBE", channel))

    async def end(self) -> Never:
        """Waits until the connection has ended; raises why, as redis-py does."""
        await self._has_ended.wait()
        raise self._why

    def _look(self) -> None:
        """A network may forget a connection without a word: what is asked must be answered."""
        if not self._has_heard:
            self._fail(TimeoutError("Redis does not answer"))
            return
        self._has_heard = False
        self._link.write(_PING)
        self._timer = asyncio.get_running_loop().call_later(self._look_s, self._look)

    def _take(self, reply: Any) -> None:
        self._has_heard = True
        match reply:
            case [b"message", channel, data]:
                self._on_message(channel, data)
            case [b"subscribe", channel, _]:
                self._on_confirmed(channel)
            case Exception():  # no right to a channel, say
                self._fail(reply)

    def _fail(self, why: Exception) -> None:
        self._why = why
        self._link.close()

    def _note_end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._has_ended.set()
