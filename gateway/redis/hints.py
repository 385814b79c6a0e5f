"""How followers get a job's log: hints from one subscription connection for the whole gateway, and
each follower's position.

A hint is a log event as published. Hints may be lost; if a mailbox is full, it drops them. The
mailbox then reports a gap, and its owner reads the log.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import redis.asyncio
from redis.asyncio.client import PubSub

from contract.codec import decode_logged
from contract.connection import Listener, broker_errors, end_tasks
from contract.errors import BrokerUnavailable, CommandDenied, WireError
from contract.events import End, LogEntry
from contract.function_types import JobView

log = logging.getLogger("batchway.gateway")

SUBSCRIBE_TIMEOUT_S = 0.25  # seconds; then the follower goes on without hints and polls the log
RECONNECT_S = 0.5


class Idle(msgspec.Struct, frozen=True):
    """No new event for a while. `view` is the job as last read; None while Redis is down."""

    view: JobView | None


class Reset(msgspec.Struct, frozen=True):
    """The log was replaced: the next event is the first of the new log."""


# What a follower gets: the events that came at once, without the End, which comes by itself.
News = list[LogEntry] | LogEntry | Idle | Reset


def news_of(entries: list[LogEntry]) -> list[News]:
    """Events in their order, without a gap, as a follower gets them."""
    if not entries or not isinstance(entries[-1].event, End):
        return [entries] if entries else []
    *before, end = entries
    return [before, end] if before else [end]


class Cursor:
    """A position in a log: the number of the last event received, and the log's hash at
    that event."""

    def __init__(self, number: int, hash_: str | None) -> None:
        self._number = number
        self._hash = hash_
        self._is_behind = False  # the log has lost events that the follower has

    @property
    def read_after(self) -> int:
        """The event after which to read. The last one is read again, because a Redis that lost it
        may have another in its place."""
        return self._number - 1 if self._number and self._hash else self._number

    def agrees_with(self, view: JobView, entries: Sequence[LogEntry]) -> bool:
        """Whether the log contains what the follower has, or may still contain it later."""
        if self._number == 0:
            return True
        self._is_behind = view.next_number <= self._number
        if self._is_behind:
            return self._hash is not None and not view.is_terminal
        if self._hash is None:
            return True
        return bool(entries) and (entries[0].number, entries[0].hash) == (self._number, self._hash)

    def next_of(self, entries: Sequence[LogEntry]) -> list[LogEntry]:
        """Returns the hints that follow without a gap, and moves the position behind them."""
        fresh: list[LogEntry] = []
        for entry in entries:
            if entry.number == self._number and entry.hash != self._hash and self._hash:
                self._is_behind = True  # the log was replaced: the next read will show it
            if entry.number == self._number + 1 and not self._is_behind:
                self._number, self._hash = entry.number, entry.hash
                fresh.append(entry)
        return fresh

    def misses_some_of(self, hints: Sequence[LogEntry]) -> bool:
        """Whether the log must be read, because hints cannot fill a gap."""
        return not hints or self._is_behind or hints[-1].number > self._number

    def reset(self) -> None:
        self._number, self._hash, self._is_behind = 0, None, False


class Mailbox:
    """The hints for one follower, limited in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.is_subscribed = asyncio.Event()
        self._max_bytes = max_bytes
        self._hints: deque[LogEntry] = deque()
        self._num_bytes = 0
        self._has_gap = False
        self._has_news = False
        self._waiting: asyncio.Future[None] | None = None  # set for the owner when hints arrive
        self._waits_until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, entry: LogEntry, num_bytes: int) -> None:
        if self._num_bytes + num_bytes > self._max_bytes:
            self.mark_gap()
            return
        self._hints.append(entry)
        self._num_bytes += num_bytes
        self._has_news = True
        self._wake()

    def mark_gap(self) -> None:
        """Drops waiting hints: the log has more than the mailbox."""
        self._hints.clear()
        self._num_bytes = 0
        self._has_gap = True
        self._has_news = True
        self._wake()

    async def take(self, timeout_s: float) -> list[LogEntry] | None:
        """Waits for hints and returns them; [] after a gap, None after the timeout."""
        if not self._has_news:
            loop = asyncio.get_running_loop()
            self._waiting = loop.create_future()
            self._waits_until_s = loop.time() + timeout_s
            # One timer for many tokens: most come long before it is due.
            if self._timer is None or self._timer.when() > self._waits_until_s:
                self._start_timer(loop)
            try:
                await self._waiting
            finally:
                self._waiting = None
            if not self._has_news:
                return None
        hints = [] if self._has_gap else list(self._hints)
        self._hints.clear()
        self._num_bytes = 0
        self._has_gap = self._has_news = False
        return hints

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _start_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self.close()
        self._timer = loop.call_at(self._waits_until_s, self._note_time, loop)

    def _note_time(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiting is None:
            return
        if loop.time() < self._waits_until_s:
            self._start_timer(loop)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class Hints:
    """The shared subscription. `listen` starts it and `aclose` ends it."""

    def __init__(self, client: redis.asyncio.Redis, *, max_bytes: int) -> None:
        self._client = client
        self._max_bytes = max_bytes
        self._mailboxes: dict[bytes, dict[bytes, set[Mailbox]]] = {}  # by channel and job
        self._confirmed: set[bytes] = set()
        self._is_changed = False  # set when the channels with mailboxes change
        self._listener: Listener | None = None
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def listen(self, channel: str, job_id: str) -> AsyncIterator[Mailbox]:
        """A mailbox for a job's events in a channel. It is subscribed, unless Redis is slow to
        confirm."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="hints")
        name, mailbox = channel.encode(), Mailbox(self._max_bytes)
        self._enter(name, job_id.encode(), mailbox)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(SUBSCRIBE_TIMEOUT_S):
                    await mailbox.is_subscribed.wait()
            yield mailbox
        finally:
            mailbox.close()
            self._leave(name, job_id.encode(), mailbox)

    async def aclose(self) -> None:
        if self._task is not None:
            await end_tasks(self._task)
            self._task = None
        await self._client.aclose()

    def _enter(self, name: bytes, job_id: bytes, mailbox: Mailbox) -> None:
        if name not in self._mailboxes:
            self._mailboxes[name] = {}
            self._note_change()
        self._mailboxes[name].setdefault(job_id, set()).add(mailbox)
        if name in self._confirmed:
            mailbox.is_subscribed.set()

    def _leave(self, name: bytes, job_id: bytes, mailbox: Mailbox) -> None:
        followers = self._mailboxes[name]
        followers[job_id].discard(mailbox)
        if not followers[job_id]:
            del followers[job_id]
        if not followers:
            del self._mailboxes[name]
            self._note_change()

    def _note_change(self) -> None:
        self._is_changed = True
        if self._listener is not None:
            self._listener.interrupt()

    async def _run(self) -> None:
        while True:
            try:
                with broker_errors(self._client, "SUBSCRIBE"):
                    async with self._client.pubsub() as pubsub:
                        await self._follow(pubsub)
            except CommandDenied as exc:
                log.error("no hints: %s", exc)
            except BrokerUnavailable as exc:
                log.warning("the subscription broke (%s); polling", exc)
            finally:
                self._forget_subscriptions()
            await asyncio.sleep(RECONNECT_S)

    async def _follow(self, pubsub: PubSub) -> None:
        """Subscribes to the channels that have mailboxes, and passes on messages until an error."""
        await pubsub.connect()  # type: ignore[no-untyped-call]
        self._listener = Listener(pubsub, self._on_message)
        subscribed: set[bytes] = set()
        self._is_changed = True
        while True:
            while self._is_changed:
                self._is_changed = False
                wanted = set(self._mailboxes)
                if left := subscribed - wanted:
                    self._confirmed -= left
                    await pubsub.unsubscribe(*left)
                if new := wanted - subscribed:
                    await pubsub.subscribe(*new)
                subscribed = wanted
            await self._listener.listen()

    def _on_message(self, message: dict[str, Any]) -> None:
        if message["type"] == "message":
            self._deliver(message["channel"], message["data"])
        elif message["type"] == "subscribe":
            self._confirm(message["channel"])

    def _forget_subscriptions(self) -> None:
        self._confirmed.clear()
        for name in self._mailboxes:
            for mailbox in self._of_channel(name):
                mailbox.is_subscribed.clear()
                mailbox.mark_gap()

    def _confirm(self, name: bytes) -> None:
        """A repeated confirmation means that redis-py reconnected and messages may be lost."""
        is_again = name in self._confirmed
        self._confirmed.add(name)
        for mailbox in self._of_channel(name):
            mailbox.is_subscribed.set()
            if is_again:
                mailbox.mark_gap()

    def _of_channel(self, name: bytes) -> Iterator[Mailbox]:
        return itertools.chain.from_iterable(self._mailboxes.get(name, {}).values())

    def _deliver(self, name: bytes, message: bytes) -> None:
        """Passes on the events of a message: `<job id> <bytes of the event>`, a line end and the
        event as in the log, for each."""
        by_job, start = self._mailboxes.get(name, {}), 0
        try:
            while start < len(message):
                first = message.index(b"\n", start) + 1
                job_id, length = message[start : first - 1].split(b" ")
                start = first + int(length)
                logged = message[first:start]
                if len(logged) != int(length):
                    raise WireError("a message that is cut off")
                if mailboxes := by_job.get(job_id):
                    entry = decode_logged(logged)
                    for mailbox in mailboxes:
                        mailbox.put(entry, len(logged))
        except (ValueError, WireError):
            for mailbox in self._of_channel(name):
                mailbox.mark_gap()
