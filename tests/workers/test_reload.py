"""batching.yaml in a real worker: read at the start, and again on SIGHUP."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions
from tests.fleet import Caller, WorkerProcess, until
from tests.workers.test_supervisor import assert_exact
from workers import configuration
from workers.ipc.messages import DEFAULT_PLACES
from workers.supervisor.supervisor import EXIT_LOAD_FAILED

pytestmark = [pytest.mark.anyio, pytest.mark.e2e]

SLOW = HashModelOptions(step_s=0.005, eos_rate=0.0)


async def runs_on(caller: Caller, text: str) -> bool:
    """Whether a worker has reported this file's version."""
    version = configuration.parse(text).version
    return any(info["batching"] == version for info in await caller.worker_info())


def change(path: Path, worker: WorkerProcess, text: str) -> None:
    """Writes the worker's file anew and sends SIGHUP."""
    path.write_text(text)
    os.kill(worker.pid, signal.SIGHUP)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A batching.yaml without strategies."""
    path = tmp_path / "batching.yaml"
    path.write_text("max_num_seqs: 4\n")
    return path


@pytest.fixture
async def worker(redis_server: EmbeddedRedis, path: Path) -> AsyncIterator[WorkerProcess]:
    worker = WorkerProcess(redis_server.url, SLOW, batching_path=str(path), notice="slow")
    yield worker
    await worker.close()


async def test_a_reload_under_load_loses_no_token(
    caller: Caller, worker: WorkerProcess, path: Path
) -> None:
    """Jobs continue after a change of strategy, and after a file with errors."""
    jobs = [await caller.submit(f"before {n}", max_tokens=60) for n in range(6)]
    await caller.has_output(jobs[0], 5)

    change(path, worker, changed := "strategy: {name: static, batch_size: 2, window_s: 0.05}\n")
    await until(lambda: runs_on(caller, changed))
    change(path, worker, "strategy: unheard of\n")
    jobs += [await caller.submit(f"after {n}", max_tokens=20) for n in range(3)]

    for job in jobs:
        assert_exact(job, await caller.answer(job), SLOW)
    assert await runs_on(caller, changed)


async def test_a_lane_that_a_reload_adds_is_served(
    caller: Caller, worker: WorkerProcess, path: Path
) -> None:
    """The next claim uses the new file."""
    await caller.num_workers(1)
    change(path, worker, changed := "lanes:\n  urgent: {priority: 0}\n")
    await until(lambda: runs_on(caller, changed))

    job = await caller.submit("in a new lane", lane="urgent", max_tokens=5)

    assert_exact(job, await caller.answer(job), SLOW)


async def test_a_reload_changes_the_places_of_our_own_engine(
    caller: Caller, worker: WorkerProcess, path: Path
) -> None:
    async def has_places(number: int) -> bool:
        return [info["places"] for info in await caller.worker_info()] == [number]

    await until(lambda: has_places(4))
    assert [info["notice"] for info in await caller.worker_info()] == ["slow"]
    change(path, worker, "max_num_seqs: 2\n")
    await until(lambda: has_places(2))
    change(path, worker, "token_budget: 100\n")
    await until(lambda: has_places(DEFAULT_PLACES))


async def test_a_worker_does_not_start_on_a_file_with_errors(
    redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    """Otherwise it would run with other limits than its operator expects."""
    path = tmp_path / "batching.yaml"
    path.write_text("max_num_seqs: none\n")

    worker = WorkerProcess(redis_server.url, SLOW, batching_path=str(path), notice="slow")

    assert worker.wait(20.0) == EXIT_LOAD_FAILED
