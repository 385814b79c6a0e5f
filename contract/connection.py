"""Opens Redis clients the way docs/protocol.md asks for.

Retries are few and explicit, because a blind repeat of a plain command would repeat its effect;
the functions may be repeated. Foreign errors become BrokerUnavailable here and nowhere else.
"""

import asyncio
from types import TracebackType
from typing import Any

import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
)
from redis.typing import EncodableT

from contract.errors import BrokerFull, BrokerUnavailable, CommandDenied, ErrorCode
from contract.function_calls import FunctionCalls
from contract.redis_link import packed
from contract.tasks import end

CONNECT_TIMEOUT_S = 0.25
COMMAND_TIMEOUT_S = 1.0
HEALTH_CHECK_S = 10
MAX_CONNECTIONS = 512  # of a client; redis-py's 100 would refuse the 101st call at a time

_BACKOFF = ExponentialWithJitterBackoff(base=0.02, cap=0.2)  # seconds
_FUNCTION_CALLS = ("FCALL", "FCALL_RO")


class _Client(redis.asyncio.Redis):
    """Calls functions over one connection, past redis-py's pool: what that does around each call,
    locks, tasks, timeouts and telemetry, takes longer than the rest, and a first token waits for
    three calls.
    """

    num_retries = 0  # of a function call

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._calls: FunctionCalls | None = None
        self._opening: asyncio.Task[FunctionCalls] | None = None

    async def execute_command(self, *args: EncodableT, **options: Any) -> Any:
        """As redis-py's, retries and errors too; `num_retries` of a function call may be given.
        Raises CommandDenied where redis-py raises NoPermissionError.
        """
        is_function = args[0] in _FUNCTION_CALLS
        try:
            if is_function:
                return await self._call_function(*args, **options)
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except ResponseError as exc:
            if not is_denied(exc):
                raise
            name = " ".join(str(word) for word in args[: 2 if is_function else 1])
            raise denied(self, name, exc) from exc

    async def _call_function(self, *args: EncodableT, **options: Any) -> Any:
        num_retries = options.get("num_retries", self.num_retries)
        command, num_failures = packed(*args), 0
        while True:
            try:
                calls = self._calls
                if calls is None or not calls.is_open:
                    calls = await self._opened()
                return await calls.call(command)
            except (ConnectionError, TimeoutError):
                num_failures += 1
                if num_failures > num_retries:
                    raise
            await asyncio.sleep(_BACKOFF.compute(num_failures))

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        if self._opening is not None:
            await end(self._opening)
        if self._calls is not None:
            await self._calls.aclose()
        await super().aclose(close_connection_pool)

    async def _opened(self) -> FunctionCalls:
        """A new connection, one for all who ask for one at the same time."""
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open(), name="redis-open")
        return await asyncio.shield(self._opening)

    async def _open(self) -> FunctionCalls:
        connection = new_connection(self)
        calls = FunctionCalls(connection, connection.socket_timeout)
        await calls.open()
        self._calls = calls
        return calls


def new_connection(client: redis.asyncio.Redis) -> AbstractConnection:
    """One that is not open yet, and that the client's pool knows nothing of."""
    connection: AbstractConnection
    connection = client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    return connection


def connect(
    redis_url: str,
    *,
    retries: int = 2,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    command_timeout_s: float | None = COMMAND_TIMEOUT_S,
) -> redis.asyncio.Redis:
    """A client; it opens no connection before its first command."""
    client = _Client.from_url(
        redis_url,
        protocol=2,
        decode_responses=False,
        socket_connect_timeout=connect_timeout_s,
        socket_timeout=command_timeout_s,
        health_check_interval=HEALTH_CHECK_S,
        max_connections=MAX_CONNECTIONS,
        driver_info=None,  # CLIENT SETINFO is not in Redis 7.0: no user needs the right to it
        retry=Retry(_BACKOFF, retries),
        retry_on_error=[BusyLoadingError],
    )
    assert isinstance(client, _Client)
    client.num_retries = retries
    return client


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
    """Turns what redis-py raises for an absent or unwilling server into BrokerUnavailable, or
    BrokerFull. `client` and `command` are for commands that do not go by `execute_command`, which
    has names for them: NoPermissionError becomes CommandDenied."""

    def __init__(self, client: redis.asyncio.Redis | None = None, command: str = "") -> None:
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
        if isinstance(exc, NoPermissionError) and self._client is not None:
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
