"""The partitions as one gateway calls them, each with a circuit breaker: a partition that does not
answer stops no other one."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from contract.connection import connect
from contract.errors import (
    BrokerFull,
    BrokerReplica,
    BrokerUnavailable,
    BrokerUnfit,
    CommandDenied,
)
from contract.library import check_fitness, ensure_library
from contract.shards import Shard, Shards
from gateway.http.errors import readable
from gateway.redis.hints import Hints
from gateway.settings import GatewaySettings

log = logging.getLogger("batchway.gateway")

MAX_CALLS = 128  # concurrent calls of a partition, each on its own connection; others wait

P = ParamSpec("P")
T = TypeVar("T")


class Breaker:
    """Opens when a call fails. After a while, one call at a time may try."""

    def __init__(self, open_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._open_s = open_s
        self._clock_s = clock_s
        self._open_until_s: float | None = None
        self._is_probing = False
        self._away_since_s: float | None = None
        self._reason = ""

    def check(self) -> None:
        """Raises BrokerUnavailable if a call would be rejected."""
        if self._open_until_s is not None and (
            self._is_probing or self._clock_s() < self._open_until_s
        ):
            raise BrokerUnavailable(f"{self._reason}, a moment ago")

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Surrounds one call. Raises BrokerUnavailable at once while open."""
        self.check()
        is_probe = self._is_probing = self._open_until_s is not None
        try:
            yield
        except (BrokerFull, BrokerReplica, BrokerUnfit, CommandDenied):
            self._note_answer()
            raise
        except BrokerUnavailable as exc:
            self._open_until_s, self._reason = self._clock_s() + self._open_s, str(exc)
            if self._away_since_s is None:
                self._away_since_s = self._clock_s()
                log.warning("no answer from Redis: %s", exc)
            raise
        else:
            self._note_answer()
        finally:
            if is_probe:
                self._is_probing = False

    def _note_answer(self) -> None:
        self._open_until_s = None
        if self._away_since_s is not None:
            log.info("Redis answers again after %.0f s", self._clock_s() - self._away_since_s)
            self._away_since_s = None


class GatewayShard(Shard):
    """One partition. All its parts but `hints` must be called through `call`."""

    def __init__(self, settings: GatewaySettings, number: int) -> None:
        super().__init__(settings.redis_url, settings.namespace, number)
        client = connect(settings.redis_url, self.keys)
        self.hints = Hints(client, max_bytes=settings.max_buffer_bytes)
        self.swept_s = 0.0
        self._breaker = Breaker(settings.breaker_open_s)
        self._slots = asyncio.Semaphore(MAX_CALLS)
        self._has_library = False
        self._loading = asyncio.Lock()

    async def aclose(self) -> None:
        await self.hints.aclose()
        await super().aclose()

    async def call(
        self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Returns the function's result. Raises BrokerUnavailable, at once if Redis failed a moment
        ago; BrokerUnfit; CommandDenied, which it logs; and what the function raises."""
        self._breaker.check()
        async with self._slots:
            try:
                if not self._has_library:
                    await self._load_library()
                with self._breaker.guard():
                    return await function(*args, **kwargs)
            except (CommandDenied, BrokerFull, BrokerReplica, BrokerUnfit) as exc:
                log.error("%s", exc)
                raise

    async def ask(
        self, what: str, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """The same for a record, `what`. Raises RecordUnreadable where it cannot be decoded."""
        with readable(what):
            return await self.call(function, *args, **kwargs)

    async def _load_library(self) -> None:
        """Loads the library once for all calls that wait for it: if it fails, they fail at once."""
        async with self._loading:
            with self._breaker.guard():
                if not self._has_library:
                    await check_fitness(self.client)
                    await ensure_library(self.client)
                    self._has_library = True


class GatewayShards(Shards[GatewayShard]):
    """All partitions of one gateway process, which makes the namespace if it is not made."""

    def __init__(self, settings: GatewaySettings) -> None:
        super().__init__(
            lambda number: GatewayShard(settings, number), settings.partitions, makes=True
        )
