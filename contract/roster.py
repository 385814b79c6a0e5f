"""Lists the workers of a partition and orders them to drain."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contract.connection import broker_errors
from contract.errors import WireError
from contract.functions import Functions

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker by its last heartbeat."""

    incarnation: str
    model: str
    is_draining: bool
    num_jobs_held: int


class Roster(Functions):
    """The workers of one partition. Every method raises BrokerUnavailable, WireError."""

    async def workers(self, models: Sequence[str]) -> list[WorkerView]:
        """The workers of these models that claim jobs. Omits draining workers and unreadable
        records."""
        views = []
        for model in models:
            with broker_errors(self._client, "ZRANGE", record="list of workers"):
                rows: Any = await self._client.zrange(self._keys.of("workers", model), 0, -1)
            for raw_name in rows:
                name = raw_name.decode(errors="replace")
                try:
                    view = await self.worker(name)
                except WireError as exc:
                    log.error("a worker is omitted: %s worker=%r", exc, name)
                else:
                    views += [] if view is None else [view]
        return views

    async def worker(self, incarnation: str) -> WorkerView | None:
        """A worker, draining or not; None where it has exited or its record has expired."""
        with broker_errors(self._client, "HGETALL", record="record of a worker"):
            raw: Any = await self._client.hgetall(self._keys.of("worker", incarnation))
            if not raw:
                return None
            info = json.loads(raw[b"info"] or "{}")
            return WorkerView(
                incarnation,
                raw[b"model"].decode(),
                raw.get(b"state") == b"draining",
                int(info.get("jobs_held", 0)),
            )

    async def is_to_drain(self, incarnation: str) -> bool:
        """Whether a worker was ordered to drain; it may have missed the message."""
        with broker_errors(self._client, "HGET", record="record of a worker"):
            order: Any = await self._client.hget(self._keys.of("worker", incarnation), "order")
        return bool(order == b"drain")
