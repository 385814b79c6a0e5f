"""Connections to one primary of a Redis cluster: the owner of the slot that holds a partition.

All keys of a client's partition lie in one slot, so the plain clients of redis-py and RQ work on
the primary that owns it, in a cluster of any number of shards. Redirections are not followed: the
connection ends, and the next command asks the cluster again. redis-py finds a primary by itself
only through Sentinel, whose `SentinelManagedConnection` these classes resemble.

Source: Redis cluster specification, "Client and server roles in the Redis cluster protocol".
"""

from binascii import crc_hqx
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,
    MasterDownError,
    ReadOnlyError,
    TimeoutError,
    TryAgainError,
)

_OPTION = "cluster=true"  # the query of a URL
_NUM_SLOTS = 16_384
_MAX_ASKED = 3  # servers for one connection: each may take a connection's whole timeout
# A MovedError is an AskError. ASK is not followed to the server that the slot moves to: a function
# there would see some keys of the slot only. Until the move is over, its calls are refused.
_NOT_SERVED = (AskError, TryAgainError, ReadOnlyError, ClusterDownError, MasterDownError)
_NO_ANSWER = (ConnectionError, TimeoutError, OSError)

Address = tuple[str, int]


class SlotOwner:
    """The slot of a pool's keys, and the servers to ask for its primary: the URL's, and those that
    they have named."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        inside = tag.partition("{")[2].partition("}")[0] or tag
        self._slot = crc_hqx(inside.encode(), 0) % _NUM_SLOTS
        self._servers: list[Address] = []

    def to_ask(self, url_address: Address) -> list[Address]:
        if url_address not in self._servers:
            self._servers = [*self._servers, url_address]
        return self._servers[:_MAX_ASKED]

    def distrust(self, address: Address) -> None:
        """Asks this server last: it did not answer, or named a server that does not serve."""
        self._servers = [*(known for known in self._servers if known != address), address]

    def primary(self, slots: Any, asked: Address) -> Address:
        """The primary in the reply of a server to CLUSTER SLOTS. Raises ConnectionError."""
        primaries = [(first, last, _address(node, asked[0])) for first, last, node, *_ in slots]
        self._servers = [*dict.fromkeys((asked, *(address for _, _, address in primaries)))]
        for first, last, address in primaries:
            if first <= self._slot <= last:
                return address
        raise ConnectionError(f"no server of the cluster has the slot of {self._tag}")


def _address(node: Any, asked_host: str) -> Address:
    """A reply without a host means the host that sent it."""
    host, port = node[0] or asked_host.encode(), int(node[1])
    return host.decode(), port


class PrimaryConnection(redis.asyncio.Connection):
    """Connects to the primary that the server at `host` and `port` names."""

    plain_class: Any = redis.asyncio.Connection

    def __init__(self, *, owner: SlotOwner, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._owner = owner
        self._options = kwargs
        self._url_address = self.host, self.port
        self._named_by = self._url_address

    async def connect(self) -> None:
        """Raises ConnectionError also if no server of the cluster has the slot."""
        if not self.is_connected:
            self.host, self.port = await self._find_primary()
        try:
            await super().connect()  # type: ignore[no-untyped-call]
        except _NO_ANSWER:
            self._owner.distrust(self._named_by)
            raise

    async def _find_primary(self) -> Address:
        error: Exception = ConnectionError("no server of the cluster is known")
        for address in self._owner.to_ask(self._url_address):
            try:
                primary = self._owner.primary(await self._slots_by(*address), address)
            except _NO_ANSWER as exc:
                error = exc
                self._owner.distrust(address)
            else:
                self._named_by = address
                return primary
        raise error

    async def _slots_by(self, host: str, port: int) -> Any:
        """Asks over another connection, since a PubSub subscribes as soon as this one is open."""
        asked = self.plain_class(**(self._options | {"host": host, "port": port}))
        try:
            await asked.connect()
            await asked.send_command("CLUSTER", "SLOTS")
            return await asked.read_response()
        finally:
            await asked.disconnect()

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        """A server that does not serve the slot ends the connection with a ConnectionError, so that
        the next command looks for the one that does."""
        try:
            return await super().read_response(*args, **kwargs)
        except _NOT_SERVED as exc:
            self._owner.distrust(self._named_by)
            await self.disconnect()
            raise ConnectionError("the server does not serve this slot of its cluster") from exc


class PrimarySSLConnection(PrimaryConnection, redis.asyncio.SSLConnection):
    """The same with TLS."""

    plain_class = redis.asyncio.SSLConnection


class BlockingPrimaryConnection(redis.Connection):
    """The same for the blocking client."""

    plain_class: Any = redis.Connection

    def __init__(self, *, owner: SlotOwner, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self._owner = owner
        self._options = kwargs
        self._url_address = self.host, self.port
        self._named_by = self._url_address

    def connect(self) -> None:
        if not self.is_connected:
            self.host, self.port = self._find_primary()
        try:
            super().connect()  # type: ignore[no-untyped-call]
        except _NO_ANSWER:
            self._owner.distrust(self._named_by)
            raise

    def _find_primary(self) -> Address:
        error: Exception = ConnectionError("no server of the cluster is known")
        for address in self._owner.to_ask(self._url_address):
            try:
                primary = self._owner.primary(self._slots_by(*address), address)
            except _NO_ANSWER as exc:
                error = exc
                self._owner.distrust(address)
            else:
                self._named_by = address
                return primary
        raise error

    def _slots_by(self, host: str, port: int) -> Any:
        asked = self.plain_class(**(self._options | {"host": host, "port": port}))
        try:
            asked.connect()
            asked.send_command("CLUSTER", "SLOTS")
            return asked.read_response()
        finally:
            asked.disconnect()

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().read_response(*args, **kwargs)
        except _NOT_SERVED as exc:
            self._owner.distrust(self._named_by)
            self.disconnect()  # type: ignore[no-untyped-call]
            raise ConnectionError("the server does not serve this slot of its cluster") from exc


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


def pool_from_url(pool_class: Any, url: str, tag: str, **options: Any) -> Any:
    """A pool of redis-py. With `cluster=true` in the URL's query its connections lead to the
    primary that owns the slot of `tag`."""
    plain, is_cluster = plain_url(url)
    pool = pool_class.from_url(plain, **options)
    if is_cluster and pool.connection_class in _PRIMARY_CLASSES:
        pool.connection_class = _PRIMARY_CLASSES[pool.connection_class]
        pool.connection_kwargs["owner"] = SlotOwner(tag)
    return pool
