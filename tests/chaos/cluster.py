"""The campaign's cluster: three primaries with a replica each, which take over.

Each server is reached through a port in front of it, which it announces: there a replica is held
up before its primary is killed, so that a kill loses writes. With `awaits` a reply passes once the
replica has all that was written before it, as in services that log each write in two zones;
without, at once. Servers keep nothing on disk: one that was killed starts again, empty, as a
replica.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from contract.connection import connect, end_tasks
from contract.errors import BrokerUnavailable
from contract.keys import Keys
from contract.partitions import made_number
from tests.chaos.ledger import Cut
from tests.chaos.proxy import Link
from tests.cluster import NUM_SLOTS, Node, RedisCluster, slot_of, until

MAX_LAG_S = 0.5  # of a replica
REST_S = 3.0  # between two failovers: each grants leases a grace
NUM_SHARDS = 3


class EntryLink(Link):
    """Leads to any server that runs, which names the others."""

    @property
    def url(self) -> str:
        return f"{super().url}?cluster=true"


class NodeLink(Link):
    """In front of one server. `key` lies in a slot of its shard."""

    def __init__(self, node: Node, key: str, *, awaits: bool) -> None:
        self._socket_path_of_node = node.folder / "redis.sock"
        super().__init__(lambda: self._socket_path_of_node)
        self.passes_replication = asyncio.Event()
        self.passes_replication.set()
        self._key = key
        self._awaits = awaits
        self._held: list[asyncio.Future[None]] = []
        self._has_held = asyncio.Event()
        self._client = redis.asyncio.Redis.from_url(
            node.url, protocol=2, retry=Retry(NoBackoff(), 0)
        )
        self._releasing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await super().start()
        self._releasing = asyncio.create_task(self._release())

    async def close(self) -> None:
        if self._releasing is not None:
            await end_tasks(self._releasing)
        await super().close()
        await self._client.aclose()

    async def before_reply(self, command: bytes, reply: bytes) -> None:
        """Raises ConnectionError if the server ends, or is no primary any more, before its replica
        has what it had written."""
        if b"PSYNC" in command[:20] or b"REPLCONF" in command[:20]:
            await self.passes_replication.wait()
        elif self._awaits and not _shows_nothing(command, reply):
            future = asyncio.get_running_loop().create_future()
            self._held.append(future)
            self._has_held.set()
            await future

    async def _release(self) -> None:
        """WAIT counts from the last write of its own connection, so it writes first."""
        while True:
            await self._has_held.wait()
            self._has_held.clear()
            held, self._held = self._held, []
            error: Exception | None = None
            try:
                await self._client.set(self._key, "")
                await self._client.wait(1, 0)
            except (redis.RedisError, OSError) as exc:
                error = ConnectionResetError(str(exc))
            for future in held:
                if future.done():
                    continue
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)


def _shows_nothing(command: bytes, reply: bytes) -> bool:
    """Replies that no write precedes: refusals, to the PING of a replica, and of the map of slots.
    Messages to subscribers are held up too."""
    return reply.startswith((b"-", b"+PONG")) or command.startswith(b"*2\r\n$7\r\nCLUSTER")


class Shard:
    """A primary and its replica, which change places."""

    def __init__(self, number: int, primary: Node, replica: Node, *, awaits: bool) -> None:
        self.number = number
        self.primary = primary
        self.replica = replica
        key = next(f"{{{n}}}awaited" for n in range(1000) if shard_of(f"{{{n}}}") == number)
        self.links = {node: NodeLink(node, key, awaits=awaits) for node in (primary, replica)}


def shard_of(tag: str) -> int:
    return next(n for n in range(NUM_SHARDS) if slot_of(tag) < NUM_SLOTS * (n + 1) // NUM_SHARDS)


class ChaosCluster:
    """`cuts` holds the failovers that lost writes; `num_bytes_lost` what the killed primaries had
    written and their replicas had not received."""

    def __init__(
        self, namespace: str, num_partitions: int, rng: random.Random, *, awaits: bool
    ) -> None:
        self.cuts: list[Cut] = []
        self.num_bytes_lost = 0
        self._namespace = namespace
        self._num_partitions = num_partitions
        self._rng = rng
        self._awaits = awaits
        self._cluster = RedisCluster()
        self._shards: list[Shard] = []
        self._is_busy = False
        self._open = AsyncExitStack()
        self.entry = self.new_entry()

    def new_entry(self) -> Link:
        return EntryLink(self._running_socket)

    def _running_socket(self) -> Path:
        nodes = [shard.primary for shard in self._shards if shard.primary.server.poll() is None]
        return self._rng.choice(nodes).folder / "redis.sock"

    async def start(self) -> None:
        await asyncio.to_thread(self._cluster.__enter__)
        pairs = zip(self._cluster.primaries, self._cluster.replicas, strict=True)
        for number, (primary, replica) in enumerate(pairs):
            shard = Shard(number, primary, replica, awaits=self._awaits)
            self._shards.append(shard)
            for node, link in shard.links.items():
                await link.start()
                self._open.push_async_callback(link.close)
                node.run("CONFIG", "SET", "cluster-announce-port", link.port)
        await self.entry.start()
        self._open.push_async_callback(self.entry.close)
        ports = {link.port for shard in self._shards for link in shard.links.values()}
        await asyncio.to_thread(until, lambda: all(_names(n) == ports for n in self._cluster.nodes))
        for shard in self._shards:  # replicas come again, through the links
            shard.primary.run("CLIENT", "KILL", "TYPE", "replica")
        await asyncio.to_thread(until, self._cluster.is_whole)
        async with connect(self.entry.url, Keys(self._namespace)) as client:
            await made_number(client, Keys(self._namespace), self._num_partitions)

    async def close(self) -> None:
        await self._open.aclose()

    def stop(self) -> None:
        self._cluster.__exit__()

    def is_struck(self, cut: Cut, partition: int) -> bool:
        """Whether a cut may have struck what a partition holds."""
        return cut.shard == shard_of(Keys(self._namespace, partition).tag)

    # --- servers ------------------------------------------------------------------------------

    async def kill_primary(self) -> bool:
        return await self._alone(self._kill_primary)

    async def promote_replica(self) -> bool:
        return await self._alone(self._promote_replica)

    async def _alone(self, fault: Callable[[], Awaitable[bool]]) -> bool:
        """False without an effect if another fault is under way, or nobody answers."""
        if self._is_busy:
            return False
        self._is_busy = True
        try:
            return await fault()
        except BrokerUnavailable:
            return False
        finally:
            self._is_busy = False

    async def _kill_primary(self) -> bool:
        """kill -9, with the replica behind. The server returns as its successor's replica."""
        shard = self._rng.choice(self._shards)
        killed, link = shard.primary, shard.links[shard.primary]
        begun_s = asyncio.get_running_loop().time()
        before = _written(killed)
        await asyncio.to_thread(until, lambda: shard.replica.run("ROLE")[4] >= before)
        link.passes_replication.clear()
        await asyncio.sleep(self._rng.uniform(0.1, MAX_LAG_S))
        await asyncio.to_thread(until, lambda: _written(killed) > before)
        killed.run("CLIENT", "PAUSE", 60_000, "WRITE")
        written = _written(killed)
        killed.server.kill()
        killed.server.wait()
        link.drop_all()
        link.passes_replication.set()
        await self._takes_over(shard)
        kept = shard.primary.run("INFO", "replication")["second_repl_offset"] - 1
        assert kept >= before, "the replica had what was acknowledged before the loss"
        if (lost := written - kept) > 0:
            self.num_bytes_lost += lost
            ended_s = asyncio.get_running_loop().time()
            self.cuts.append(Cut(begun_s, ended_s, shard.number))
        port = str(link.port)
        await asyncio.to_thread(killed.start_again, "--cluster-announce-port", port)
        await self._follows(shard)
        return True

    async def _promote_replica(self) -> bool:
        """A failover that an operator asks for: nothing is lost."""
        shard = self._rng.choice(self._shards)
        shard.replica.run("CLUSTER", "FAILOVER")
        await self._takes_over(shard)
        await self._follows(shard)
        return True

    async def _takes_over(self, shard: Shard) -> None:
        await asyncio.to_thread(until, lambda: shard.replica.run("ROLE")[0] == b"master")
        shard.primary, shard.replica = shard.replica, shard.primary

    async def _follows(self, shard: Shard) -> None:
        """Waits until the replica has what its primary has, and both know the cluster whole."""
        await asyncio.to_thread(until, lambda: _has_followed(shard))
        await asyncio.sleep(REST_S)


def _names(node: Node) -> set[int]:
    """The ports of all servers, as this one knows them."""
    slots = node.run("CLUSTER", "SLOTS")
    return {int(server[1]) for _, _, *servers in slots for server in servers}


def _written(node: Node) -> int:
    """The bytes that this primary has written for its replicas."""
    return int(node.run("INFO", "replication")["master_repl_offset"])


def _has_followed(shard: Shard) -> bool:
    role = shard.replica.run("ROLE")
    return (
        role[0] == b"slave"
        and role[3] == b"connected"
        and len(shard.primary.run("ROLE")[2]) == 1
        and all(b"cluster_state:ok" in node.run("CLUSTER", "INFO") for node in shard.links)
    )
