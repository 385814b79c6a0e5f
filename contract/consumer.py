"""How a process holds leased work: it renews its leases, listens for messages, and leaves.

Workers and flows take jobs of a model, feeders batches, deliverers callbacks.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import redis.asyncio

from contract.batches import LeaseLost
from contract.connection import Listener, broker_errors
from contract.errors import BrokerUnavailable, BrokerUnfit
from contract.functions import Functions
from contract.keys import Keys

log = logging.getLogger("batchway.leases")

_RETRY_S = 1.0  # between subscriptions


async def keep_leases(
    renew: Callable[[], Awaitable[object]], *, every_s: float, hurry: asyncio.Event | None = None
) -> None:
    """Renews leases every `every_s` seconds, and when `hurry` is set, which `renew` clears. While
    Redis does not answer, it goes on. Returns when a lease is lost. Raises BrokerUnfit, and other
    errors of `renew`."""
    hurry = hurry or asyncio.Event()
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(every_s):
                await hurry.wait()
        try:
            await renew()
        except LeaseLost:
            return
        except BrokerUnfit:
            raise
        except BrokerUnavailable as exc:
            log.debug("leases not renewed: %s", exc)


class Consumer:
    """One incarnation that takes jobs of a model, which others know by its heartbeats."""

    def __init__(
        self, client: redis.asyncio.Redis, keys: Keys, model: str, incarnation: str, lease_s: float
    ) -> None:
        self.functions = Functions(client, keys)
        self.model = model
        self.incarnation = incarnation
        self.lease_s = lease_s
        self._client = client
        self._wake_channel = keys.wake_channel(model)
        self._control_channel = keys.control_channel(incarnation)

    async def leave(self, counted: Mapping[str, int] | None = None) -> None:
        """Tells that this incarnation ends, with its final counts. Raises BatchwayError."""
        await self.functions.heartbeat(
            self.incarnation,
            self.model,
            [],
            lease_s=self.lease_s,
            info="",
            state="gone",
            counted=counted or {},
        )

    async def listen(self, wake: asyncio.Event, control: "asyncio.Queue[str]") -> None:
        """Subscribes until cancelled: sets `wake` when a job waits, and queues control messages.
        Messages may be lost, so callers must also poll."""
        while True:
            with contextlib.suppress(BrokerUnavailable):
                await self._subscribe(wake, control)
            await asyncio.sleep(_RETRY_S)

    async def _subscribe(self, wake: asyncio.Event, control: "asyncio.Queue[str]") -> None:
        def handle(message: dict[str, Any]) -> None:
            channel = message["channel"]
            if message["type"] == "message" and channel == self._control_channel.encode():
                control.put_nowait(message["data"].decode(errors="replace"))
            elif message["type"] != "pong":
                wake.set()  # also when a subscription begins: jobs may have been queued before

        with broker_errors(self._client, "SUBSCRIBE"):
            async with self._client.pubsub() as pubsub:
                await pubsub.subscribe(self._wake_channel, self._control_channel)
                listener = Listener(pubsub, handle)
                while True:
                    await listener.listen()
