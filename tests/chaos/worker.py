"""A worker that ends with the campaign: `python -m tests.chaos.worker SETTINGS_JSON`.

Unlike `tests.hash_worker` it watches the lifeline, so that a killed campaign leaves no worker, and
it makes the planted mistake.
"""

import asyncio
import logging
import sys

import msgspec

from infra.child import end_with_parent
from tests.chaos.mistakes import plant_in_worker
from tests.hash_worker import hash_worker_settings
from workers.supervisor.supervisor import run_worker

if __name__ == "__main__":
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s",
        datefmt="%H:%M:%S",
    )
    fields = msgspec.json.decode(sys.argv[1])
    settings = hash_worker_settings(fields.pop("redis_url"), **fields)
    end_with_parent(settings.drain_s)
    plant_in_worker()
    sys.exit(asyncio.run(run_worker(settings)))
