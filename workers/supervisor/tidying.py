"""Deletes objects that no job points to any more, and those that nobody knows of."""

import asyncio
import logging
import time

from contract.errors import BrokerUnavailable, CommandDenied, WireError
from contract.payloads.store import MAX_AGE_S, ObjectStore, PayloadUnavailable
from workers.supervisor.worker_broker import WorkerBroker

log = logging.getLogger(__name__)

_TIDY_S = 1.0
_LOOK_S = 3600.0  # between looks for objects of no job, which crashes leave


async def tidy(store: ObjectStore | None, lane: WorkerBroker) -> None:
    """For ever; where there is no store there is nothing to do."""
    looked_s = -_LOOK_S
    while store is not None:
        try:
            await lane.delete_orphaned_objects(store)
            if time.monotonic() - looked_s > _LOOK_S:
                looked_s = time.monotonic()
                await asyncio.to_thread(store.delete_older, MAX_AGE_S)
        except (BrokerUnavailable, CommandDenied, WireError, PayloadUnavailable) as exc:
            log.warning("objects not tidied: %s", exc)
        await asyncio.sleep(_TIDY_S)
    await asyncio.Event().wait()  # the other duties go on
