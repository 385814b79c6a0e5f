"""The Redis functions on a server in cluster mode: all their keys are in one slot."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from contract.events import ChoiceDelta, Tokens
from contract.function_types import Append, Release, Submission
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from contract.library import ensure_library
from infra.embedded_redis import find_server
from tests.contract.some_calls import make_job
from tests.ports import free_port

pytestmark = pytest.mark.anyio


@pytest.fixture
async def cluster_client(tmp_path: Path) -> AsyncIterator[redis.asyncio.Redis]:
    """A cluster of one server that owns every slot."""
    server, client = await start_server(tmp_path)
    try:
        await client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        while b"cluster_state:ok" not in await client.execute_command("CLUSTER", "INFO"):
            assert server.poll() is None
        yield client
    finally:
        await client.aclose()
        server.terminate()
        server.wait()


async def start_server(folder: Path) -> tuple[subprocess.Popen[bytes], Any]:
    """A running server and a client. If another process takes one of the two ports after they were
    found free, the server exits and two other ports are tried."""
    while True:
        port = free_port()
        server = subprocess.Popen(server_command(port, folder), stdout=subprocess.DEVNULL)  # noqa: ASYNC220
        while server.poll() is None:
            client: Any = redis.asyncio.Redis(host="127.0.0.1", port=port, protocol=2)
            try:
                async with asyncio.timeout(1):
                    if (await client.info("server"))["process_id"] == server.pid:
                        return server, client
            except (redis.RedisError, TimeoutError):  # not yet, or a stranger
                pass
            await client.aclose()


def server_command(port: int, folder: Path) -> list[str]:
    settings = {
        "port": port,
        "bind": "127.0.0.1",
        "cluster-enabled": "yes",
        "cluster-port": port + 1 if port < 65_535 else port - 1,
        "dir": folder,
        "save": "",
    }
    arguments = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return [str(find_server()), *arguments]


async def test_every_function_stays_in_its_slot(cluster_client: redis.asyncio.Redis) -> None:
    """A server in cluster mode refuses keys of other slots."""
    await ensure_library(cluster_client)
    functions = Functions(cluster_client, Keys("test"))
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
