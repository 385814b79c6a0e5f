"""Calls of functions over one connection. Redis answers in the order in which it was asked."""

import asyncio
from collections import deque
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError, TimeoutError

from contract.redis_link import RedisLink


class FunctionCalls:
    """Any number of calls at a time, each with its own patience. Knows no retries.

    A call that is cancelled leaves its place in the line, where its answer is dropped.
    """

    def __init__(self, connection: AbstractConnection) -> None:
        self._link = RedisLink(connection, self._answer, self._fail_all)
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self.is_open = False  # for calls to come

    async def open(self) -> None:
        """Raises what redis-py raises."""
        await self._link.open()
        self.is_open = True

    async def call(self, command: bytes, timeout_s: float | None) -> Any:
        """The answer to a packed command, waited for so long. Raises what redis-py raises."""
        if not self.is_open:
            raise ConnectionError("the connection was closed")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append(answer)
        self._link.write(command)
        timer = None
        if timeout_s is not None:
            timer = loop.call_later(timeout_s, self._give_up, answer)
        try:
            return await answer
        finally:
            if timer is not None:
                timer.cancel()
            if not self.is_open and all(other.done() for other in self._waiting):
                self._link.close()

    async def aclose(self) -> None:
        self.is_open = False
        await self._link.aclose()

    def _answer(self, reply: Any) -> None:
        answer = self._waiting.popleft()
        if answer.done():
            return
        if isinstance(reply, Exception):
            answer.set_exception(reply)
        else:
            answer.set_result(reply)

    def _give_up(self, answer: asyncio.Future[Any]) -> None:
        """Calls to come will have another connection; those that wait on this one may go on."""
        self.is_open = False
        if not answer.done():
            answer.set_exception(TimeoutError("no answer in time"))

    def _fail_all(self) -> None:
        self.is_open = False
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(ConnectionError("the connection was closed"))
