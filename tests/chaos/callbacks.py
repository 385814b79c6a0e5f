"""`batchway callbacks` with a short ladder: `python -m tests.chaos.callbacks SETTINGS_JSON`.

Beyond `tests.callbacks.office` it minds the lifeline: a campaign that is killed leaves none.
"""

import asyncio
import logging
import sys

import msgspec

from infra.lifeline import end_with_parent
from tests.callbacks.office import office_settings
from workers.callbacks.service import run_callbacks

if __name__ == "__main__":
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s",
        datefmt="%H:%M:%S",
    )
    fields = msgspec.json.decode(sys.argv[1])
    settings = office_settings(fields.pop("redis_url"), **fields)
    end_with_parent(settings.drain_s)
    sys.exit(asyncio.run(run_callbacks(settings)))
