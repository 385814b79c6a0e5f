"""The supervisor's side of the connection when an engine process ends."""

import asyncio
import signal
import sys

import pytest

from workers.ipc.channel import EngineClient
from workers.ipc.messages import (
    EngineLoad,
    EngineOptions,
    EngineReady,
    FromEngine,
    Loading,
    Shutdown,
    StopJob,
)

pytestmark = pytest.mark.anyio

OPTIONS = EngineOptions(model_path="hash")


class LateProcess:
    """An engine process that exits by itself just before it is killed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def wait(self) -> int:
        return await self._process.wait()

    @property
    def pid(self) -> int:
        """Read for the kill. By then the process has ended, and its group is empty."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.pid


async def test_a_kill_of_an_exited_engine_is_no_error() -> None:
    """The engine exits at the end of its grace period, just before the kill."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "import time; time.sleep(60)"), stdin=asyncio.subprocess.DEVNULL
    )
    late = LateProcess(process)
    client = EngineClient(late, lambda messages: None)  # type: ignore[arg-type]

    assert await client.stop(grace_s=0.05) == -signal.SIGTERM


async def test_messages_of_an_engine_arrive_in_order_and_then_its_end() -> None:
    """After the order to shut down, all earlier messages are processed first."""
    received: asyncio.Queue[FromEngine] = asyncio.Queue()

    def take_in(messages: list[FromEngine]) -> None:
        for message in messages:
            received.put_nowait(message)

    client = await EngineClient.start("tests.hash_engine", OPTIONS, take_in)
    assert isinstance(await received.get(), Loading)
    assert isinstance(await received.get(), EngineReady)
    client.send([StopJob("unknown", 1)])
    client.send([Shutdown()])
    await client.end()
    client.send([StopJob("unknown", 1)])  # not received
    assert await client.stop() == 0
    assert all(isinstance(received.get_nowait(), EngineLoad) for _ in range(received.qsize()))


async def test_a_malformed_message_ends_the_engine() -> None:
    """The caller gets the error; no later message is processed."""
    num_taken = 0

    def take_in(messages: list[FromEngine]) -> None:
        nonlocal num_taken
        num_taken += 1
        raise ValueError("not understood")

    client = await EngineClient.start("tests.hash_engine", OPTIONS, take_in)
    with pytest.raises(ValueError, match="not understood"):
        await client.end()
    assert num_taken == 1
    assert await client.stop() == 0
