"""A waiting caller keeps its job alive; after its gateway is killed, the job is soon cancelled."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.connection import end_tasks
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.gateway.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio

ATTENDANCE_S = 1.0
TENANT = "default"


@pytest.fixture
def gateway_process(redis_server: EmbeddedRedis) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A gateway that can be killed, and its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "infra", "gateway", "--port=0", "--namespace=test"],
        env=os.environ
        | {"REDIS_URL": redis_server.url, "BATCHWAY_ATTENDANCE_S": str(ATTENDANCE_S)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process, process.stderr:
        line = next(line for line in process.stderr if "listening on" in line)
        yield process, f"http://127.0.0.1:{line.split()[-1]}"
        process.kill()


async def test_a_killed_gateway_s_call_is_cancelled_once_nobody_attends_to_it(
    gateway_process: tuple[subprocess.Popen[str], str],
    redis_client: redis.asyncio.Redis,
    functions: Functions,
    keys: Keys,
    idle_worker: FakeWorker,
) -> None:
    """While the gateway lives, the job waits; then its attendance expires."""
    process, url = gateway_process
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        body = {"model": idle_worker.model, "prompt": "hello"}
        call = asyncio.create_task(http.post("/v1/completions", json=body))
        [(job_id, first_ms)] = await attended(redis_client, keys, later_than_ms=0)
        await attended(redis_client, keys, later_than_ms=first_ms + 1000 * ATTENDANCE_S)
        assert (await functions.sweep()).num_unattended == 0

        process.send_signal(signal.SIGKILL)
        async with asyncio.timeout(10):
            while not (await functions.sweep()).num_unattended:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await end_tasks(call)
    found = await functions.read(job_id, TENANT)
    assert found is not None
    assert found[0].status is JobStatus.CANCELLED


async def attended(
    client: redis.asyncio.Redis, keys: Keys, *, later_than_ms: float
) -> list[tuple[str, float]]:
    """The jobs that need a caller, once one of them is attended until after the given time."""
    async with asyncio.timeout(15):
        while True:
            rows: Any = await client.zrange(keys.of("attended"), 0, -1, withscores=True)
            if any(until_ms > later_than_ms for _, until_ms in rows):
                return [(job_id.decode(), until_ms) for job_id, until_ms in rows]
            await asyncio.sleep(0.02)
