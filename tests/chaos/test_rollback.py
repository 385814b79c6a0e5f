"""A Redis that has lost its last writes, and the workers that remember them."""

import os
import signal
from pathlib import Path

import pytest

from contract.connection import connect
from contract.functions import Functions, ensure_library
from contract.jobs import JobStatus
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions, expected_output
from tests.fleet import Caller, fleet

pytestmark = pytest.mark.anyio

SLOW = HashModelOptions(step_s=0.02, eos_rate=0.0)
NUM_JOBS = 8


def append_only_file(data_dir: Path) -> Path:
    [path] = (data_dir / "appendonlydir").glob("*.incr.aof")
    return path


async def test_a_job_whose_claim_was_lost_is_run_again_by_the_same_worker(
    tmp_path: Path, keys: Keys
) -> None:
    """Power fails after a claim, and Redis comes back from before it: the worker claims the same
    job under the same epoch, while its engine still computes what nobody remembers."""
    with EmbeddedRedis(tmp_path) as server:
        client = connect(server.url)
        await ensure_library(client)
        caller = Caller(Functions(client, keys), client, keys)
        async with fleet(server.url, 1, SLOW, lease_s=10.0) as [worker]:
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
                answer = await caller.answer(job)
                assert [end.status for end in answer.ends] == [JobStatus.SUCCEEDED]
                expected, _ = expected_output(job.prompt_ids, job.params, eos_rate=0.0)
                assert answer.token_ids[0] == expected
        await client.aclose()
