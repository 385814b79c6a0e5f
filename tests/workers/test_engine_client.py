"""The supervisor's end of an engine process, at the process's end."""

import asyncio
import signal
import sys

import pytest

from workers.engine_client import EngineClient

pytestmark = pytest.mark.anyio


class LateProcess:
    """An engine process that ends by itself, but only as it is about to be killed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        """By then it has ended, and nobody is left to be killed."""
        self._process.send_signal(signal.SIGTERM)
        raise ProcessLookupError


async def test_an_engine_that_ends_as_it_is_killed_has_ended() -> None:
    """The race between its last moment and the end of its grace costs the supervisor nothing."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "import time; time.sleep(60)"), stdin=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    late = LateProcess(process)
    client = EngineClient(late, asyncio.StreamReader(), process.stdin)  # type: ignore[arg-type]

    assert await client.stop(grace_s=0.05) == -signal.SIGTERM
