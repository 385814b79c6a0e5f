"""Metrics of a pool for CloudWatch: a model's lanes in the embedded format, and their sender.

One line per lane and snapshot, and one for all lanes. Counts are differences to the previous
snapshot. First-token times are reported as upper bounds of their buckets, so percentiles are exact
to a bucket.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from contract.function_types import FleetSnapshot, LaneSnapshot
from contract.telemetry.metrics import LATENCY_BOUNDS_S, embedded_line

EVERY_S = 60.0  # alarms check once a minute; every call costs
_MAX_OF_ONE_CALL = 500  # per call; CloudWatch accepts 1,000, and 1 MB
MAX_VALUES = 100  # per metric and line
UNITS = {
    "WaitingJobs": "Count",
    "RunningJobs": "Count",
    "WaitingTokens": "Count",
    "OldestWaitS": "Seconds",
    "PromptTokens": "Count",
    "OutputTokens": "Count",
    "JobsSucceeded": "Count",
    "JobsFailed": "Count",
    "JobsExpired": "Count",
    "FirstTokenS": "Seconds",
}


@dataclass(slots=True)
class FleetLines:
    """The metrics of one model. The first snapshot reports no differences."""

    model: str
    _reported: Mapping[str, int] | None = field(default=None)

    def lines(self, snapshot: FleetSnapshot) -> Iterator[str]:
        before = snapshot.totals if self._reported is None else self._reported
        gained = {f: max(0, value - before.get(f, 0)) for f, value in snapshot.totals.items()}
        self._reported = snapshot.totals
        yield embedded_line({"Model": self.model}, _ended(gained), UNITS, snapshot.now_s)
        for lane, lane_snapshot in snapshot.lanes.items():
            labels = {"Model": self.model, "Lane": lane}
            values = _values(lane, lane_snapshot, gained)
            yield embedded_line(labels, values, UNITS, snapshot.now_s)


def _ended(gained: Mapping[str, int]) -> dict[str, float | list[float]]:
    """Of all lanes together, which alarms watch: they take no search over lanes."""
    totals: Counter[str] = Counter()
    for name, num in gained.items():
        if name.startswith("requests_total:"):
            totals[name.rpartition(":")[2]] += num
    return {"JobsSucceeded": totals["succeeded"], "JobsFailed": totals["failed"]}


def _values(
    lane: str, lane_snapshot: LaneSnapshot, gained: Mapping[str, int]
) -> dict[str, float | list[float]]:
    values: dict[str, float | list[float]] = {
        "WaitingJobs": lane_snapshot.num_queued,
        "RunningJobs": lane_snapshot.num_running,
        "WaitingTokens": lane_snapshot.queued_tokens,
        "OldestWaitS": round(lane_snapshot.oldest_wait_s, 3),
        "PromptTokens": gained.get(f"prompt_tokens_total:{lane}", 0),
        "OutputTokens": gained.get(f"generation_tokens_total:{lane}", 0),
    }
    for status in ("succeeded", "failed", "expired"):
        name = f"Jobs{status.capitalize()}"
        values[name] = gained.get(f"requests_total:{lane}:{status}", 0)
    series = f"time_to_first_token_seconds:{lane}"
    counts = [gained.get(f"{series}:{i}", 0) for i in range(1, len(LATENCY_BOUNDS_S) + 2)]
    if first_tokens := spread(counts):
        values["FirstTokenS"] = first_tokens
    return values


def spread(counts: list[int]) -> list[float]:
    """The buckets' bounds, each repeated by its count; if that is too many, in proportion, with at
    least one for every non-empty bucket."""
    total = sum(counts)
    room = MAX_VALUES - len(counts)
    values: list[float] = []
    for bound, count in zip((*LATENCY_BOUNDS_S, LATENCY_BOUNDS_S[-1]), counts, strict=True):
        times = count if total <= MAX_VALUES else -(-count * room // total)
        values += [bound] * times
    return values


@dataclass(slots=True)
class MetricSender:
    """Collects lines in CloudWatch's embedded format and sends their values periodically by
    PutMetricData, for a pool service whose log is not read by CloudWatch."""

    client: Any
    clock_s: Callable[[], float] = time.time
    _waiting: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by namespace
    _sent_s: float = float("-inf")

    def __call__(self, line: str) -> None:
        """Raises botocore's ClientError or BotoCoreError; unsent values are then lost."""
        for namespace, datum in data_of(line):
            self._waiting.setdefault(namespace, []).append(datum)
        if self.clock_s() - self._sent_s < EVERY_S:
            return
        self._sent_s = self.clock_s()
        waiting, self._waiting = self._waiting, {}
        for namespace, data in waiting.items():
            for start in range(0, len(data), _MAX_OF_ONE_CALL):
                some = data[start : start + _MAX_OF_ONE_CALL]
                self.client.put_metric_data(Namespace=namespace, MetricData=some)


def data_of(line: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The metrics that a line declares, with their namespaces."""
    record = json.loads(line)
    for about in record["_aws"]["CloudWatchMetrics"]:
        for names in about["Dimensions"]:
            dimensions = [{"Name": name, "Value": record[name]} for name in names]
            for metric in about["Metrics"]:
                value = record[metric["Name"]]
                datum = {
                    "MetricName": metric["Name"],
                    "Unit": metric["Unit"],
                    "Timestamp": record["_aws"]["Timestamp"] / 1000,
                    "Dimensions": dimensions,
                    "Values": value if isinstance(value, list) else [value],
                }
                yield about["Namespace"], datum
