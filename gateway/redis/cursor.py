"""A follower's position in a job's log, and the items that it receives."""

from collections.abc import Sequence

import msgspec

from contract.events import End, LogEntry
from contract.function_types import JobView


class Idle(msgspec.Struct, frozen=True):
    """No new event for a while. `view` is the job as last read; None while Redis is down."""

    view: JobView | None


class Reset(msgspec.Struct, frozen=True):
    """The log was replaced: the next event is the first of the new log."""


class LogPage(msgspec.Struct, frozen=True):
    """A job and the new items of its log. `is_whole`: the log has no more at present."""

    view: JobView
    items: Sequence[LogEntry | Reset]
    is_whole: bool


def is_end(item: LogEntry | Reset) -> bool:
    return isinstance(item, LogEntry) and isinstance(item.event, End)


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
