"""Opens Redis clients the way docs/protocol.md asks for.

Retries are few and explicit, because a blind repeat of a plain command would repeat its effect;
the functions may be repeated. Foreign errors become BrokerUnavailable here and nowhere else.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import hiredis
import redis.asyncio
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
)
from redis.typing import EncodableT

from contract.errors import BrokerFull, BrokerUnavailable, ErrorCode

CONNECT_TIMEOUT_S = 0.25
COMMAND_TIMEOUT_S = 1.0
HEALTH_CHECK_S = 10
MAX_CONNECTIONS = 512  # of a client; redis-py's 100 would refuse the 101st call at a time

_FUNCTION_CALLS = ("FCALL", "FCALL_RO")
_MOST_AT_REST = 4  # connections of a client; those of a rush go back to its pool


class _Packing:
    """Writes commands by hiredis. In Python that takes the longer part of a call with hundreds of
    arguments, and a worker makes one each step; redis-py's asyncio knows nothing else.
    """

    def pack_command(self, *args: EncodableT) -> list[bytes]:
        """Whose name may be two words."""
        name = args[0].encode() if isinstance(args[0], str) else bytes(args[0])  # type: ignore[arg-type]
        return [hiredis.pack_command((*name.split(), *args[1:]))]  # type: ignore[arg-type]


class _PackingTcp(_Packing, Connection):
    pass


class _PackingTls(_Packing, SSLConnection):
    pass


class _PackingUnix(_Packing, UnixDomainSocketConnection):
    pass


_PACKING: Mapping[Any, type[AbstractConnection]] = {
    Connection: _PackingTcp,
    SSLConnection: _PackingTls,
    UnixDomainSocketConnection: _PackingUnix,
}


class _Client(redis.asyncio.Redis):
    """Calls functions on connections that it keeps: what redis-py's pool does around each call,
    locks, events and telemetry, takes as long as the rest of it, and a first token waits for three.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._at_rest: list[AbstractConnection] = []  # the pool counts them as in use

    async def execute_command(self, *args: EncodableT, **options: Any) -> Any:
        """As redis-py's, retries and errors too."""
        if args[0] not in _FUNCTION_CALLS:
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        pool = self.connection_pool
        if self._at_rest:
            connection = self._at_rest.pop()
        else:
            connection = await pool.get_connection()  # type: ignore[no-untyped-call]

        async def call() -> Any:
            await pool.ensure_connection(connection)
            await connection.send_command(*args)
            return await connection.read_response()

        try:
            return await connection.retry.call_with_retry(call, lambda _: connection.disconnect())
        finally:
            if len(self._at_rest) < _MOST_AT_REST:
                self._at_rest.append(connection)
            else:
                await pool.release(connection)


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
        retry=Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.2), retries),
        retry_on_error=[BusyLoadingError],
    )
    pool = client.connection_pool
    pool.connection_class = _PACKING[pool.connection_class]
    return client


@contextmanager
def broker_errors() -> Iterator[None]:
    """Turns what redis-py raises for an absent or unwilling server into BrokerUnavailable, or
    BrokerFull."""
    try:
        yield
    except AuthenticationError as exc:
        raise BrokerUnavailable("Redis refused the credentials") from exc
    except (ConnectionError, TimeoutError, OSError) as exc:
        raise BrokerUnavailable(f"Redis does not answer ({type(exc).__name__})") from exc
    except ReadOnlyError as exc:
        raise BrokerUnavailable("Redis takes no writes: it is a read-only replica") from exc
    except OutOfMemoryError as exc:
        raise BrokerFull(ErrorCode.MEMORY_FULL, "the memory of Redis is full") from exc
    except ResponseError as exc:
        if "OOM" in str(exc):
            raise BrokerFull(ErrorCode.MEMORY_FULL, "the memory of Redis is full") from exc
        if "MISCONF" in str(exc):
            message = "Redis cannot write its file: its disk is full or fails"
            raise BrokerFull(ErrorCode.DISK_FULL, message) from exc
        if "Function not found" in str(exc):
            raise BrokerUnavailable("Redis does not hold batchway's function library") from exc
        if "ACL failure" in str(exc):
            raise BrokerUnavailable("this user of Redis may not do what a function does") from exc
        raise
