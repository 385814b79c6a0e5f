"""Runs a function in Lambda's own Runtime Interface Emulator, as a process."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.aws.lambda_events import KEY
from tests.ports import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
EMULATOR = Path(sys.executable).with_name("aws-lambda-rie")  # installed by scripts/setup
START_S = 60.0
_PATH = "/2015-03-31/functions/function/invocations"


def function_environ(redis_url: str, **more: str) -> dict[str, str]:
    """A function's environment variables."""
    own = {"REDIS_URL": redis_url, "BATCHWAY_NAMESPACE": "test", "BATCHWAY_API_KEY": KEY}
    return own | {"BATCHWAY_POLL_S": "0.05", "BATCHWAY_ALLOWED_HOSTS": "*"} | more


@asynccontextmanager
async def emulating(environ: Mapping[str, str]) -> AsyncIterator["Emulator"]:
    """Runs ApiFunction; ends all of its processes at exit."""
    port, runtime_port = free_port(), free_port()
    line = [
        str(EMULATOR),
        f"--runtime-interface-emulator-address=127.0.0.1:{port}",
        f"--runtime-api-address=127.0.0.1:{runtime_port}",
        *(sys.executable, "-m", "awslambdaric", "gateway.aws.handler.handler"),
    ]
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *line,
        cwd=ROOT,
        env=kept | {"PYTHONPATH": str(ROOT), "AWS_LAMBDA_FUNCTION_TIMEOUT": "30"} | dict(environ),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=START_S) as http:
            yield Emulator(http)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@asynccontextmanager
async def serving_web(environ: Mapping[str, str]) -> AsyncIterator[str]:
    """Runs StreamFunction's program, probed for readiness as the Web Adapter does; its URL."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        ROOT / "gateway" / "aws" / "serve-web",
        cwd=ROOT,
        env={
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "AWS_LWA_PORT": str(port),
            **environ,
        },
        stderr=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            while True:
                try:
                    assert (await http.get("/livez")).status_code == 200
                    break
                except httpx.ConnectError:
                    assert process.returncode is None
                    await asyncio.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


class Emulator:
    """The invoke API. The first call waits until the emulator listens."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def invoke(self, event: Mapping[str, Any]) -> httpx.Response:
        async with asyncio.timeout(START_S):
            while True:
                try:
                    return await self._http.post(_PATH, json=event)
                except httpx.ConnectError:
                    await asyncio.sleep(0.05)
