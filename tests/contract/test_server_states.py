"""A server that answers, but not what was asked for: each state has its reason, and no data."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from redis.exceptions import ResponseError

from contract.connection import broker_errors, connect
from contract.errors import (
    BatchwayError,
    BrokerFull,
    BrokerReplica,
    BrokerUnavailable,
    BrokerUnfit,
    CommandDenied,
    LibraryMissing,
    WireError,
)
from contract.functions import Functions
from contract.keys import Keys
from contract.library import check_fitness

pytestmark = pytest.mark.anyio

SECRET = "what a caller has written"
ANSWERS: list[tuple[str, type[BatchwayError], str]] = [
    ("-READONLY You can't write against a read only replica.", BrokerReplica, "replica"),
    ("-LOADING Redis is loading the dataset in memory", BrokerUnavailable, "BusyLoading"),
    ("-BUSY Redis is busy running a script. You can only", BrokerUnavailable, "BUSY Redis is busy"),
    ("-MASTERDOWN Link with MASTER is down", BrokerUnavailable, "MASTER is down"),
    ("-CLUSTERDOWN Hash slot not served", BrokerUnavailable, "Hash slot not served"),
    ("-TRYAGAIN Multiple keys request", BrokerUnavailable, "Multiple keys"),
    ("-MOVED 3999 127.0.0.1:6381", BrokerUnavailable, "cluster=true"),
    ("-NOREPLICAS Not enough good replicas to write.", BrokerUnavailable, "Not enough good"),
    ("-OOM command not allowed when used memory > 'maxmemory'.", BrokerFull, "memory"),
    ("-MISCONF Redis is configured to save RDB snapshots", BrokerFull, "disk"),
    ("-NOAUTH Authentication required.", BrokerUnavailable, "credentials"),
    ("-WRONGPASS invalid username-password pair", BrokerUnavailable, "credentials"),
    ("-NOPERM User default has no permissions", CommandDenied, "denies its user 'default'"),
    ("-DENIED Redis is running in protected mode", BrokerUnavailable, "protected mode"),
    ("-ERR max number of clients reached", BrokerUnavailable, "does not answer"),
    ("-ERR DB index is out of range", BrokerUnavailable, "DB index is out of range"),
    ("-ERR Function not found", LibraryMissing, "function library"),
    (
        f"-ERR unknown command 'FCALL', with args beginning with: '{SECRET}' ",
        BrokerUnavailable,
        "unknown command 'FCALL'",
    ),
    ("-NEWCODE of a later version", BrokerUnavailable, "NEWCODE of a later version"),
    ("HTTP/1.1 400 Bad Request", BrokerUnavailable, "no Redis"),
]


@contextlib.asynccontextmanager
async def server_of(answer: bytes) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of a server that gives this answer to all that it receives."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(2**16):
                writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, connect(url, Keys("test")) as client:
        yield client


@pytest.mark.parametrize(("answer", "kind", "reason"), ANSWERS)
async def test_each_state_of_a_server_has_its_reason(
    answer: str, kind: type[BatchwayError], reason: str
) -> None:
    """In a plain command, in the check at the start, and in a function."""
    async with server_of(f"{answer}\r\n".encode()) as client:

        async def plain() -> None:
            with broker_errors(client, "SET"):
                await client.set("key", SECRET)

        async def function() -> None:
            await Functions(client, Keys("test")).cancel("job-0-1", SECRET)

        for call in (plain, function, lambda: check_fitness(client)):
            with pytest.raises(BatchwayError, match=reason) as refusal:
                await call()
            assert type(refusal.value) is kind
            assert SECRET not in str(refusal.value)


@pytest.mark.parametrize(
    "answer",
    [
        "-WRONGTYPE Operation against a key holding the wrong kind of value",
        "-ERR hash value is not an integer script: batchway_v1_cancel, on @user_function:7.",
    ],
)
async def test_an_error_about_the_data_of_a_key_is_none_of_the_server(answer: str) -> None:
    """It fails one job, and opens no circuit breaker."""
    async with server_of(f"{answer}\r\n".encode()) as client:
        with pytest.raises(ResponseError), broker_errors(client, "HINCRBY"):
            await client.hincrby("key", "field", 1)
        with pytest.raises(WireError):
            await Functions(client, Keys("test")).cancel("job-0-1", "tenant")


@pytest.mark.parametrize(
    ("version", "is_fit"), [("6.2.14", False), ("7.0.0", True), ("10.1", True)]
)
async def test_a_version_without_functions_is_named(version: str, is_fit: bool) -> None:
    text = f"redis_version:{version}\r\nmaxmemory_policy:noeviction\r\n"
    async with server_of(f"${len(text)}\r\n{text}\r\n".encode()) as client:
        with contextlib.ExitStack() as expected:
            if not is_fit:
                expected.enter_context(pytest.raises(BrokerUnfit, match=f"Redis {version} has no"))
            await check_fitness(client)


async def test_a_client_of_a_replica_looks_for_the_primary_again() -> None:
    """After a failover a name leads to another server, but open connections to the former one."""
    connections: list[asyncio.StreamWriter] = []
    replica, primary = b"-READONLY You can't write\r\n", b"*1\r\n$9\r\nNOT_FOUND\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        answer = replica if len(connections) == 1 else primary
        while await reader.read(2**16):
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, connect(url, Keys("test")) as client:
        functions = Functions(client, Keys("test"))
        with pytest.raises(BrokerReplica):
            await functions.cancel("job-0-1", "tenant")
        assert await functions.cancel("job-0-1", "tenant") is None
    assert len(connections) == 2
