"""Processor time by part of a running `batchway up`. Linux only: reads /proc."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

# Part names by a piece of the command line; the first match counts.
_PARTS = {
    "engine": "workers.engine_process.engine_loop",
    "worker's supervisor": "infra worker",
    "gateway": "infra gateway",
    "Redis": "redis",
    "Redis (valkey)": "valkey",
    "callbacks": "callback",
}
OTHERS, CALLERS = "others", "the callers, in this process"


class ProcessorTime:
    """Sums up the use of a process and its descendants."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.by_part_s: dict[str, float] = {}

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        before = self._now_s()
        yield
        for part, seconds in self._now_s().items():
            gained = seconds - before.get(part, 0.0)
            self.by_part_s[part] = self.by_part_s.get(part, 0.0) + gained

    def _now_s(self) -> dict[str, float]:
        times = os.times()
        by_part = {CALLERS: times.user + times.system}
        for pid in below(self._pid):
            with contextlib.suppress(OSError):  # it has ended
                part = part_of(pid)
                by_part[part] = by_part.get(part, 0.0) + _used_s(pid)
        return by_part


def below(pid: int) -> list[int]:
    """The process and its descendants."""
    found = [pid]
    for parent in found:
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, path.read_text().split())
    return found


def part_of(pid: int) -> str:
    """The part's name. Raises OSError if the process has ended."""
    command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return next((part for part, text in _PARTS.items() if text in command), OTHERS)


def _used_s(pid: int) -> float:
    """The user and system time: fields 14 and 15 of stat."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
