"""The retry times of refused jobs: contract/lua/_promises.lua in Python.

Callers return one after another as room becomes free, and the lines (a tenant in a lane) take
turns. reference_admission.py computes the earliest time of a retry.
"""

from dataclasses import dataclass, field

UNPROMISED_RATIO = 2  # half of the drain rate is promised, the other half is for new jobs
MAX_PROMISE_MS = 3_600_000

Line = tuple[str, str]  # lane and tenant


@dataclass(slots=True)
class Promises:
    """The promises of one model: the next retry time of each line (ms). Past ones do not count."""

    next_ms: dict[Line, int] = field(default_factory=dict)

    def next(self, line: Line, gap_ms: int, retry_ms: int, now_ms: int) -> tuple[int, int]:
        """The line's next retry time, at the earliest in `retry_ms`, and the one after it.

        `gap_ms` is how long a job of this cost takes of the promised rate.
        """
        num_lines = sum(at_ms > now_ms for at_ms in self.next_ms.values())
        own_ms, at_ms = self.next_ms.get(line, 0), now_ms + retry_ms
        if own_ms > now_ms:
            at_ms = max(at_ms, own_ms)
        else:
            at_ms += num_lines * gap_ms
            num_lines += 1
        latest_ms = now_ms + max(retry_ms, MAX_PROMISE_MS)
        return min(at_ms, latest_ms), min(at_ms + num_lines * gap_ms, latest_ms)

    def book(self, line: Line, after_ms: int) -> None:
        """The line's next caller returns at this time or later."""
        self.next_ms[line] = after_ms

    def forget(self, line: Line) -> None:
        """A job of the line was admitted at once: its promises no longer delay others."""
        self.next_ms.pop(line, None)
