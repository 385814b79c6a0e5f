"""Metrics of a pool for CloudWatch: a model's lanes in the embedded format.

One line per lane and snapshot, and one for all lanes. Counts are differences to the previous
snapshot. First-token times are reported as upper bounds of their buckets, so percentiles are exact
to a bucket.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from contract.function_types import FleetSnapshot, LaneSnapshot
from contract.telemetry.metrics import LATENCY_BOUNDS_S, embedded_line

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
