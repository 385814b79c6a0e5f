"""Health check of this host's worker: its heartbeats are recent. Exit status 0 or 1.

The check's start period must cover loading the model. If Redis is unreachable, the worker counts as
healthy: ending it would not help.
"""

import asyncio
import os
import socket
from typing import Any

import redis.asyncio

from contract.catalogue import WORKER_TTL_S
from contract.connection import broker_errors, connect, now_ms, redis_url_of
from contract.errors import BrokerUnavailable, WireError, wire_errors
from contract.keys import Keys


async def num_jobs_here(client: redis.asyncio.Redis, keys: Keys) -> int | None:
    """Jobs that this host's worker holds; None without recent heartbeats. Incarnations begin with
    the host name. Raises BrokerUnavailable, WireError."""
    prefix = f"{socket.gethostname().split('.')[0]}-".encode()
    since_ms = await now_ms(client) - int(WORKER_TTL_S * 1000)
    with wire_errors("list of workers"), broker_errors(client, "SMEMBERS or ZRANGEBYSCORE"):
        models: Any = await client.smembers(keys.of("models"))
        for model in models:
            key = keys.workers(model.decode())
            names: Any = await client.zrangebyscore(key, since_ms, "+inf")
            for name in names:
                if name.startswith(prefix):
                    num_jobs: Any = await client.scard(keys.of("own", name.decode()))
                    return int(num_jobs)
    return None


async def check(redis_url: str, namespace: str) -> bool:
    try:
        async with connect(redis_url) as client:
            return await num_jobs_here(client, Keys(namespace)) is not None
    except (BrokerUnavailable, WireError):
        return True


def main() -> int:
    namespace = os.environ.get("BATCHWAY_NAMESPACE") or "default"
    return 0 if asyncio.run(check(redis_url_of(os.environ) or "", namespace)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
