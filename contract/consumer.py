"""How a process holds leased work: it renews its leases and listens for messages.

Workers and flows take jobs of a model, feeders batches, deliverers callbacks.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import redis.asyncio

from contract.batches import LeaseLost
from contract.connection import Listener, broker_errors
from contract.errors import BrokerUnavailable, BrokerUnfit
from contract.keys import Keys

log = logging.getLogger("batchway.leases")

_RETRY_S = 1.0  # between subscriptions
MAX_CONTROL = 4096  # messages that wait; further ones are lost


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


async def listen(
    client: redis.asyncio.Redis,
    keys: Keys,
    model: str,
    incarnation: str,
    wake: asyncio.Event,
    control: "asyncio.Queue[str]",
) -> None:
    """Subscribes until cancelled: sets `wake` when a job of the model waits, and queues control
    messages for the incarnation. Messages may be lost, so callers must also poll."""
    channels = keys.of("wake", model), keys.of("ctl", incarnation)

    def handle(message: dict[str, Any]) -> None:
        if message["type"] == "message" and message["channel"] == channels[1].encode():
            with contextlib.suppress(asyncio.QueueFull):
                control.put_nowait(message["data"].decode(errors="replace"))
        elif message["type"] != "pong":
            wake.set()  # also when a subscription begins: jobs may have been queued before

    while True:
        with contextlib.suppress(BrokerUnavailable), broker_errors(client, "SUBSCRIBE"):
            async with client.pubsub() as pubsub:
                await pubsub.subscribe(*channels)
                listener = Listener(pubsub, handle)
                while True:
                    await listener.listen()
        await asyncio.sleep(_RETRY_S)
