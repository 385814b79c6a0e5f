"""Calls of Redis through a circuit breaker, with a limit on concurrent calls and a check of the
server."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import redis.asyncio

from contract.errors import BrokerUnavailable, CommandDenied
from contract.fitness import check_fitness, max_memory
from contract.library import ensure_library
from gateway.redis.breaker import Breaker

log = logging.getLogger("batchway.gateway")

MAX_CALLS = 128  # concurrent calls, each on its own connection; others wait

T = TypeVar("T")


class GuardedRedis:
    """Redis for one gateway process."""

    def __init__(self, client: redis.asyncio.Redis, breaker: Breaker) -> None:
        self._client = client
        self._breaker = breaker
        self._slots = asyncio.Semaphore(MAX_CALLS)
        self._has_library = False

    async def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Returns the function's result. Raises BrokerUnavailable, at once if Redis failed a moment
        ago; BrokerUnfit; CommandDenied, which it logs; and what the function raises."""
        self._breaker.check()
        async with self._slots:
            try:
                return await self._call_now(function)
            except CommandDenied as exc:
                log.error("%s", exc)
                raise

    async def max_memory(self) -> tuple[int, bool]:
        """The bytes that Redis may use, and whether its `maxmemory` is set. Raises as `call`."""
        return await self.call(lambda: max_memory(self._client))

    async def _call_now(self, function: Callable[[], Awaitable[T]]) -> T:
        with self._breaker.guard():
            if not self._has_library:
                await self._load_library()
            try:
                return await function()
            except BrokerUnavailable as exc:
                if "function library" not in str(exc):
                    raise
            await self._load_library()
            return await function()

    async def _load_library(self) -> None:
        await check_fitness(self._client)
        await ensure_library(self._client)
        self._has_library = True
