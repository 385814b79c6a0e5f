"""Connections to the primary of a Redis cluster with one shard.

A durable ElastiCache or MemoryDB is always a cluster, and its address may lead to a replica. One
shard holds all keys, so the plain clients of redis-py and RQ work on its primary. redis-py finds a
primary by itself only through Sentinel, whose `SentinelManagedConnection` these classes resemble.

Source: Redis cluster specification, "Client and server roles in the Redis cluster protocol".
"""

from typing import Any

import redis
import redis.asyncio
from redis.exceptions import ClusterDownError, ConnectionError, MovedError, ReadOnlyError

_OPTION = "cluster=true"  # the query of a URL
_NOT_PRIMARY = (MovedError, ReadOnlyError, ClusterDownError)


class PrimaryConnection(redis.asyncio.Connection):
    """Connects to the primary that the server at `host` and `port` names.

    A server that is no longer the primary ends the connection with a ConnectionError, so that the
    next command looks for the new one.
    """

    plain_class: Any = redis.asyncio.Connection

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._options = kwargs

    async def connect(self) -> None:
        """Connects. Raises ConnectionError also if the cluster has not exactly one shard."""
        if not self.is_connected:
            self.host, self.port = await self._find_primary()
        await super().connect()  # type: ignore[no-untyped-call]

    async def _find_primary(self) -> tuple[str, int]:
        """Asks over another connection, since a PubSub subscribes as soon as this one is open."""
        asked = self.plain_class(**self._options)
        try:
            await asked.connect()
            await asked.send_command("CLUSTER", "SLOTS")
            return _primary(await asked.read_response(), asked.host)
        finally:
            await asked.disconnect()

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().read_response(*args, **kwargs)
        except _NOT_PRIMARY as exc:
            await self.disconnect()
            raise ConnectionError("the server is not the primary of its cluster") from exc


class PrimarySSLConnection(PrimaryConnection, redis.asyncio.SSLConnection):
    """The same with TLS."""

    plain_class = redis.asyncio.SSLConnection


class BlockingPrimaryConnection(redis.Connection):
    """The same for the blocking client."""

    plain_class: Any = redis.Connection

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self._options = kwargs

    def connect(self) -> None:
        if not self.is_connected:
            self.host, self.port = self._find_primary()
        super().connect()  # type: ignore[no-untyped-call]

    def _find_primary(self) -> tuple[str, int]:
        asked = self.plain_class(**self._options)
        try:
            asked.connect()
            asked.send_command("CLUSTER", "SLOTS")
            return _primary(asked.read_response(), asked.host)
        finally:
            asked.disconnect()

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().read_response(*args, **kwargs)
        except _NOT_PRIMARY as exc:
            self.disconnect()  # type: ignore[no-untyped-call]
            raise ConnectionError("the server is not the primary of its cluster") from exc


class BlockingPrimarySSLConnection(BlockingPrimaryConnection, redis.SSLConnection):
    """The same with TLS for the blocking client."""

    plain_class = redis.SSLConnection


_PRIMARY_CLASSES = {
    redis.asyncio.Connection: PrimaryConnection,
    redis.asyncio.SSLConnection: PrimarySSLConnection,
    redis.Connection: BlockingPrimaryConnection,
    redis.SSLConnection: BlockingPrimarySSLConnection,
}


def plain_url(url: str) -> tuple[str, bool]:
    """A Redis URL without `cluster=true` in its query, and whether it was there."""
    address, _, query = url.partition("?")
    options = query.split("&")
    others = "&".join(option for option in options if option != _OPTION)
    return f"{address}?{others}" if others else address, _OPTION in options


def find_primary(pool: Any) -> None:
    """Makes a pool of redis-py that has no connection yet use the classes above."""
    pool.connection_class = _PRIMARY_CLASSES.get(pool.connection_class, pool.connection_class)


def _primary(slots: Any, asked: str) -> tuple[str, int]:
    """Returns the address of the only primary in a reply to CLUSTER SLOTS. If the reply names no
    host, it is `asked`, the host that sent the reply. Raises ConnectionError."""
    primaries = {(shard[2][0] or asked.encode(), int(shard[2][1])) for shard in slots}
    if len(primaries) != 1:
        raise ConnectionError(f"the cluster has {len(primaries)} shards; batchway needs one")
    [(host, port)] = primaries
    return host.decode(), port
