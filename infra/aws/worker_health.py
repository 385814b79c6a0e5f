"""Health check of this host's worker: its heartbeats are recent, or it loads and gets on. Exit
status 0 or 1.

Loading may take an hour, and half an hour without a step. Within the check's start period, in which
failures do not count, a loading worker is not healthy: a deployment would take it for a good one.
If Redis is unreachable, the worker counts as healthy: ending it would not help.
"""

import asyncio
import json
import os
import socket
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import redis.asyncio

from contract.catalogue import WORKER_TTL_S
from contract.connection import broker_errors, connect, now_ms, redis_url_of
from contract.errors import BrokerUnavailable, WireError
from contract.keys import Keys
from infra.pool import START_LIMIT_S
from workers.supervisor.load_progress import AGAIN

PROGRESS_PATH = Path(tempfile.gettempdir()) / "batchway-loading"  # of LoadProgress
_TIMEOUT_S = 2.0
_SILENCE_LIMIT_S = 1_800.0  # an engine reads its weights without a word
_START_PERIOD_S = 270.0  # less than the 300 s of Dockerfile.worker and template.yaml


def host_name(environ: Mapping[str, str]) -> str:
    """Returns the beginning of the worker's incarnation: the id of the ECS task, from the task
    metadata endpoint, or else the host's name. Raises OSError, ValueError."""
    if url := environ.get("ECS_CONTAINER_METADATA_URI_V4"):
        with urllib.request.urlopen(f"{url}/task", timeout=_TIMEOUT_S) as answer:  # noqa: S310
            arn: str = json.load(answer)["TaskARN"]
        return arn.rpartition("/")[2]
    return socket.gethostname().split(".")[0]


async def is_live(client: redis.asyncio.Redis, keys: Keys, host: str) -> bool:
    """Whether a worker of this host sent a heartbeat recently. Raises BrokerUnavailable,
    WireError."""
    prefix = f"{host}-".encode()
    since_ms = await now_ms(client) - int(WORKER_TTL_S * 1000)
    with broker_errors(client, "SMEMBERS or ZRANGEBYSCORE", record="list of workers"):
        models: Any = await client.smembers(keys.of("models"))
        for model in models:
            key = keys.of("workers", model.decode())
            names: Any = await client.zrangebyscore(key, since_ms, "+inf")
            if any(name.startswith(prefix) for name in names):
                return True
    return False


def is_loading(path: Path, now_s: float) -> bool:
    """Whether the worker has loaded for some time and still gets on. `now_s`: Unix time."""
    try:
        began, _, what = path.read_text("utf-8").partition(" ")
        since_s, silent_s = now_s - float(began), now_s - path.stat().st_mtime
    except (OSError, ValueError):  # it has ended, or begins just now
        return False
    least_s = 0.0 if what == AGAIN else _START_PERIOD_S
    return least_s <= since_s < START_LIMIT_S and silent_s < _SILENCE_LIMIT_S


async def check(redis_url: str, namespace: str, host: str, progress: Path = PROGRESS_PATH) -> bool:
    if is_loading(progress, time.time()):
        return True
    keys = Keys(namespace)
    try:
        async with connect(redis_url, keys) as client:
            return await is_live(client, keys, host)
    except (BrokerUnavailable, WireError):
        return True


def main() -> int:
    namespace = os.environ.get("BATCHWAY_NAMESPACE") or "default"
    url, host = redis_url_of(os.environ) or "", host_name(os.environ)
    return 0 if asyncio.run(check(url, namespace, host)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
