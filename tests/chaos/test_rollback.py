"""A Redis that has lost its last writes, and workers that remember them."""

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from contract.connection import connect
from contract.functions import Functions
from contract.jobs import Job, JobStatus
from contract.keys import Keys
from contract.library import ensure_library
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions, expected_output
from tests.fleet import Answer, Caller, fleet

pytestmark = [pytest.mark.anyio, pytest.mark.e2e]

SLOW = HashModelOptions(step_s=0.02, eos_rate=0.0)
NUM_JOBS = 8


def append_only_file(data_dir: Path) -> Path:
    [path] = (data_dir / "appendonlydir").glob("*.incr.aof")
    return path


@contextlib.asynccontextmanager
async def power_failing_redis(
    data_dir: Path, keys: Keys
) -> AsyncIterator[tuple[EmbeddedRedis, Caller]]:
    """A server whose append-only file may be cut, and a caller of it. A write is in the file before
    it is answered: with `everysec` it waits while older writes are synced."""
    with EmbeddedRedis(data_dir, fsync="always") as server:
        client = connect(server.url, Keys("test"))
        await ensure_library(client)
        try:
            yield server, Caller(Functions(client, keys), client, keys)
        finally:
            await client.aclose()


def assert_exact(job: Job, answer: Answer) -> None:
    assert [end.status for end in answer.ends] == [JobStatus.SUCCEEDED]
    expected, _ = expected_output(job.prompt_ids, job.params, eos_rate=0.0)
    assert answer.token_ids[0] == expected


async def test_a_job_whose_claim_was_lost_is_run_again_by_the_same_worker(
    tmp_path: Path, keys: Keys
) -> None:
    """The power fails after a claim, and Redis restarts with its state before the claim. The worker
    claims the same job with the same epoch while its engine still computes the first claim."""
    async with (
        power_failing_redis(tmp_path, keys) as (server, caller),
        fleet(server.url, 1, SLOW, lease_s=10.0) as [worker],
    ):
        await caller.num_workers(1)
        os.kill(worker.pid, signal.SIGSTOP)
        jobs = [await caller.submit(f"lost {i}", max_tokens=60) for i in range(NUM_JOBS)]
        num_bytes = append_only_file(tmp_path).stat().st_size
        os.kill(worker.pid, signal.SIGCONT)
        for job in jobs:
            await caller.has_output(job, 5)
        server.kill()
        os.truncate(append_only_file(tmp_path), num_bytes)
        server.start()
        for job in jobs:
            assert_exact(job, await caller.answer(job))


async def test_lost_events_cost_a_job_no_attempt(tmp_path: Path, keys: Keys) -> None:
    """The power fails during the output of the job's last attempt. The job resumes where its log
    ends."""
    async with power_failing_redis(tmp_path, keys) as (server, caller):
        job = await caller.submit("the last attempt", max_tokens=80)
        await caller.client.hset(keys.of("job", job.id), "max_attempts", 1)
        async with fleet(server.url, 1, SLOW, lease_s=10.0):
            await caller.has_output(job, 5)
            num_bytes = append_only_file(tmp_path).stat().st_size
            await caller.has_output(job, 15)
            server.kill()
            os.truncate(append_only_file(tmp_path), num_bytes)
            server.start()
            assert_exact(job, await caller.answer(job))
