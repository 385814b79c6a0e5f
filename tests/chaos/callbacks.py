"""`batchway callbacks` with a short ladder: `python -m tests.chaos.callbacks SETTINGS_JSON`.

Unlike `tests.callbacks.callbacks_process` it has a lifeline, so that it ends with its campaign.
"""

import asyncio
import logging
import sys

import msgspec

from infra.child import end_with_parent
from tests.callbacks.callbacks_process import quick_settings
from workers.callbacks.service import run_callbacks

if __name__ == "__main__":
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s",
        datefmt="%H:%M:%S",
    )
    fields = msgspec.json.decode(sys.argv[1])
    settings = quick_settings(fields.pop("redis_url"), **fields)
    end_with_parent(settings.drain_s)
    sys.exit(asyncio.run(run_callbacks(settings)))
