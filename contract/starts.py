"""When a model's next worker will be ready, as announced by the process that starts workers; and
whether one is wanted.

The duration of a start and the time of the next are fields of the hash `pool:<model>`. `submit`
gives this time in its refusals while no worker lives. Such a refusal leaves no job, so the gateway
sets `wanted:<model>:<lane>` for processes that start workers on demand.
"""

from dataclasses import dataclass
from typing import Any

import redis.asyncio

from contract.connection import broker_errors, now_ms
from contract.errors import wire_errors
from contract.keys import Keys
from contract.model_failures import FIELDS as FAILURE_FIELDS


@dataclass(frozen=True, slots=True)
class Starts:
    """The starts of workers in one partition. Every method raises BrokerUnavailable."""

    client: redis.asyncio.Redis
    keys: Keys

    async def measured(self, model: str, took_s: float) -> None:
        """Reports how long a worker's start took, and thereby that the model has not failed."""
        with wire_errors("start of a worker"), broker_errors(self.client, "HSET or HDEL"):
            await self.client.hset(self._key(model), "start_ms", str(int(took_s * 1000)))
            await self.client.hdel(self._key(model), *FAILURE_FIELDS)

    async def announce(self, model: str, ready_in_s: float) -> None:
        """Announces that a worker of the model will be ready after `ready_in_s`."""
        ready_at_ms = await now_ms(self.client) + int(ready_in_s * 1000)
        with wire_errors("start of a worker"), broker_errors(self.client, "HSET"):
            await self.client.hset(self._key(model), "ready_at", str(ready_at_ms))

    async def announce_another(self, model: str, starts_in_s: float) -> None:
        """Announces that a worker starts after `starts_in_s`. It is expected to take as long as the
        last one; announces nothing if that is unknown. Raises WireError."""
        with wire_errors("start of a worker"), broker_errors(self.client, "HGET"):
            took: Any = await self.client.hget(self._key(model), "start_ms")
            took_s = None if took is None else int(took) / 1000
        if took_s is not None:
            await self.announce(model, starts_in_s + took_s)

    async def want(self, model: str, lane: str, for_s: float) -> None:
        """Records that a call was refused for want of a worker. It may come again in `for_s`."""
        with broker_errors(self.client, "SET"):
            await self.client.set(self._wish_key(model, lane), b"", px=int(for_s * 1000))

    async def is_wanted(self, model: str, lane: str) -> bool:
        with broker_errors(self.client, "EXISTS"):
            return bool(await self.client.exists(self._wish_key(model, lane)))

    def _wish_key(self, model: str, lane: str) -> str:
        return self.keys.of("wanted", model, lane)

    def _key(self, model: str) -> str:
        return self.keys.of("pool", model)
