"""What one meets who follows a job's log: events, silence, and a log that begins anew."""

from collections.abc import Sequence

import msgspec

from contract.events import End, LogEntry
from contract.function_types import JobView


class Idle(msgspec.Struct, frozen=True):
    """Nothing new for a while; the job as it was last read, None while Redis is away."""

    view: JobView | None


class Reset(msgspec.Struct, frozen=True):
    """The log is not the one that was read so far: what follows starts at its first event."""


class LogPage(msgspec.Struct, frozen=True):
    """A job, what is new in its log, and whether that is all there is just now."""

    view: JobView
    items: Sequence[LogEntry | Reset]
    is_whole: bool


def is_end(item: LogEntry | Reset) -> bool:
    return isinstance(item, LogEntry) and isinstance(item.event, End)
