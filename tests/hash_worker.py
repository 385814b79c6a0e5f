"""A real worker on the hash model: `python -m tests.hash_worker SETTINGS_JSON`."""

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

import msgspec

from workers.ipc.messages import EngineOptions
from workers.settings import WorkerSettings
from workers.supervisor.supervisor import run_worker


def hash_worker_settings(redis_url: str, **overrides: Any) -> WorkerSettings:
    """A worker of the model `m` in the namespace `test`, with a short lease."""
    engine = {"model_path": "hash", "max_num_batched_tokens": 256, **overrides.pop("engine", {})}
    for name in {"batching_path", "candidate_path"} & set(overrides):
        overrides[name] = Path(overrides[name])
    fields: dict[str, Any] = {
        "redis_url": redis_url,
        "served_model_name": "m",
        "namespace": "test",
        "lease_s": 2.0,
        "drain_s": 5.0,
        "engine_module": "tests.hash_engine",
        "engine": EngineOptions(**engine),
    }
    return WorkerSettings(**(fields | overrides))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    fields = msgspec.json.decode(sys.argv[1])
    sys.exit(asyncio.run(run_worker(hash_worker_settings(fields.pop("redis_url"), **fields))))
