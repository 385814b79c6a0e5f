"""What callers and health checks are told while a worker loads an engine, or loads it again."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from contract.errors import ErrorCode, JobRefused
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions
from tests.fleet import Caller, WorkerProcess, fleet, until
from tests.workers.test_supervisor import assert_exact, children_of
from workers.supervisor.load_progress import AGAIN

pytestmark = [pytest.mark.anyio, pytest.mark.e2e]

SLOW = HashModelOptions(step_s=0.02, eos_rate=0.0)


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """Engines that load wait for it."""
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


@pytest.fixture
def model(fifo: Path) -> HashModelOptions:
    return structs.replace(SLOW, load_fifo=str(fifo))


def kill_engine(worker: WorkerProcess) -> None:
    [engine_pid] = children_of(worker.pid)
    os.kill(engine_pid, signal.SIGKILL)


async def let_load(fifo: Path) -> None:
    """Waits for an engine that loads, and lets it."""
    await asyncio.to_thread(lambda: fifo.open("w").close())


async def refusal_of(caller: Caller) -> JobRefused | None:
    """Of a synchronous call."""
    try:
        await caller.submit("call", needs_worker=True)
    except JobRefused as refused:
        return refused
    return None


@pytest.mark.parametrize("lane", ["standard", "batch"])
async def test_calls_are_refused_while_the_only_engine_is_loaded_again(
    caller: Caller, redis_server: EmbeddedRedis, fifo: Path, model: HashModelOptions, lane: str
) -> None:
    """With the time at which it should be ready, measured when it was loaded first. Accepted jobs
    wait and go on; later calls are accepted."""
    async with fleet(redis_server.url, 1, model) as [worker]:
        await let_load(fifo)
        job = await caller.submit("count", max_tokens=50, lane=lane)
        await caller.has_output(job, 3)
        assert await refusal_of(caller) is None
        kill_engine(worker)

        refusals: list[JobRefused] = []

        async def is_refused() -> bool:
            refused = await refusal_of(caller)
            refusals.extend([] if refused is None else [refused])
            return refused is not None and refused.retry_after_s is not None

        await until(is_refused)
        assert {refused.code for refused in refusals} == {ErrorCode.NO_WORKERS}
        assert "is ready" in refusals[-1].message
        waiting = await caller.submit("wait", max_tokens=5)
        assert not (await caller.view(job)).is_terminal

        await let_load(fifo)
        assert_exact(job, await caller.answer(job), SLOW)
        assert_exact(waiting, await caller.answer(waiting), SLOW)
        assert await refusal_of(caller) is None


async def test_another_worker_of_the_model_takes_the_calls(
    caller: Caller, redis_server: EmbeddedRedis, fifo: Path, model: HashModelOptions
) -> None:
    """One engine of two is lost: no call is refused."""
    async with (
        fleet(redis_server.url, 1, SLOW),
        fleet(redis_server.url, 1, model) as [worker],
    ):
        await let_load(fifo)
        await caller.num_workers(2)
        kill_engine(worker)

        async def is_one_left() -> bool:
            return await caller.client.zcard(caller.keys.of("workers", "m")) == 1

        await until(is_one_left)
        job = await caller.submit("call", needs_worker=True)
        assert_exact(job, await caller.answer(job), SLOW)
        await let_load(fifo)
        await caller.num_workers(2)


async def test_a_worker_that_loads_again_can_be_drained(
    caller: Caller, redis_server: EmbeddedRedis, fifo: Path, model: HashModelOptions
) -> None:
    """By an order, which it reads with its heartbeats."""
    async with fleet(redis_server.url, 1, model) as [worker]:
        await let_load(fifo)
        await caller.num_workers(1)
        incarnations: Any = await caller.client.zrange(caller.keys.of("workers", "m"), 0, -1)
        kill_engine(worker)

        async def is_loading() -> bool:
            return await caller.client.zcard(caller.keys.of("workers", "m")) == 0

        await until(is_loading)
        assert await caller.functions.drain([incarnations[0].decode()]) == [True]

        assert await asyncio.to_thread(worker.wait, 60) == 0


async def test_a_worker_shows_that_it_loads_and_with_what_it_ends_then(
    caller: Caller,
    redis_server: EmbeddedRedis,
    tmp_path: Path,
    fifo: Path,
    model: HashModelOptions,
) -> None:
    """A file for its health check, gone while the engine is ready. SIGTERM before the first engine
    is ready is no success: whoever counts failed starts would not see it."""
    progress = tmp_path / "progress"

    async def has_begun() -> bool:
        return progress.exists() and bool(progress.read_text())

    async with fleet(redis_server.url, 1, model, progress_path=str(progress)) as [worker]:
        await until(has_begun)
        await until(lambda: has_children(worker.pid))
        assert await worker.stop() == 143
        assert progress.exists()  # it never ended to load
    progress.unlink()
    async with fleet(redis_server.url, 1, model, progress_path=str(progress)) as [worker]:
        await let_load(fifo)
        await caller.num_workers(1)
        assert not progress.exists()
        kill_engine(worker)
        await until(has_begun)
        assert progress.read_text().endswith(AGAIN)
        assert await worker.stop() == 0


async def has_children(pid: int) -> bool:
    return bool(children_of(pid))
