"""The supervisor's end of an engine process, at the process's end."""

import asyncio
import signal
import sys

import pytest

from workers.ipc.engine_client import EngineClient
from workers.ipc.messages import (
    EngineLoad,
    EngineOptions,
    FromEngine,
    Loading,
    Ready,
    Shutdown,
    StopJob,
)

pytestmark = pytest.mark.anyio

OPTIONS = EngineOptions(model_path="hash")


class LateProcess:
    """An engine process that ends by itself, but only as it is about to be killed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def wait(self) -> int:
        return await self._process.wait()

    @property
    def pid(self) -> int:
        """Asked for the kill. By then it has ended, and its group has nobody left to be killed."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.pid


async def test_an_engine_that_ends_as_it_is_killed_has_ended() -> None:
    """The race between its last moment and the end of its grace costs the supervisor nothing."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "import time; time.sleep(60)"), stdin=asyncio.subprocess.DEVNULL
    )
    late = LateProcess(process)
    client = EngineClient(late, lambda messages: None)  # type: ignore[arg-type]

    assert await client.stop(grace_s=0.05) == -signal.SIGTERM


async def test_messages_of_an_engine_arrive_in_order_and_then_its_end() -> None:
    """It is told to end, and what was said before that has been taken in."""
    said: asyncio.Queue[FromEngine] = asyncio.Queue()

    def take_in(messages: list[FromEngine]) -> None:
        for message in messages:
            said.put_nowait(message)

    client = await EngineClient.start("tests.hash_engine", OPTIONS, take_in)
    assert isinstance(await said.get(), Loading)
    assert isinstance(await said.get(), Ready)
    client.send([StopJob("unknown", 1)])
    client.send([Shutdown()])
    await client.end()
    client.send([StopJob("unknown", 1)])  # nobody hears it
    assert await client.stop() == 0
    assert all(isinstance(said.get_nowait(), EngineLoad) for _ in range(said.qsize()))


async def test_a_malformed_message_ends_the_engine() -> None:
    """The error is the caller's to judge; nothing is taken in after it."""
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
