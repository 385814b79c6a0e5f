"""A full disk under Redis: running jobs go on, and none is lost or taken away when it has room."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from contract.connection import Listener, broker_errors, connect
from contract.errors import BrokerFull, ErrorCode
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from contract.library import ensure_library
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions
from tests.fleet import Caller, fleet, until
from tests.gateway.conftest import make_settings, running_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.e2e]

SLOW = HashModelOptions(step_s=0.05, eos_rate=0.0)
LEASE_S = 2.0  # of the workers


class Disk:
    """A file system of a few megabytes, with a Redis on it."""

    def __init__(self, root: Path, redis_url: str) -> None:
        self.redis_url = redis_url
        self._filler = root / "filler"

    async def fill(self) -> None:
        """Returns once Redis refuses writes."""
        descriptor = os.open(self._filler, os.O_WRONLY | os.O_CREAT)
        with contextlib.suppress(OSError):
            while True:
                os.write(descriptor, b"x" * 4096)
        os.close(descriptor)
        client = connect(self.redis_url, Keys("test"))

        async def is_refused() -> bool:
            try:
                with broker_errors(client, "SET"):
                    await client.set("probe", b"x")
            except BrokerFull as full:
                return full.code is ErrorCode.DISK_FULL
            return False

        await until(is_refused)
        await client.aclose()

    def free(self) -> None:
        self._filler.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("only root can mount a small file system")
    try:
        with EmbeddedRedis(tmp_path / "data") as server:
            yield Disk(tmp_path, server.url)
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


@pytest.fixture
async def caller(disk: Disk) -> AsyncIterator[Caller]:
    keys = Keys("test")
    client = connect(disk.redis_url, keys)
    await ensure_library(client)
    yield Caller(Functions(client, keys), client, keys)
    await client.aclose()


@pytest.mark.campaign
async def test_running_jobs_go_on_after_a_full_disk(disk: Disk, caller: Caller) -> None:
    """For three leases Redis refuses all writes. The workers keep their jobs: each ends with its
    first attempt, no lease has lapsed, and no token is lost or repeated."""
    async with fleet(disk.redis_url, 2, SLOW) as workers:
        await caller.num_workers(2)
        jobs = [await caller.submit(f"prompt {n}", max_tokens=200) for n in range(4)]
        for job in jobs:
            await caller.has_output(job)

        await disk.fill()
        with pytest.raises(BrokerFull):
            await caller.submit("late")
        await asyncio.sleep(3 * LEASE_S)
        disk.free()

        for job in jobs:
            answer = await caller.answer(job)
            assert answer.ends[0].status is JobStatus.SUCCEEDED
            assert len(answer.token_ids[0]) == 200
            fields = ["attempt", "lapses", "epoch"]
            found = await caller.client.hmget(caller.keys.of("job", job.id), fields)
            assert found == [b"1", b"0", b"1"]
        assert all(worker.is_alive for worker in workers)
        late = await caller.submit("late", needs_worker=True)
        assert (await caller.answer(late)).ends[0].status is JobStatus.SUCCEEDED


async def test_a_waiting_call_outlives_a_full_disk(disk: Disk, caller: Caller) -> None:
    """It lasts for longer than a call without its caller may: no sweep cancels it afterwards. New
    calls are refused with the reason."""
    settings = make_settings(disk.redis_url, attendance_s=2.0, outage_grace_s=30.0)
    async with fleet(disk.redis_url, 1, SLOW):
        await caller.num_workers(1)
        with running_gateway(settings) as url:
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                body = {"model": "m", "prompt": "ab", "max_tokens": 150, "return_token_ids": True}
                call = asyncio.create_task(http.post("/v1/completions", json=body))

                async def is_running() -> bool:
                    info = await caller.worker_info()
                    return any(each.get("jobs_held") for each in info)

                await until(is_running)
                await disk.fill()
                refused = await http.post("/v1/completions", json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "disk_full")
                await asyncio.sleep(2 * settings.attendance_s)
                disk.free()
                answer = await call
                assert answer.status_code == 200, answer.text
                assert answer.json()["usage"]["completion_tokens"] == 150


async def test_a_subscription_outlives_a_full_disk(disk: Disk, caller: Caller) -> None:
    """Redis refuses its PINGs, but still delivers messages."""
    await disk.fill()
    received: list[bytes] = []
    async with caller.client.pubsub() as pubsub:
        await pubsub.subscribe("channel")
        listener = Listener(
            pubsub,
            lambda message: received.append(message["data"]) if message["data"] != 1 else None,
            look_s=0.1,
        )
        for _ in range(6):
            await listener.listen()
        await caller.client.publish("channel", "hello")

        async def is_received() -> bool:
            await listener.listen()
            return received == [b"hello"]

        await until(is_received)
