"""One subscription connection for a whole gateway: fans hints out to whoever follows a job.

A hint is a log event as it was published. Hints may be lost at any time, here on purpose where a
mailbox is full; a mailbox then says that it has a gap, and its owner reads the log.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import redis.asyncio
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from contract.codec import decode_hint
from contract.errors import WireError
from contract.events import LogEntry
from contract.tasks import end

log = logging.getLogger("batchway.gateway")

SUBSCRIBE_TIMEOUT_S = 0.25  # then go on without hints: the log is polled
RECONNECT_S = 0.5
_READ_S = 5.0  # between two looks at the connection's health


class Mailbox:
    """The hints for one follower, at most so many bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.is_subscribed = asyncio.Event()
        self._max_bytes = max_bytes
        self._hints: deque[LogEntry] = deque()
        self._num_bytes = 0
        self._has_gap = False
        self._has_news = asyncio.Event()

    def put(self, entry: LogEntry, num_bytes: int) -> None:
        if self._num_bytes + num_bytes > self._max_bytes:
            self.mark_gap()
            return
        self._hints.append(entry)
        self._num_bytes += num_bytes
        self._has_news.set()

    def mark_gap(self) -> None:
        """Forgets what waits: there is more in the log than here."""
        self._hints.clear()
        self._num_bytes = 0
        self._has_gap = True
        self._has_news.set()

    async def take(self, timeout_s: float) -> list[LogEntry] | None:
        """The hints that came, waiting for the first; [] after a gap, None at the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_news.wait()
        except TimeoutError:
            return None
        self._has_news.clear()
        hints = [] if self._has_gap else list(self._hints)
        self._hints.clear()
        self._num_bytes = 0
        self._has_gap = False
        return hints


class Hints:
    """The shared subscription. `listen` starts it; `aclose` ends it.

    Only its own two tasks touch the connection: a request that is cancelled in the middle of a
    SUBSCRIBE would break it for all others.
    """

    def __init__(self, client: redis.asyncio.Redis, *, max_bytes: int, idle_channel: str) -> None:
        self._client = client
        self._max_bytes = max_bytes
        self._idle_channel = idle_channel.encode()  # keeps the subscription from being empty
        self._mailboxes: dict[bytes, set[Mailbox]] = {}
        self._confirmed: set[bytes] = set()
        self._changed: asyncio.Queue[bytes] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def listen(self, channel: str) -> AsyncIterator[Mailbox]:
        """A mailbox for a channel, subscribed unless Redis is slow to confirm it."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="hints")
        name, mailbox = channel.encode(), Mailbox(self._max_bytes)
        self._mailboxes.setdefault(name, set()).add(mailbox)
        if name in self._confirmed:
            mailbox.is_subscribed.set()
        self._changed.put_nowait(name)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(SUBSCRIBE_TIMEOUT_S):
                    await mailbox.is_subscribed.wait()
            yield mailbox
        finally:
            followers = self._mailboxes[name]
            followers.discard(mailbox)
            if not followers:
                del self._mailboxes[name]
            self._changed.put_nowait(name)

    async def aclose(self) -> None:
        if self._task is not None:
            await end(self._task)
            self._task = None
        await self._client.aclose()

    async def _run(self) -> None:
        while True:
            pubsub = self._client.pubsub()
            sender: asyncio.Task[None] | None = None
            try:
                await pubsub.subscribe(self._idle_channel)
                sender = asyncio.create_task(self._send_changes(pubsub), name="hints-sender")
                while not sender.done():
                    message = await pubsub.get_message(timeout=_READ_S)
                    if message is not None:
                        self._dispatch(message)
            except (RedisError, OSError) as exc:
                log.warning("the subscription broke (%s); polling", type(exc).__name__)
            finally:
                if sender is not None:
                    await end(sender)
                self._forget_subscriptions()
                with suppress(RedisError, OSError):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]
            await asyncio.sleep(RECONNECT_S)

    async def _send_changes(self, pubsub: PubSub) -> None:
        """Subscribes and unsubscribes until the connection breaks.

        It sends on the connection that there is, or ends: redis-py's own commands would connect
        anew, beside the reader that does so too, and of two connections made at once one stays
        open for good.
        """
        sent: set[bytes] = set()
        for name in self._mailboxes:
            self._changed.put_nowait(name)
        with suppress(RedisError, OSError):
            while True:
                name = await self._changed.get()
                if name in self._mailboxes and name not in sent:
                    await _send(pubsub, "SUBSCRIBE", name)
                    sent.add(name)
                elif name not in self._mailboxes and name in sent:
                    self._confirmed.discard(name)
                    await _send(pubsub, "UNSUBSCRIBE", name)
                    sent.discard(name)

    def _forget_subscriptions(self) -> None:
        self._confirmed.clear()
        for mailboxes in self._mailboxes.values():
            for mailbox in mailboxes:
                mailbox.is_subscribed.clear()
                mailbox.mark_gap()

    def _dispatch(self, message: dict[str, Any]) -> None:
        name = message["channel"]
        mailboxes = self._mailboxes.get(name, set())
        if message["type"] == "subscribe":
            self._confirmed.add(name)
            for mailbox in mailboxes:
                mailbox.is_subscribed.set()
        elif message["type"] == "message" and mailboxes:
            self._deliver(mailboxes, message["data"])

    def _deliver(self, mailboxes: set[Mailbox], raw: bytes) -> None:
        try:
            entry = decode_hint(raw)
        except (WireError, ValueError):
            for mailbox in mailboxes:
                mailbox.mark_gap()
            return
        for mailbox in mailboxes:
            mailbox.put(entry, len(raw))


async def _send(pubsub: PubSub, command: str, channel: bytes) -> None:
    """Raises ConnectionError where the connection is gone."""
    connection = pubsub.connection
    if connection is None or not connection.is_connected:
        raise ConnectionError
    await connection.send_command(command, channel, check_health=False)
