"""Connections to the primary of a Redis cluster with one shard.

A durable ElastiCache or MemoryDB is always a cluster, and its address may lead to a replica. One
shard holds all keys, so the plain clients of redis-py and RQ work on its primary. redis-py finds a
primary by itself only through Sentinel, whose `SentinelManagedConnection` these classes resemble.

Source: Redis cluster specification, "Client and server roles in the Redis cluster protocol".
"""

from typing import Any

import redis.asyncio.connection
import redis.connection
from redis.exceptions import ClusterDownError, ConnectionError, MovedError, ReadOnlyError

_OPTION = "cluster=true"  # the query of a URL
_NOT_PRIMARY = (MovedError, ReadOnlyError, ClusterDownError)


class PrimaryConnection(redis.asyncio.connection.Connection):
    """Connects to the primary that the server at `host` and `port` names.

    A server that is no longer the primary ends the connection with a ConnectionError, so that the
    next command looks for the new one.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._address = self.host, self.port

    async def connect(self) -> None:
        """Raises ConnectionError also where the cluster has not exactly one shard."""
        if self.is_connected:
            return
        self.host, self.port = self._address
        await super().connect()  # type: ignore[no-untyped-call]
        await self.send_command("CLUSTER", "SLOTS")
        address = _primary(await self.read_response(), self.host)
        if address != self._address:
            await self.disconnect()
            self.host, self.port = address
            await super().connect()  # type: ignore[no-untyped-call]

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().read_response(*args, **kwargs)
        except _NOT_PRIMARY as exc:
            await self.disconnect()
            raise ConnectionError("the server is not the primary of its cluster") from exc


class PrimarySSLConnection(PrimaryConnection, redis.asyncio.connection.SSLConnection):
    """The same with TLS."""


class BlockingPrimaryConnection(redis.connection.Connection):
    """The same for the blocking client."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self._address = self.host, self.port

    def connect(self) -> None:
        if self.is_connected:
            return
        self.host, self.port = self._address
        super().connect()  # type: ignore[no-untyped-call]
        self.send_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]
        address = _primary(self.read_response(), self.host)
        if address != self._address:
            self.disconnect()  # type: ignore[no-untyped-call]
            self.host, self.port = address
            super().connect()  # type: ignore[no-untyped-call]

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().read_response(*args, **kwargs)
        except _NOT_PRIMARY as exc:
            self.disconnect()  # type: ignore[no-untyped-call]
            raise ConnectionError("the server is not the primary of its cluster") from exc


class BlockingPrimarySSLConnection(BlockingPrimaryConnection, redis.connection.SSLConnection):
    """The same with TLS for the blocking client."""


_PRIMARY_CLASSES = {
    redis.asyncio.connection.Connection: PrimaryConnection,
    redis.asyncio.connection.SSLConnection: PrimarySSLConnection,
    redis.connection.Connection: BlockingPrimaryConnection,
    redis.connection.SSLConnection: BlockingPrimarySSLConnection,
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
    """The address of the only primary in a reply to CLUSTER SLOTS of the host `asked`, which is the
    primary's where the reply names none. Raises ConnectionError."""
    primaries = {(shard[2][0] or asked.encode(), int(shard[2][1])) for shard in slots}
    if len(primaries) != 1:
        raise ConnectionError(f"the cluster has {len(primaries)} shards; batchway needs one")
    [(host, port)] = primaries
    return host.decode(), port
