"""Opens Redis clients as docs/protocol.md requires, and converts errors of redis-py.

A client does not retry commands, because a retry could repeat an effect. `repeated` retries reads
and functions, which may be repeated.
"""

import asyncio
import builtins
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

import redis.asyncio
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    InvalidResponse,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
)

from contract.cluster import pool_from_url
from contract.codec import wire_error
from contract.errors import (
    BrokerFull,
    BrokerReplica,
    BrokerUnavailable,
    CommandDenied,
    ErrorCode,
    LibraryMissing,
)
from contract.keys import Keys

CONNECT_TIMEOUT_S = 1.0
COMMAND_TIMEOUT_S = 1.0
MAX_CONNECTIONS = 160  # of a client; a call waits for a free one up to its timeout
LOOK_S = 5.0  # without a message, after which a subscription sends a PING
# After a refusal for a full disk, nobody sweeps for so long: workers and gateways, which were
# refused too, must have time to renew leases and attendance before those count as lapsed.
SWEEP_PAUSE_S = 5.0

_MAX_REASON = 120  # characters of Redis's own words

_RETRY = Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.2), 2)  # seconds

T = TypeVar("T")


def connect(
    redis_url: str,
    keys: Keys,
    *,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    command_timeout_s: float | None = COMMAND_TIMEOUT_S,
) -> redis.asyncio.Redis:
    """Returns a client of the partition of `keys`, which connects at its first command. With
    `cluster=true` in the URL's query it connects to the primary that holds the partition."""
    pool = pool_from_url(
        redis.asyncio.BlockingConnectionPool,
        redis_url,
        keys.tag,
        protocol=2,
        decode_responses=False,
        socket_connect_timeout=connect_timeout_s,
        socket_timeout=command_timeout_s,
        max_connections=MAX_CONNECTIONS,
        timeout=command_timeout_s,
        driver_info=None,  # CLIENT SETINFO is not in Redis 7.0, and users have no right to it
        retry=Retry(NoBackoff(), 0),
    )
    return redis.asyncio.Redis.from_pool(pool)


async def repeated(call: Callable[[], Awaitable[T]]) -> T:
    """Returns the result of a call; repeats it up to twice if Redis does not answer."""
    return await _RETRY.call_with_retry(call, _ignore)


async def _ignore(_: Exception) -> None:
    """Does nothing between attempts: redis-py has closed the connection."""


async def now_ms(client: redis.asyncio.Redis) -> int:
    """Unix milliseconds by the clock of Redis, which all parts share. Raises BrokerUnavailable."""
    with broker_errors(client, "TIME"):
        seconds, microseconds = await repeated(client.time)
    return int(seconds) * 1000 + int(microseconds) // 1000


class Listener:
    """Passes the messages of a PubSub to `on_message`. Only one task may use the PubSub.

    Sends a PING every `look_s` seconds, because a network may drop a connection silently. A
    connection without any message between two PINGs counts as lost.
    """

    def __init__(
        self, pubsub: PubSub, on_message: Callable[[dict[str, Any]], None], look_s: float = LOOK_S
    ) -> None:
        self._pubsub = pubsub
        self._on_message = on_message
        self._look_s = look_s
        self._look_at_s = asyncio.get_running_loop().time()
        self._has_received = True  # since the last PING
        self._reading: asyncio.Timeout | None = None  # while it waits for a message

    async def listen(self) -> None:
        """Passes on each message of redis-py, including subscribe and unsubscribe; returns after
        `interrupt` and after each PING. Raises the errors of redis-py.
        """
        try:
            async with asyncio.timeout_at(self._look_at_s) as self._reading:
                while True:
                    message = await self._next_message()
                    self._has_received = True
                    if message is not None:
                        self._on_message(message)
        except builtins.TimeoutError:
            pass
        finally:
            self._reading = None
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._look_at_s:
            if not self._has_received:
                raise TimeoutError("Redis does not answer")
            self._has_received, self._look_at_s = False, now_s + self._look_s
            await self._pubsub.ping()

    async def _next_message(self) -> dict[str, Any] | None:
        """The next message; None also if Redis, with a full disk, refuses a PING: it still
        sends."""
        try:
            message: dict[str, Any] | None = await self._pubsub.get_message(timeout=None)
        except ResponseError as exc:
            if "MISCONF" not in str(exc):
                raise
            return None
        return message

    def interrupt(self) -> None:
        """Makes a waiting `listen` return; no message is lost."""
        if self._reading is not None and not self._reading.expired():
            self._reading.reschedule(0.0)


def is_denied(exc: BaseException) -> bool:
    """Whether an error says that the user lacks a right, in a command or inside a function."""
    text = str(exc)  # the texts of Valkey and Redis 7.2 or later, and of Redis 7.0
    return (
        isinstance(exc, NoPermissionError)
        or "ACL failure" in text
        or "The user executing the script can't" in text
    )


def denied(
    client: redis.asyncio.Redis | redis.Redis, command: str, exc: BaseException
) -> CommandDenied:
    """The error for a denied command. Quotes no argument, which may be a caller's data."""
    user = client.connection_pool.connection_kwargs.get("username") or "default"
    text = str(exc)
    what = "a channel of " if "channel" in text else "a key of " if " key" in text else ""
    inside = "" if isinstance(exc, NoPermissionError) else " (a command inside it)"
    return CommandDenied(
        f"Redis denies its user {user!r} {what}{command}{inside}; `batchway redis-roles` prints "
        "the rules that each part needs"
    )


@contextlib.contextmanager
def broker_errors(
    client: redis.asyncio.Redis | redis.Redis, command: str, record: str = ""
) -> Iterator[None]:
    """Converts errors of redis-py: a server that does not answer or refuses into BrokerUnavailable
    or BrokerFull, a missing right into CommandDenied with the user of `client` and `command`. What
    is left, a ResponseError about the data of a key or a decoder's error, becomes a WireError if
    `record` names what is read."""
    try:
        yield
    except Exception as exc:
        if isinstance(exc, ResponseError) and is_denied(exc):
            raise denied(client, command, exc) from exc
        if (error := _broker_error(exc)) is not None:
            raise error from exc
        if record and (unreadable := wire_error(exc, record)) is not None:
            raise unreadable from None
        raise


def _broker_error(exc: BaseException) -> BrokerUnavailable | BrokerFull | None:
    """Converts an error; None if it does not mean that the server is unavailable."""
    match exc:
        case AuthenticationError():
            return BrokerUnavailable("Redis refused the credentials")
        case ConnectionError() | TimeoutError() | OSError():
            return BrokerUnavailable(f"Redis does not answer ({type(exc).__name__})")
        case MovedError():
            return BrokerUnavailable("Redis is a cluster: add ?cluster=true to its URL")
        case ReadOnlyError():
            return BrokerReplica("Redis takes no writes: it is a read-only replica")
        case ResponseError():
            return _response_error(str(exc), is_oom=isinstance(exc, OutOfMemoryError))
        case InvalidResponse():
            return BrokerUnavailable(f"what answers is no Redis ({type(exc).__name__})")
    return None


def _response_error(text: str, *, is_oom: bool) -> BrokerUnavailable | BrokerFull | None:
    if is_oom or "OOM" in text:
        return BrokerFull(ErrorCode.MEMORY_FULL, "the memory of Redis is full")
    if "MISCONF" in text:
        message = "Redis cannot write its file: its disk is full or fails"
        return BrokerFull(ErrorCode.DISK_FULL, message)
    if "Function not found" in text:
        return LibraryMissing("Redis does not hold batchway's function library")
    if "WRONGTYPE" in text or " script: " in text:  # the second: from inside a function
        return None
    # A state of the server. What follows a comma may quote arguments.
    return BrokerUnavailable(f"Redis refuses commands: {text.partition(',')[0][:_MAX_REASON]}")


def redis_url_of(environ: Mapping[str, str]) -> str | None:
    """Returns REDIS_URL, with REDIS_PASSWORD if the URL has no password; None if it is not set.

    Vaults hand out a password by itself, and the rest of the URL is not secret.
    """
    url, password = environ.get("REDIS_URL") or None, environ.get("REDIS_PASSWORD", "")
    if url is None or not password:
        return url
    parts = urlsplit(url)
    if parts.scheme == "unix" or parts.password is not None:
        return url
    user, _, address = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{address}"))


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user, _, address = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user.partition(':')[0]}:***@{address}"))


_CANCEL_AGAIN_S = 0.05


async def end_tasks(*tasks: asyncio.Task[object] | asyncio.Future[object]) -> None:
    """Cancels tasks and waits until they are done; drops their results and errors.

    Cancels repeatedly: `asyncio.wait_for` before Python 3.12, through which redis-py sends
    commands, loses a cancellation that arrives as the send ends.
    """
    waiting = set(tasks)
    while waiting:
        for task in waiting:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=_CANCEL_AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()
