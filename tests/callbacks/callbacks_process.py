"""A real `batchway callbacks` process with short retry delays.

`python -m tests.callbacks.callbacks_process JSON`. Only the delays differ from production, and
in a campaign it ends with the campaign.
"""

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import AsyncIterator
from typing import Any

from contract.callback_urls import AllowList
from infra.child import end_with_parent
from tests.fleet import Program, running
from tests.hash_worker import LOG_FORMAT
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


class CallbacksProcess(Program):
    """One process."""

    def __init__(self, redis_url: str, **settings: Any) -> None:
        fields = json.dumps({"redis_url": redis_url, **settings})
        super().__init__("tests.callbacks.callbacks_process", fields)


@contextlib.asynccontextmanager
async def callbacks_processes(
    redis_url: str, number: int, **settings: Any
) -> AsyncIterator[list[CallbacksProcess]]:
    """Runs `number` processes, which callers may replace."""
    async with running(CallbacksProcess(redis_url, **settings) for _ in range(number)) as found:
        yield found


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, datefmt="%H:%M:%S")
    fields = json.loads(sys.argv[1])
    settings = quick_settings(fields.pop("redis_url"), **fields)
    end_with_parent(settings.drain_s)
    sys.exit(asyncio.run(run_callbacks(settings)))
