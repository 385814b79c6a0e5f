"""Whole numbers that only grow, by field: `metric:label:…`, a histogram's `…:bucket` and `…:sum`.

The fields are those of the totals in Redis, so that what a worker counts can be added up there.
"""

from bisect import bisect_left
from collections import Counter

from contract.telemetry.metrics import METRICS


class Counts:
    """What one process has counted since it began."""

    def __init__(self) -> None:
        self.fields: Counter[str] = Counter()

    def add(self, name: str, *labels: str, value: int = 1) -> None:
        if value:
            self.fields[":".join((name, *labels))] += value

    def set_total(self, name: str, value: int) -> None:
        """A total that is counted elsewhere."""
        if value:
            self.fields[name] = value

    def observe(self, name: str, *labels: str, value: float, times: int = 1) -> None:
        """A histogram's next value, in the metric's unit; so many of the same."""
        metric = METRICS[name]
        series = ":".join((name, *labels))
        bucket = bisect_left(metric.bounds, value) + 1
        self.fields[f"{series}:{bucket}"] += times
        if sum_ := round(value / metric.scale) * times:
            self.fields[f"{series}:sum"] += sum_
