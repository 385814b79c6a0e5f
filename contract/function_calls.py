"""Calls of functions over one connection. Redis answers in the order in which it was asked."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError, TimeoutError

from contract.redis_link import RedisLink


class FunctionCalls:
    """Any number of calls at a time, each of which waits for so long. Knows no retries.

    A call that is cancelled leaves its place in the line, where its answer is dropped.
    """

    def __init__(
        self,
        connection: AbstractConnection,
        timeout_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes a connection that was not opened yet, and that nobody else has."""
        self._link = RedisLink(connection, self._answer, self._fail_all)
        self._timeout_s = timeout_s
        self._clock = clock
        self._waiting: deque[tuple[float, asyncio.Future[Any]]] = deque()  # since when
        self._look: asyncio.TimerHandle | None = None
        self.is_open = False  # for calls to come

    async def open(self) -> None:
        """Raises what redis-py raises."""
        await self._link.open()
        self.is_open = True

    async def call(self, command: bytes) -> Any:
        """The answer to a packed command. Raises what redis-py raises."""
        if not self.is_open:
            raise ConnectionError("the connection was closed")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((self._clock(), answer))
        self._link.write(command)
        # One timer for all calls of a while: one for each would be a quarter of what a call takes.
        if self._look is None and self._timeout_s is not None:
            self._look = loop.call_later(self._timeout_s, self._give_up_old, self._timeout_s)
        try:
            return await answer
        finally:
            if not self.is_open and all(other.done() for _, other in self._waiting):
                self._link.close()

    async def aclose(self) -> None:
        self.is_open = False
        await self._link.aclose()

    def _answer(self, reply: Any) -> None:
        _, answer = self._waiting.popleft()
        if answer.done():
            return
        if isinstance(reply, Exception):
            answer.set_exception(reply)
        else:
            answer.set_result(reply)

    def _give_up_old(self, timeout_s: float) -> None:
        """After one that is given up, calls to come have another connection; those that wait on
        this one may go on."""
        self._look = None
        now_s = self._clock()
        for since_s, answer in self._waiting:
            if answer.done():
                continue
            rest_s = since_s + timeout_s - now_s
            if rest_s > 0:
                loop = asyncio.get_running_loop()
                self._look = loop.call_later(rest_s, self._give_up_old, timeout_s)
                return
            self.is_open = False
            answer.set_exception(TimeoutError("no answer in time"))

    def _fail_all(self) -> None:
        self.is_open = False
        if self._look is not None:
            self._look.cancel()
        while self._waiting:
            _, answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(ConnectionError("the connection was closed"))
