"""A real `batchway callbacks` process with short retry delays.

`python -m tests.callbacks.callbacks_process JSON`. Only the delays differ from production.
"""

import asyncio
import contextlib
import json
import logging
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

from contract.callback_urls import AllowList
from workers.callbacks.deliverer import CallbackSettings
from workers.callbacks.service import run_callbacks

SHORT_RUNGS_S = (0.2, 0.3, 0.5) + (1.0,) * 200


def quick_settings(redis_url: str, **overrides: Any) -> CallbackSettings:
    fields: dict[str, Any] = {
        "redis_url": redis_url,
        "namespace": "test",
        "key": "the key of all processes",
        "allow": AllowList.parse(["127.0.0.1"]),
        "retry_delays_s": SHORT_RUNGS_S,
        "timeout_s": 3.0,
        "lease_s": 1.5,
        "drain_s": 5.0,
    }
    return CallbackSettings(**(fields | overrides))


class CallbacksProcess:
    """One process, in its own session."""

    def __init__(self, redis_url: str, **settings: Any) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.callbacks.callbacks_process",
                json.dumps({"redis_url": redis_url, **settings}),
            ],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait()

    async def stop(self) -> int:
        """Sends SIGTERM; returns the exit status."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self._process.wait, 30)


@contextlib.asynccontextmanager
async def callbacks_processes(
    redis_url: str, number: int, **settings: Any
) -> AsyncIterator[list[CallbacksProcess]]:
    """Runs `number` processes. Callers may replace items of the list; its processes are stopped
    at exit."""
    running = [CallbacksProcess(redis_url, **settings) for _ in range(number)]
    try:
        yield running
    finally:
        await asyncio.gather(*(process.stop() for process in running))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    fields = json.loads(sys.argv[1])
    sys.exit(asyncio.run(run_callbacks(quick_settings(fields.pop("redis_url"), **fields))))
