"""The gateway's feeder of a partition: leases unfinished batches and runs them, unless its gateway
is not to feed batches; deletes objects that are due.

Any number of gateways feed. A batch whose feeder died is leased by another once its lease has
lapsed, and goes on after its last written parts.
"""

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Mapping

from contract.batches import Batch
from contract.connection import end_tasks
from contract.errors import BatchwayError
from gateway.files import delete_objects
from gateway.redis.shards import GatewayShard
from gateway.runners.batches import lease
from gateway.runners.batches.batch_run import run_batch
from gateway.runners.batches.lease import LeasedBatch
from gateway.state import Gateway

log = logging.getLogger("batchway.gateway")

MAX_BATCHES = 4  # of a partition in progress at a time in one gateway
MAX_CHECKS = 2  # that it validates or ends meanwhile


class Feeder:
    """The batches of a partition that one gateway process runs."""

    def __init__(self, gateway: Gateway, shard: GatewayShard) -> None:
        self._gateway = gateway
        self._shard = shard
        self._checking: set[asyncio.Task[None]] = set()
        self._running: dict[asyncio.Task[None], Batch] = {}  # in progress

    async def run(self) -> None:
        """Runs batches until cancelled, then gives its leases back."""
        try:
            while True:
                with contextlib.suppress(BatchwayError):  # the breaker logs that Redis is down
                    await self._feed()
                    await self._delete_due()
                await asyncio.sleep(self._gateway.settings.poll_s)
        finally:
            await end_tasks(*self._checking, *self._running)

    async def _feed(self) -> None:
        if self._gateway.settings.feeds_batches and not self._gateway.drain.has_begun:
            await self._check_some()
            await self._run_some()

    async def _check_some(self) -> None:
        """Validates or ends batches. These do not wait for batches in progress."""
        room = MAX_CHECKS - len(self._checking)
        for leased in await self._taken(in_progress=False, max_batches=room):
            task = asyncio.create_task(self._run(leased, runs_lines=False))
            self._checking.add(task)
            task.add_done_callback(self._checking.discard)

    async def _run_some(self) -> None:
        """Runs batches. If all places are taken, one makes way for that of a tenant without any, or
        for one of its tenant whose window ends before."""
        room, last_ends_ms = MAX_BATCHES - len(self._running), dict[str, int]()
        if room == 0:
            by_end = sorted((each.expires_ms, each.tenant) for each in self._running.values())
            last_ends_ms = {tenant: end_ms for end_ms, tenant in by_end}
        found = await self._taken(
            in_progress=True,
            max_batches=max(room, 0),
            max_more=int(0 < len(last_ends_ms) < MAX_BATCHES),  # a tenant has several
            last_ends_ms=last_ends_ms,
        )
        for leased in found:
            if len(self._running) >= MAX_BATCHES:
                self._make_way(leased.batch)
            task = asyncio.create_task(self._run(leased, runs_lines=True))
            self._running[task] = leased.batch
            task.add_done_callback(self._running.pop)

    def _make_way(self, batch: Batch) -> None:
        """Ends for now what ends last: of the batch's tenant, or of the one with the most."""
        tenants = [each.tenant for each in self._running.values()]
        tenant = batch.tenant if batch.tenant in tenants else Counter(tenants).most_common(1)[0][0]
        own = {task: each for task, each in self._running.items() if each.tenant == tenant}
        max(own, key=lambda task: own[task].expires_ms).cancel()

    async def _taken(
        self,
        *,
        in_progress: bool,
        max_batches: int,
        max_more: int = 0,
        last_ends_ms: Mapping[str, int] | None = None,
    ) -> list[LeasedBatch]:
        """Newly leased batches. Tells all gateways that there is a feeder, even with no room."""
        token, taken = secrets.token_hex(8), []
        batch_ids = await self._shard.ask(
            "batch",
            self._shard.batches.take,
            token,
            lease_s=lease.LEASE_S,
            in_progress=in_progress,
            max_batches=max_batches,
            max_more=max_more,
            last_ends_ms=last_ends_ms,
        )
        for batch_id in batch_ids:
            with contextlib.suppress(BatchwayError):  # its lease lapses
                taken.append(await LeasedBatch.taken(self._gateway, self._shard, batch_id, token))
        return taken

    async def _run(self, leased: LeasedBatch, *, runs_lines: bool) -> None:
        batch_id = leased.batch.id
        log.info("feeding batch_id=%s status=%s", batch_id, leased.status)
        has_failed = False
        keeping = asyncio.create_task(leased.keep())
        working = asyncio.create_task(run_batch(leased, runs_lines=runs_lines))
        try:
            await asyncio.wait({keeping, working}, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and (exc := working.exception()) is not None:
                has_failed = True
                log.error("batch_id=%s stopped by %s; goes on later", batch_id, type(exc).__name__)
        finally:
            is_held = not keeping.done()
            await end_tasks(keeping, working)
            if is_held and not has_failed:  # otherwise others go first until the lease lapses
                with contextlib.suppress(BatchwayError):
                    await leased.save(gives_back=True)

    async def _delete_due(self) -> None:
        """Deletes expired files and uploads, and the parts of batches that have ended."""
        shard = self._shard
        for object_id in await shard.ask("file", shard.files.due):
            if object_id.startswith(("file-", "upload_")):
                await shard.ask("file", shard.files.drop, object_id)
            await delete_objects(self._gateway, object_id)
