"""Opens Redis clients the way docs/protocol.md asks for.

A client repeats no command, because a blind repeat would repeat its effect. `repeated` is for
functions and reads, which may be repeated. Foreign errors become BrokerUnavailable here and nowhere
else.
"""

import asyncio
import builtins
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, TypeVar

import redis.asyncio
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
)

from contract.errors import BrokerFull, BrokerUnavailable, CommandDenied, ErrorCode

CONNECT_TIMEOUT_S = 1.0
COMMAND_TIMEOUT_S = 1.0
MAX_CONNECTIONS = 160  # of a client; a call waits for a free one as long as a command may take
LOOK_S = 5.0  # of silence, after which a subscription asks whether Redis still answers

_RETRY = Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.2), 2)  # seconds

T = TypeVar("T")


def connect(
    redis_url: str,
    *,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    command_timeout_s: float | None = COMMAND_TIMEOUT_S,
) -> redis.asyncio.Redis:
    """A client; it opens no connection before its first command."""
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        redis_url,
        protocol=2,
        decode_responses=False,
        socket_connect_timeout=connect_timeout_s,
        socket_timeout=command_timeout_s,
        max_connections=MAX_CONNECTIONS,
        timeout=command_timeout_s,
        driver_info=None,  # CLIENT SETINFO is not in Redis 7.0: no user needs the right to it
        retry=Retry(NoBackoff(), 0),
    )
    return redis.asyncio.Redis.from_pool(pool)


async def repeated(call: Callable[[], Awaitable[T]]) -> T:
    """The result of a call that may be repeated: twice more where Redis gives no answer."""
    return await _RETRY.call_with_retry(call, _ignore)


async def _ignore(_: Exception) -> None:
    """redis-py has closed the connection that failed."""


async def now_ms(client: redis.asyncio.Redis) -> int:
    """Unix milliseconds by the clock of Redis, which all parts share. Raises BrokerUnavailable."""
    with broker_errors(client, "TIME"):
        seconds, microseconds = await repeated(client.time)
    return int(seconds) * 1000 + int(microseconds) // 1000


class Listener:
    """Hands the messages of one PubSub to `hear`. Only one task may use the PubSub.

    A network may drop a connection without a word, so a PING is sent every `look_s`, and a
    connection that brings nothing until the next one counts as lost.
    """

    def __init__(
        self, pubsub: PubSub, hear: Callable[[dict[str, Any]], None], look_s: float = LOOK_S
    ) -> None:
        self._pubsub = pubsub
        self._hear = hear
        self._look_s = look_s
        self._look_at_s = asyncio.get_running_loop().time()
        self._has_heard = True  # since the last look
        self._reading: asyncio.Timeout | None = None  # while it waits

    async def listen(self) -> None:
        """Hands on each message, as redis-py gives it, also those of subscriptions; returns after
        an `interrupt`, and after each PING. Raises what redis-py raises.
        """
        try:
            async with asyncio.timeout_at(self._look_at_s) as self._reading:
                while True:
                    message = await self._pubsub.get_message(timeout=None)
                    self._has_heard = True
                    if message is not None:
                        self._hear(message)
        except builtins.TimeoutError:
            pass
        finally:
            self._reading = None
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._look_at_s:
            if not self._has_heard:
                raise TimeoutError("Redis does not answer")
            self._has_heard, self._look_at_s = False, now_s + self._look_s
            await self._pubsub.ping()

    def interrupt(self) -> None:
        """Ends a `listen` that waits, without loss of a message."""
        if self._reading is not None and not self._reading.expired():
            self._reading.reschedule(0.0)


def is_denied(exc: BaseException) -> bool:
    """Whether a reply of Redis says that its user may not do this, itself or in a function."""
    text = str(exc)  # in a function: Valkey and Redis 7.2 or later, then Redis 7.0
    return (
        isinstance(exc, NoPermissionError)
        or "ACL failure" in text
        or "The user executing the script can't" in text
    )


def denied(
    client: redis.asyncio.Redis | redis.Redis, command: str, exc: BaseException
) -> CommandDenied:
    """The error for a command, by its name. It quotes no argument: that may be a caller's."""
    user = client.connection_pool.connection_kwargs.get("username") or "default"
    text = str(exc)
    what = "a channel of " if "channel" in text else "a key of " if " key" in text else ""
    inside = "" if isinstance(exc, NoPermissionError) else " (a command inside it)"
    return CommandDenied(
        f"Redis denies its user {user!r} {what}{command}{inside}; `batchway redis-roles` prints "
        "the rules that each part needs"
    )


class broker_errors:
    """Turns what redis-py raises for an absent or unwilling server into BrokerUnavailable or
    BrokerFull, and what Redis says of a command that its user may not run into CommandDenied, which
    names the user of `client` and `command`."""

    def __init__(self, client: redis.asyncio.Redis, command: str) -> None:
        self._client = client
        self._command = command

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if exc is None:
            return
        if isinstance(exc, ResponseError) and is_denied(exc):
            raise denied(self._client, self._command, exc) from exc
        if (error := _broker_error(exc)) is not None:
            raise error from exc


def _broker_error(exc: BaseException) -> BrokerUnavailable | BrokerFull | None:
    """None for what is no fault of the server's."""
    match exc:
        case AuthenticationError():
            return BrokerUnavailable("Redis refused the credentials")
        case ConnectionError() | TimeoutError() | OSError():
            return BrokerUnavailable(f"Redis does not answer ({type(exc).__name__})")
        case ReadOnlyError():
            return BrokerUnavailable("Redis takes no writes: it is a read-only replica")
        case ResponseError():
            return _response_error(str(exc), is_oom=isinstance(exc, OutOfMemoryError))
    return None


def _response_error(text: str, *, is_oom: bool) -> BrokerUnavailable | BrokerFull | None:
    if is_oom or "OOM" in text:
        return BrokerFull(ErrorCode.MEMORY_FULL, "the memory of Redis is full")
    if "MISCONF" in text:
        message = "Redis cannot write its file: its disk is full or fails"
        return BrokerFull(ErrorCode.DISK_FULL, message)
    if "Function not found" in text:
        return BrokerUnavailable("Redis does not hold batchway's function library")
    return None
