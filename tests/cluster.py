"""A Redis cluster of several shards, each a primary with a replica, in processes of its own.

It does what `redis-cli --cluster create` and `reshard` do: the wheel's server has no redis-cli.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from binascii import crc_hqx
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from contract.cluster import pool_from_url
from contract.keys import Keys
from infra.embedded_redis import find_server
from tests.ports import lasting_port

NUM_SLOTS = 16_384
# A failed primary's replica takes over after about twice this time.
NODE_TIMEOUT_MS = 1_000
_ANSWER_TIMEOUT_S = 30.0


class Node:
    """A running server in cluster mode."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.folder = folder
        self._settings = settings
        folder.mkdir()
        self._start()
        self.id: str = self.run("CLUSTER", "MYID").decode()

    def _start(self) -> None:
        """If another process takes one of the two ports after they were found free, the server
        exits and two other ports are tried."""
        while True:
            self.port = lasting_port()
            self.server = subprocess.Popen(
                server_command(self.port, self.folder, *self._settings), stdout=subprocess.DEVNULL
            )
            self.client: Any = self._connect()
            while self.server.poll() is None:
                with contextlib.suppress(redis.RedisError):
                    if self.client.info("server")["process_id"] == self.server.pid:
                        return
                time.sleep(0.01)

    def _connect(self) -> redis.Redis:
        """Whoever listens at the port instead may never answer."""
        return redis.Redis(
            port=self.port,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=_ANSWER_TIMEOUT_S,
        )

    def run(self, *words: object) -> Any:
        return self.client.execute_command(*words)

    @property
    def url(self) -> str:
        """Of its socket, where it answers as a server by itself."""
        return f"unix://{self.folder}/redis.sock"

    def stop(self) -> None:
        self.client.close()
        self.server.kill()
        self.server.wait()

    def start_again(self, *settings: str) -> None:
        """After it was killed, on its ports; what it held is gone."""
        self.client.close()
        command = server_command(self.port, self.folder, *self._settings, *settings)
        self.server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.client = self._connect()
        until(self._answers)

    def _answers(self) -> bool:
        assert self.server.poll() is None, "it did not start again"
        with contextlib.suppress(redis.RedisError):
            return bool(self.client.ping())
        return False


def num_test_partitions() -> int:
    """1, or the number in BATCHWAY_TEST_PARTITIONS, which `scripts/with-redis cluster` sets."""
    return int(os.environ.get("BATCHWAY_TEST_PARTITIONS", "1"))


def partition_of_test() -> int:
    """The partition in which the running test of the contract has its keys: by its name."""
    name = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    return crc32(name.encode()) % num_test_partitions()


def cluster_port(port: int) -> int:
    return port + 1 if port < 65_535 else port - 1


def server_command(port: int, folder: Path, *settings: str) -> list[str]:
    values = {
        "port": port,
        "bind": "127.0.0.1",
        "cluster-enabled": "yes",
        "cluster-port": cluster_port(port),
        "cluster-node-timeout": NODE_TIMEOUT_MS,
        "cluster-replica-validity-factor": 0,
        "cluster-allow-replica-migration": "no",
        "dir": folder,
        "unixsocket": folder / "redis.sock",
        "save": "",
        "repl-diskless-sync-delay": 0,
        "maxmemory-policy": "noeviction",
    }
    arguments = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    return [str(find_server()), *arguments, *settings]


def slot_of(tag: str) -> int:
    return crc_hqx(tag.partition("{")[2].partition("}")[0].encode(), 0) % NUM_SLOTS


class RedisCluster:
    """Primaries that share the slots evenly, and as many replicas."""

    def __init__(self, *settings: str, num_shards: int = 3, has_replicas: bool = True) -> None:
        self._settings = settings
        self._num_shards = num_shards
        self._has_replicas = has_replicas
        self.primaries: list[Node] = []
        self.replicas: list[Node] = []

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="bw-", dir="/tmp"))
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def nodes(self) -> list[Node]:
        return [*self.primaries, *self.replicas]

    @property
    def url(self) -> str:
        """Of the last node: a replica, if there are any."""
        return self.url_of(self.nodes[-1])

    @staticmethod
    def url_of(node: Node) -> str:
        return f"redis://127.0.0.1:{node.port}?cluster=true"

    def flush(self) -> None:
        for node in self.primaries:
            node.run("FLUSHALL")

    def _start(self) -> None:
        for index in range(self._num_shards * (1 + self._has_replicas)):
            node = Node(self._folder / str(index), *self._settings)
            (self.primaries if index < self._num_shards else self.replicas).append(node)
        edges = [NUM_SLOTS * index // self._num_shards for index in range(self._num_shards + 1)]
        for index, node in enumerate(self.nodes):
            node.run("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for node, first, end in zip(self.primaries, edges, edges[1:], strict=False):
            node.run("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        for node in self.nodes[1:]:
            self.nodes[0].run("CLUSTER", "MEET", "127.0.0.1", node.port, cluster_port(node.port))
        until(lambda: all(self._knows_all(node) for node in self.nodes))
        for primary, replica in zip(self.primaries, self.replicas, strict=False):
            replica.run("CLUSTER", "REPLICATE", primary.id)
        until(self.is_whole)

    def _knows_all(self, node: Node) -> bool:
        lines: bytes = node.run("CLUSTER", "NODES")
        return lines.count(b"\n") == len(self.nodes) and b"handshake" not in lines

    def is_whole(self) -> bool:
        """Whether each node knows all primaries and slots, and each replica follows."""
        return all(
            b"cluster_state:ok" in node.run("CLUSTER", "INFO")
            and len(node.run("CLUSTER", "SLOTS")) >= len(self.primaries)
            for node in self.nodes
        ) and all(node.run("ROLE")[3:4] == [b"connected"] for node in self.replicas)

    def owner(self, tag: str) -> Node:
        """The primary that has the slot of a tag by its own account."""
        slot = slot_of(tag)
        [owner] = [node for node in self.nodes if _has(node, slot)]
        return owner

    def move(self, tag: str, target: Node, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Moves the slot of a tag key by key; `meanwhile` runs with half of the keys moved."""
        slot, source = slot_of(tag), self.owner(tag)
        target.run("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
        source.run("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)
        names = source.run("CLUSTER", "GETKEYSINSLOT", slot, 1_000_000)
        _migrate(source, target, names[: len(names) // 2])
        meanwhile()
        while names := source.run("CLUSTER", "GETKEYSINSLOT", slot, 1_000):
            _migrate(source, target, names)
        for node in (target, source, *self.primaries):
            if _role(node) == b"master":
                node.run("CLUSTER", "SETSLOT", slot, "NODE", target.id)

    def move_at_once(self, tag: str, target: Node) -> None:
        """Moves the slot of a tag in one step, as Valkey 9 can."""
        slot, source = slot_of(tag), self.owner(tag)
        # By default the move waits for a moment without writes, which busy callers may not leave.
        source.run("CONFIG", "SET", "slot-migration-max-failover-repl-bytes", -1)
        source.run("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target.id)
        until(lambda: _has(target, slot))


def _migrate(source: Node, target: Node, names: Sequence[bytes]) -> None:
    if names:
        source.run("MIGRATE", "127.0.0.1", target.port, "", 0, 5_000, "KEYS", *names)


def _role(node: Node) -> bytes:
    return bytes(node.run("ROLE")[0])


def _has(node: Node, slot: int) -> bool:
    if node.server.poll() is not None or _role(node) != b"master":
        return False
    return any(
        first <= slot <= last and owner[2].decode() == node.id
        for first, last, owner, *_ in node.run("CLUSTER", "SLOTS")
    )


def until(holds: Callable[[], bool], limit_s: float = 30.0) -> None:
    """Waits until servers of a cluster agree, which they tell nobody."""
    give_up_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < give_up_s, "the cluster did not come together"
        time.sleep(0.02)


def plain_client(url: str, keys: Keys) -> redis.Redis:
    """A blocking client of the server that holds a partition, in a cluster or not."""
    return redis.Redis.from_pool(pool_from_url(redis.ConnectionPool, url, keys.tag))
