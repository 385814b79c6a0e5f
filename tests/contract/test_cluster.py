"""Cluster mode: all keys of the functions are in one slot, and clients find a shard's primary."""

import asyncio
import subprocess
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from contract.connection import broker_errors, connect
from contract.errors import BrokerUnavailable
from contract.events import ChoiceDelta, Tokens
from contract.function_types import Append, Release, Submission
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from contract.library import ensure_library
from contract.outbox import Taken
from infra.embedded_redis import find_server
from tests.contract.relay import with_tls
from tests.contract.some_calls import make_job
from tests.ports import free_port
from workers.callbacks.rq_runner import AttemptQueue, RqRunner, open_redis

pytestmark = pytest.mark.anyio


@dataclass(frozen=True, slots=True)
class Node:
    """A running server in cluster mode."""

    server: subprocess.Popen[bytes]
    client: Any  # redis.asyncio.Redis, whose execute_command has no types
    port: int
    url: str  # of its socket

    async def is_told(self, command: str, part: bytes) -> None:
        """Waits until the reply to a command contains `part`."""
        async with asyncio.timeout(20):
            while part not in await self.client.execute_command(*command.split()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@dataclass(frozen=True, slots=True)
class Shard:
    """A primary and its replica."""

    primary: Node
    replica: Node

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.replica.port}?cluster=true"

    async def fail_over(self) -> None:
        """Makes the replica the primary without a vote, which takes two other primaries."""
        await self.replica.client.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")
        await self.replica.is_told("ROLE", b"master")


@asynccontextmanager
async def run_node(folder: Path) -> AsyncIterator[Node]:
    """If another process takes one of the two ports after they were found free, the server exits
    and two other ports are tried."""
    folder.mkdir()  # noqa: ASYNC240
    node = None
    while node is None:
        node = await start_node(folder)
    try:
        yield node
    finally:
        await node.client.aclose()
        node.server.terminate()
        node.server.wait()


async def start_node(folder: Path) -> Node | None:
    port = free_port()
    server = subprocess.Popen(server_command(port, folder), stdout=subprocess.DEVNULL)  # noqa: ASYNC220
    while server.poll() is None:
        client: Any = redis.asyncio.Redis(host="127.0.0.1", port=port, protocol=2)
        try:
            async with asyncio.timeout(1):
                if (await client.info("server"))["process_id"] == server.pid:
                    return Node(server, client, port, f"unix://{folder}/redis.sock")
        except (redis.RedisError, TimeoutError):  # not yet, or a stranger
            pass
        await client.aclose()
    return None


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """A cluster of one server that owns every slot."""
    async with run_node(tmp_path / "primary") as node:
        await node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        await node.is_told("CLUSTER INFO", b"cluster_state:ok")
        yield node


@pytest.fixture
async def shard(node: Node, tmp_path: Path) -> AsyncIterator[Shard]:
    async with run_node(tmp_path / "replica") as replica:
        await replica.client.execute_command(
            "CLUSTER", "MEET", "127.0.0.1", node.port, cluster_port(node.port)
        )
        primary_id = await node.client.execute_command("CLUSTER", "MYID")
        await replica.is_told("CLUSTER NODES", primary_id)
        await replica.client.execute_command("CLUSTER", "REPLICATE", primary_id)
        await replica.is_told("ROLE", b"connected")
        await replica.is_told("CLUSTER INFO", b"cluster_state:ok")
        yield Shard(node, replica)


def cluster_port(port: int) -> int:
    return port + 1 if port < 65_535 else port - 1


def server_command(port: int, folder: Path) -> list[str]:
    settings = {
        "port": port,
        "bind": "127.0.0.1",
        "cluster-enabled": "yes",
        "cluster-port": cluster_port(port),
        "dir": folder,
        "unixsocket": folder / "redis.sock",
        "save": "",
        "repl-diskless-sync-delay": 0,
    }
    arguments = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return [str(find_server()), *arguments]


async def test_every_function_stays_in_its_slot(node: Node) -> None:
    """A server in cluster mode refuses keys of other slots."""
    await ensure_library(node.client)
    functions = Functions(node.client, Keys("test"))
    submission = Submission(max_output_tokens=10, deadline_s=60, retention_s=60, attendance_s=30)
    lanes = ("standard", "interactive")
    first, second = make_job(), make_job()
    for job in (first, second):
        assert (await functions.submit(job, submission)).is_new
    assert await functions.heartbeat("w", "m", [], lease_s=10.0, info="{}") == []
    claimed = await functions.claim("w", "m", lanes, lease_s=10.0, max_jobs=9, max_tokens=999)
    assert len(claimed) == 2
    assert len(await functions.mine("w", [first.id], lease_s=10.0)) == 1
    event = Tokens((ChoiceDelta(0, 0, (7,), "x"),))
    items = [Append(first.id, 1, 1, event, 1, JobStatus.SUCCEEDED)]
    assert await functions.append("w", items, lease_s=10.0) == [("OK", 3)]
    assert await functions.attend([second.id]) == 1
    assert await functions.reprioritise(second.id, "t", lane="interactive") == "OK"
    assert await functions.drain(["w", "none"]) == [True, False]
    assert await functions.release("w", [Release(second.id, 1, "drain")]) == [("OK", 0)]
    assert await functions.sweep() is not None
    assert await functions.cancel(second.id, "t") is JobStatus.CANCELLED
    found = await functions.read(first.id, "t", max_events=9)
    assert found is not None
    assert [entry.number for entry in found[1]] == [1, 2]


SUBMISSION = Submission(max_output_tokens=10, deadline_s=60, retention_s=60, attendance_s=30)


async def test_a_client_finds_the_primary(shard: Shard) -> None:
    """The URL names the replica."""
    client = connect(shard.url, Keys("test"))
    await ensure_library(client)
    functions, job = Functions(client, Keys("test")), make_job()
    assert (await functions.submit(job, SUBMISSION)).is_new
    assert (await client.info("replication"))["role"] == "master"
    await client.aclose()


async def test_a_client_finds_the_primary_over_tls(node: Node, tmp_path: Path) -> None:
    """The server announces the name in its certificate and its TLS port."""
    for option in (
        "cluster-announce-hostname localhost",
        "cluster-preferred-endpoint-type hostname",
    ):
        await node.client.config_set(*option.split())
    async with (
        with_tls(node, tmp_path) as (relay, url),
        connect(f"{url}&cluster=true", Keys("test"), connect_timeout_s=5.0) as client,
    ):
        await node.client.config_set("cluster-announce-port", relay.port)
        assert (await client.info("replication"))["role"] == "master"
        assert relay.num_connections == 2  # one asked for the primary
        rq_client = open_redis(f"{url}&cluster=true")
        known = await asyncio.to_thread(rq_client.info, "replication")
        assert known["role"] == "master"
        rq_client.close()


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_client_follows_a_failover(shard: Shard, is_killed: bool) -> None:
    """An open connection leads to the old primary, which lives on as a replica, or is gone."""
    client = connect(shard.url, Keys("test"))
    await ensure_library(client)
    functions, first, second = Functions(client, Keys("test")), make_job(), make_job()
    await functions.submit(first, SUBMISSION)
    assert await client.wait(1, 0) == 1
    if is_killed:
        shard.primary.server.kill()
    await shard.fail_over()
    if not is_killed:
        await shard.primary.is_told("ROLE", b"slave")
    assert (await functions.submit(second, SUBMISSION)).is_new
    assert await functions.read(first.id, "t", max_events=9) is not None
    await client.aclose()


async def test_a_subscription_outlives_its_connection(shard: Shard) -> None:
    """redis-py connects and subscribes again in one step, before any other command."""
    client = connect(shard.url, Keys("test"))
    async with asyncio.timeout(20), client.pubsub() as pubsub:
        await pubsub.subscribe("channel")
        assert await next_message(pubsub) == "subscribe"
        await shard.primary.client.client_kill_filter(_type="pubsub")
        with pytest.raises(redis.ConnectionError):
            await next_message(pubsub)
        assert await next_message(pubsub) == "subscribe"
        await client.publish("channel", "text")
        assert await next_message(pubsub) == "message"
    await client.aclose()


async def next_message(pubsub: Any) -> str:
    message = await pubsub.get_message(timeout=None)
    return str(message["type"])


async def test_a_cluster_is_named_where_the_url_does_not(shard: Shard) -> None:
    client = connect(shard.url.removesuffix("?cluster=true"), Keys("test"))
    with (
        pytest.raises(BrokerUnavailable, match=r"add \?cluster=true to its URL"),
        broker_errors(client, "GET"),
    ):
        await client.get("key")
    await client.aclose()


async def test_rq_runs_in_a_cluster(shard: Shard) -> None:
    """Its transactions span keys, which a cluster accepts in one slot only."""
    client = open_redis(shard.url)
    attempts = AttemptQueue(client, "test", "a key")
    delivered, is_done = [], threading.Event()

    def deliver(taken: Taken) -> None:
        delivered.append(taken)
        is_done.set()

    runner = RqRunner(attempts, client, deliver, lambda _: None, max_concurrent=1)
    runner.start()
    taken = Taken("job-0-" + "0" * 32, 1)
    attempts.put([taken])
    assert await asyncio.to_thread(is_done.wait, 20)
    await asyncio.to_thread(runner.stop)
    client.close()
    assert delivered == [taken]
