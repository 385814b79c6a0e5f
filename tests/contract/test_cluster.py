"""Cluster mode: all keys of a partition are in one slot; a client finds its primary and follows
it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from contract.connection import broker_errors, connect, now_ms
from contract.errors import BrokerUnavailable
from contract.function_types import Append, Release, Submission
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from contract.library import LIBRARY, check_fitness, ensure_library
from tests.callbacks.test_rq_attacks import LAST, Runner
from tests.cluster import Node, RedisCluster, until
from tests.contract.relay import with_tls
from tests.contract.some_calls import append, claim, make_job, tokens
from workers.callbacks.rq_runner import open_redis

pytestmark = pytest.mark.anyio

KEYS = Keys("test")
SUBMISSION = Submission(max_output_tokens=10, deadline_s=60, retention_s=60, attendance_s=30)


@pytest.fixture(scope="module")
def three_shards() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(three_shards: RedisCluster) -> RedisCluster:
    """Empty and without the library; slots and users are as another test left them."""
    three_shards.flush()
    for node in three_shards.primaries:
        node.run("FUNCTION", "FLUSH")
    return three_shards


@pytest.fixture
def shard() -> Iterator[RedisCluster]:
    """A primary with its replica, which a test may kill; its URL names the replica."""
    with RedisCluster(num_shards=1) as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: RedisCluster) -> AsyncIterator[redis.asyncio.Redis]:
    """Its URL names the replica of the last shard."""
    async with connect(cluster.url, KEYS) as client:
        yield client


@pytest.fixture
def functions(client: redis.asyncio.Redis) -> Functions:
    return Functions(client, KEYS)


def other_primary(cluster: RedisCluster, tag: str = KEYS.tag) -> Node:
    owner = cluster.owner(tag)
    return next(node for node in cluster.primaries if node is not owner)


def names(node: Node, primary: Node) -> bool:
    """Whether a server knows another one as the primary of slots."""
    return any(owner[2].decode() == primary.id for _, _, owner, *_ in node.run("CLUSTER", "SLOTS"))


def holds_library(node: Node) -> bool:
    return bool(node.run("FUNCTION", "LIST", "LIBRARYNAME", LIBRARY))


async def submit(functions: Functions) -> str:
    return (await functions.submit(make_job(), SUBMISSION)).job_id


async def is_kept(functions: Functions, job_id: str) -> bool:
    return await functions.read(job_id, "t", max_events=9) is not None


async def test_each_namespace_is_served_by_the_primary_of_its_slot(cluster: RedisCluster) -> None:
    """Each primary is reached by some, from the address of any node."""
    served = set()
    for index in range(12):
        keys, node = Keys(f"n{index}"), cluster.nodes[index % 6]
        async with connect(cluster.url_of(node), keys) as client:
            await submit(Functions(client, keys))
            port = (await client.info("server"))["tcp_port"]
        assert port == cluster.owner(keys.tag).port
        served.add(port)
    assert served == {node.port for node in cluster.primaries}


async def test_every_function_stays_in_its_slot(functions: Functions) -> None:
    """A server in cluster mode refuses keys of other slots."""
    lanes = ("standard", "interactive")
    first, second = await submit(functions), await submit(functions)
    assert await functions.heartbeat("w", "m", [], lease_s=10.0, info="{}") == []
    claimed = await functions.claim("w", "m", lanes, lease_s=10.0, max_jobs=9, max_tokens=999)
    assert len(claimed) == 2
    assert len(await functions.mine("w", [first], lease_s=10.0)) == 1
    items = [Append(first, 1, 1, tokens(0, 7), 1, JobStatus.SUCCEEDED)]
    assert await functions.append("w", items, lease_s=10.0) == [("OK", 3)]
    assert await functions.attend([second]) == 1
    assert await functions.reprioritise(second, "t", lane="interactive") == "OK"
    assert await functions.drain(["w", "none"]) == [True, False]
    assert await functions.release("w", [Release(second, 1, "drain")]) == [("OK", 0)]
    assert await functions.sweep() is not None
    assert await functions.cancel(second, "t") is JobStatus.CANCELLED
    found = await functions.read(first, "t", max_events=9)
    assert found is not None
    assert [entry.number for entry in found[1]] == [1, 2]


async def test_a_slot_without_an_owner_is_named(shard: RedisCluster) -> None:
    for node in shard.nodes:
        node.run("CONFIG", "SET", "cluster-require-full-coverage", "no")
    [owner] = shard.primaries
    owner.run("CLUSTER", "FLUSHSLOTS")
    async with connect(shard.url_of(owner), KEYS) as client:
        with pytest.raises(redis.ConnectionError, match=r"has the slot of {bw:test:0}"):
            await client.get(KEYS.of("memory"))


async def test_a_client_finds_the_primary_over_tls(tmp_path: Path) -> None:
    """The server announces the name in its certificate and its TLS port."""
    with RedisCluster(num_shards=1, has_replicas=False) as cluster:
        [node] = cluster.nodes
        node.run("CONFIG", "SET", "cluster-announce-hostname", "localhost")
        node.run("CONFIG", "SET", "cluster-preferred-endpoint-type", "hostname")
        async with (
            with_tls(node, tmp_path) as (relay, url),
            connect(f"{url}&cluster=true", KEYS, connect_timeout_s=5.0) as client,
        ):
            node.run("CONFIG", "SET", "cluster-announce-port", relay.port)
            assert (await client.info("replication"))["role"] == "master"
            assert relay.num_connections == 2  # one asked for the primary
            rq_client = open_redis(f"{url}&cluster=true")
            known = await asyncio.to_thread(rq_client.info, "replication")
            assert known["role"] == "master"
            rq_client.close()


async def test_a_cluster_is_named_where_the_url_does_not(cluster: RedisCluster) -> None:
    url = cluster.url_of(other_primary(cluster)).removesuffix("?cluster=true")
    async with connect(url, KEYS) as client:
        with (
            pytest.raises(BrokerUnavailable, match=r"add \?cluster=true to its URL"),
            broker_errors(client, "GET"),
        ):
            await client.get(KEYS.of("memory"))


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_client_follows_a_failover(shard: RedisCluster, is_killed: bool) -> None:
    """An open connection leads to the old primary, which lives on as a replica, or is gone."""
    [primary], [replica] = shard.primaries, shard.replicas
    async with connect(shard.url, KEYS) as client:
        functions = Functions(client, KEYS)
        kept = await submit(functions)
        assert await client.wait(1, 0) == 1
        if is_killed:
            primary.server.kill()
        replica.run("CLUSTER", "FAILOVER", "TAKEOVER")  # a vote takes two other primaries
        await asyncio.to_thread(until, lambda: replica.run("ROLE")[0] == b"master")
        if not is_killed:
            await asyncio.to_thread(until, lambda: primary.run("ROLE")[0] == b"slave")
        await submit(functions)
        assert await is_kept(functions, kept)


async def test_a_subscription_outlives_its_connection(
    cluster: RedisCluster, client: redis.asyncio.Redis
) -> None:
    """redis-py connects and subscribes again in one step, before any other command."""

    async def next_type(pubsub: Any) -> str:
        return str((await pubsub.get_message(timeout=None))["type"])

    async with asyncio.timeout(20), client.pubsub() as pubsub:
        await pubsub.subscribe("channel")
        assert await next_type(pubsub) == "subscribe"
        cluster.owner(KEYS.tag).client.client_kill_filter(_type="pubsub")
        with pytest.raises(redis.ConnectionError):
            await next_type(pubsub)
        assert await next_type(pubsub) == "subscribe"
        await client.publish("channel", "text")
        assert await next_type(pubsub) == "message"


async def test_a_server_without_the_library_gets_it_at_the_first_call(
    cluster: RedisCluster, functions: Functions
) -> None:
    assert not holds_library(cluster.owner(KEYS.tag))
    await submit(functions)
    holders = [node for node in cluster.primaries if holds_library(node)]
    assert holders == [cluster.owner(KEYS.tag)]


async def test_a_user_who_may_not_load_the_library_is_told_that_it_is_missing(
    cluster: RedisCluster,
) -> None:
    for node in cluster.nodes:
        node.run("ACL", "SETUSER", "no-functions", "on", "nopass", "~*", "&*", "+@all", "-function")
    url = cluster.url.replace("://", "://no-functions:x@")
    async with connect(url, KEYS) as client:
        with pytest.raises(BrokerUnavailable, match="does not hold batchway's function library"):
            await submit(Functions(client, KEYS))


# What ElastiCache Serverless lacks: docs.aws.amazon.com, "Supported and restricted Valkey,
# Memcached, and Redis OSS commands".
LACKED = (
    "acl|setuser acl|deluser acl|load acl|save bgrewriteaof bgsave client|kill client|pause "
    "client|setinfo cluster|failover cluster|meet cluster|setslot config debug failover latency "
    "lastsave migrate module monitor move psync replicaof replconf save select shutdown slaveof "
    "slowlog swapdb sync wait"
)


async def test_a_job_runs_where_commands_of_serverless_caches_are_lacking(
    cluster: RedisCluster,
) -> None:
    """From the check of the server to the answer, and an attempt by RQ."""
    known = {command.decode() for command in cluster.nodes[0].client.command_list()}
    forbidden = [f"-{command}" for command in LACKED.split() if command in known]
    assert len(forbidden) > 30
    for node in cluster.nodes:
        node.run("ACL", "SETUSER", "serverless", "on", "nopass", "~*", "&*", "+@all", *forbidden)
    url = cluster.url.replace("://", "://serverless:x@")
    async with connect(url, KEYS) as client:
        with pytest.raises(redis.exceptions.NoPermissionError):
            await client.config_get("maxmemory")
        await check_fitness(client)
        await ensure_library(client)
        functions = Functions(client, KEYS)
        await run_job(functions, await submit(functions))
        assert await functions.sweep() is not None
        assert await now_ms(client) > 0
    await asyncio.to_thread(deliver_with_rq, url)


async def run_job(functions: Functions, job_id: str) -> None:
    assert await functions.heartbeat("w", "m", [], lease_s=10.0, info="{}") == []
    [claimed] = await claim(functions, "w")
    assert claimed.job.id == job_id
    items = [Append(job_id, claimed.epoch, 1, tokens(0, 7), 1, JobStatus.SUCCEEDED)]
    assert await append(functions, "w", *items) == [("OK", 3)]
    assert await is_kept(functions, job_id)


async def test_nothing_is_lost_while_a_slot_moves_key_by_key(
    cluster: RedisCluster, functions: Functions
) -> None:
    """Functions would see half of the keys, so they are refused until the move is over."""
    jobs = [await submit(functions) for _ in range(20)]
    target, loop, refused = other_primary(cluster), asyncio.get_running_loop(), []

    async def try_all() -> None:
        for call in (submit(functions), is_kept(functions, jobs[0]), is_kept(functions, jobs[-1])):
            with pytest.raises(BrokerUnavailable):
                await call
            refused.append(call)

    def meanwhile() -> None:
        asyncio.run_coroutine_threadsafe(try_all(), loop).result()

    await asyncio.to_thread(cluster.move, KEYS.tag, target, meanwhile)
    assert len(refused) == 3
    jobs.append(await submit(functions))
    assert all([await is_kept(functions, job) for job in jobs])
    assert cluster.owner(KEYS.tag) is target
    assert holds_library(target)


async def test_nothing_is_lost_while_a_slot_moves_at_once(
    cluster: RedisCluster, functions: Functions
) -> None:
    """Ten callers submit meanwhile; the server that takes over lacks the library."""
    if "MIGRATESLOTS" not in str(cluster.nodes[0].run("CLUSTER", "HELP")):
        pytest.skip("this server moves slots key by key only")
    jobs, is_over = [await submit(functions)], asyncio.Event()

    async def go_on() -> None:
        while not is_over.is_set():
            jobs.append(await submit(functions))

    async with asyncio.TaskGroup() as group:
        for _ in range(10):
            group.create_task(go_on())
        for target in (other_primary(cluster), cluster.owner(KEYS.tag)):
            await asyncio.to_thread(cluster.move_at_once, KEYS.tag, target)
            jobs.append(await submit(functions))
        is_over.set()
    assert all([await is_kept(functions, job) for job in jobs])


async def test_a_client_goes_on_if_the_server_in_its_url_is_gone() -> None:
    """It has heard of the others. The replica of the killed primary takes over by a vote."""
    with RedisCluster() as cluster:
        owner = cluster.owner(KEYS.tag)
        async with connect(cluster.url_of(owner), KEYS) as client:
            functions = Functions(client, KEYS)
            kept = await submit(functions)
            assert await client.wait(1, 0) == 1
            owner.stop()
            replica = cluster.replicas[cluster.primaries.index(owner)]
            others = [node for node in cluster.nodes if node is not owner]
            await asyncio.to_thread(until, lambda: all(names(node, replica) for node in others))
            await submit(functions)
            assert await is_kept(functions, kept)


async def test_hints_reach_subscribers_at_every_server(
    cluster: RedisCluster, functions: Functions, client: redis.asyncio.Redis
) -> None:
    """A subscription outlives a move of the slot: it stays where it was."""
    await ensure_library(client)
    channel = KEYS.of("wake", "m")
    listeners = []
    for node in cluster.nodes:
        listener = node.client.pubsub(ignore_subscribe_messages=True)
        listener.subscribe(channel)
        assert listener.get_message(timeout=20) is None  # of the subscription
        listeners.append(listener)
    await submit(functions)
    for listener in listeners:
        message = await asyncio.to_thread(listener.get_message, timeout=20)
        assert message is not None
        assert message["channel"].decode() == channel
        listener.close()


async def test_rq_runs_on_the_primary_of_its_slot(cluster: RedisCluster) -> None:
    await asyncio.to_thread(deliver_with_rq, cluster.url_of(other_primary(cluster, "{rq}")))


def deliver_with_rq(url: str) -> None:
    runner = Runner(url)
    runner.finish()
    assert runner.delivered == [LAST]
