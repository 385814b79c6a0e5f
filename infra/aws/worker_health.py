"""Health check of this host's worker: its heartbeats are recent. Exit status 0 or 1.

The check's start period must cover loading the model. If Redis is unreachable, the worker counts as
healthy: ending it would not help.
"""

import asyncio
import json
import os
import socket
import urllib.request
from collections.abc import Mapping
from typing import Any

import redis.asyncio

from contract.catalogue import WORKER_TTL_S
from contract.connection import broker_errors, connect, now_ms, redis_url_of
from contract.errors import BrokerUnavailable, WireError, wire_errors
from contract.keys import Keys

_TIMEOUT_S = 2.0


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
    with wire_errors("list of workers"), broker_errors(client, "SMEMBERS or ZRANGEBYSCORE"):
        models: Any = await client.smembers(keys.of("models"))
        for model in models:
            key = keys.of("workers", model.decode())
            names: Any = await client.zrangebyscore(key, since_ms, "+inf")
            if any(name.startswith(prefix) for name in names):
                return True
    return False


async def check(redis_url: str, namespace: str, host: str) -> bool:
    try:
        async with connect(redis_url) as client:
            return await is_live(client, Keys(namespace), host)
    except (BrokerUnavailable, WireError):
        return True


def main() -> int:
    namespace = os.environ.get("BATCHWAY_NAMESPACE") or "default"
    url, host = redis_url_of(os.environ) or "", host_name(os.environ)
    return 0 if asyncio.run(check(url, namespace, host)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
