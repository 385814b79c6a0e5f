"""A real worker on the hash model: `python -m tests.hash_worker SETTINGS_JSON`.

In a campaign it makes the planted mistake, and ends with the campaign.
"""

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

import msgspec

from infra.child import end_with_parent
from tests.chaos.mistakes import plant_in_worker
from workers.ipc.messages import EngineOptions
from workers.settings import WorkerSettings
from workers.supervisor.supervisor import run_worker

LOG_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s"


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
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, datefmt="%H:%M:%S")
    fields = msgspec.json.decode(sys.argv[1])
    settings = hash_worker_settings(fields.pop("redis_url"), **fields)
    end_with_parent(settings.drain_s)
    plant_in_worker()
    sys.exit(asyncio.run(run_worker(settings)))
