"""A queue of job deadlines."""

from heapq import heappop, heappush


class Deadlines:
    """Times on the engine's clock. A job may have several; the engine knows the valid one."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str, int]] = []

    @property
    def next_s(self) -> float | None:
        """The earliest, even if out of date."""
        return self._heap[0][0] if self._heap else None

    def add(self, deadline_s: float, job_id: str, epoch: int) -> None:
        heappush(self._heap, (deadline_s, job_id, epoch))

    def take_passed(self, now_s: float) -> list[tuple[float, str, int]]:
        """Deadlines up to now, in order, with job and epoch."""
        passed = []
        while self._heap and self._heap[0][0] <= now_s:
            passed.append(heappop(self._heap))
        return passed
