"""The gateway's feeder: leases unfinished batches and runs them; deletes objects that are due.

Any number of gateways feed. A batch whose feeder died is leased by another once its lease has
lapsed, and goes on after its last written parts.
"""

import asyncio
import contextlib
import logging
import secrets

from contract.batches import LeaseLost
from contract.connection import end_tasks
from contract.errors import BatchwayError
from gateway.batches import lease
from gateway.batches.batch_run import run_batch
from gateway.batches.lease import LeasedBatch
from gateway.files.routes import delete_objects
from gateway.jobs.streams import Gateway

log = logging.getLogger("batchway.gateway")

MAX_BATCHES = 4  # that one gateway runs at a time


class Feeder:
    """One for each gateway process."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until cancelled. Then gives its leases back."""
        try:
            while True:
                with contextlib.suppress(BatchwayError):  # the breaker logs that Redis is down
                    await self._take()
                    await self._delete_due()
                await asyncio.sleep(self._gateway.settings.poll_s)
        finally:
            await end_tasks(*self._running)

    async def _take(self) -> None:
        room = MAX_BATCHES - len(self._running)
        if room <= 0 or self._gateway.drain.has_begun:
            return
        token = secrets.token_hex(8)
        batch_ids = await self._gateway.broker.ask_batches(
            lambda batches: batches.take(token, lease_s=lease.LEASE_S, max_batches=room)
        )
        for batch_id in batch_ids:
            task = asyncio.create_task(self._run(batch_id, token))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self, batch_id: str, token: str) -> None:
        try:
            leased = await LeasedBatch.taken(self._gateway, batch_id, token)
        except (BatchwayError, LeaseLost):
            return
        log.info("feeding batch_id=%s status=%s", batch_id, leased.status)
        has_failed = False
        keeping = asyncio.create_task(leased.keep())
        working = asyncio.create_task(run_batch(leased))
        try:
            await asyncio.wait({keeping, working}, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and (exc := working.exception()) is not None:
                has_failed = True
                log.error("batch_id=%s stopped by %s; goes on later", batch_id, type(exc).__name__)
        finally:
            is_held = not keeping.done()
            await end_tasks(keeping, working)
            if is_held and not has_failed:  # otherwise others go first until the lease lapses
                with contextlib.suppress(BatchwayError, LeaseLost):
                    await leased.save(gives_back=True)

    async def _delete_due(self) -> None:
        """Deletes expired files, and the parts of batches that have ended."""
        broker = self._gateway.broker
        for object_id in await broker.ask_files(lambda files: files.due()):
            if object_id.startswith("file-"):
                await broker.ask_files(lambda files: files.drop(object_id))  # noqa: B023
            await delete_objects(self._gateway, object_id)
