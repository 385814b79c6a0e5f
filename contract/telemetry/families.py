"""Makes Prometheus families of counted fields and fleet snapshots, and pages of families."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from contract.function_types import FleetSnapshot
from contract.jobs import JobStatus
from contract.telemetry.metrics import METRICS, Metric, Source, of_sources

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4  # every Prometheus reads it

Labels = tuple[str, ...]


def counted_families(fields: Mapping[str, Mapping[str, int]], *sources: Source) -> Iterator[Family]:
    """One family for each metric of these sources; `fields` by model. Ignores unknown fields, which
    other versions may write."""
    for metric in of_sources(*sources):
        series = {
            (model, *labels): values
            for model, counts in fields.items()
            for labels, values in _series(metric, counts).items()
        }
        if metric.kind == "histogram":
            yield _histogram(metric, series)
        else:
            family = CounterMetricFamily(metric.full_name, metric.help, labels=metric.all_labels)
            for labels, values in sorted(series.items()):
                family.add_metric(labels, values[""] * metric.scale)
            yield family


def _series(metric: Metric, counts: Mapping[str, int]) -> dict[Labels, dict[str, int]]:
    """The parts of each series: '' for a counter, the buckets and `sum` for a histogram."""
    series: dict[Labels, dict[str, int]] = {}
    num_parts = len(metric.labels) + (metric.kind == "histogram")
    for field, value in counts.items():
        name, _, rest = field.partition(":")
        if name != metric.name:
            continue
        parts = rest.split(":") if rest else []
        if len(parts) > num_parts and metric.labels[:1] == ("lane",):  # the lane contains colons
            cut = len(parts) - num_parts + 1
            parts = [":".join(parts[:cut]), *parts[cut:]]
        if len(parts) != num_parts:
            continue
        part = parts.pop() if metric.kind == "histogram" else ""
        series.setdefault(tuple(parts), {})[part] = value
    return series


def _histogram(metric: Metric, series: Mapping[Labels, Mapping[str, int]]) -> Family:
    family = HistogramMetricFamily(metric.full_name, metric.help, labels=metric.all_labels)
    for labels, values in sorted(series.items()):
        cumulative, buckets = 0, []
        for i, bound in enumerate((*metric.bounds, float("inf")), 1):
            cumulative += values.get(str(i), 0)
            buckets.append(("+Inf" if bound == float("inf") else str(bound), cumulative))
        family.add_metric(labels, buckets, values.get("sum", 0) * metric.scale)
    return family


def gateway_families(counts: Mapping[str, Mapping[Labels, int]]) -> Iterator[Family]:
    """A gateway's own counts, by name and labels."""
    for name, series in counts.items():
        metric = METRICS[name]
        kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
        family = kind(metric.full_name, metric.help, labels=metric.all_labels)
        for labels, value in sorted(series.items()):
            family.add_metric(labels, value)
        yield family


def fleet_families(snapshots: Mapping[str, FleetSnapshot]) -> Iterator[Family]:
    """Current lanes and workers by model; attempts of callbacks; corrections."""
    gauges = {
        metric.name: GaugeMetricFamily(metric.full_name, metric.help, labels=metric.all_labels)
        for metric in of_sources(Source.FLEET)
    }
    for model, snapshot in snapshots.items():
        gauges["workers"].add_metric((model,), len(snapshot.workers))
        for lane, lane_snapshot in snapshot.lanes.items():
            gauges["num_requests_running"].add_metric((model, lane), lane_snapshot.num_running)
            gauges["num_requests_waiting"].add_metric((model, lane), lane_snapshot.num_queued)
            gauges["queue_tokens"].add_metric((model, lane), lane_snapshot.queued_tokens)
            gauges["queue_oldest_age_seconds"].add_metric(
                (model, lane), lane_snapshot.oldest_wait_s
            )
            if (ratio := deadline_kept_ratio(snapshot, lane)) is not None:
                gauges["deadline_kept_ratio"].add_metric((model, lane), ratio)
        for worker in snapshot.workers:
            labels = (model, worker.incarnation)
            gauges["worker_seen_age_seconds"].add_metric(labels, worker.seen_s)
            gauges["worker_jobs"].add_metric(labels, worker.num_jobs_held)
            gauges["worker_sequences"].add_metric((*labels, "running"), worker.num_running)
            gauges["worker_sequences"].add_metric((*labels, "waiting"), worker.num_waiting)
            gauges["kv_cache_usage_perc"].add_metric(labels, worker.kv_usage)
            retained = worker.num_retained_blocks / max(1, worker.num_blocks)
            gauges["kv_cache_retained_perc"].add_metric(labels, retained)
    yield from gauges.values()
    # Deliveries and corrections are the same in each model's snapshot.
    any_snapshot = next(iter(snapshots.values()), None)
    totals = any_snapshot.totals if any_snapshot else {}
    deliveries = any_snapshot.deliveries if any_snapshot else {}
    counts: dict[str, dict[Labels, int]] = {
        "webhook_deliveries_total": {(outcome,): num for outcome, num in deliveries.items()},
        # Includes zeros: Prometheus sees no increase in a series that begins with 1.
        "corrections_total": {("type",): totals.get("corrections_total:type", 0)},
    }
    yield from gateway_families(counts)


def deadline_kept_ratio(snapshot: FleetSnapshot, lane: str) -> float | None:
    """The share of succeeded jobs among succeeded and expired ones; None without any."""
    succeeded, expired = (
        snapshot.totals.get(f"requests_total:{lane}:{status}", 0)
        for status in (JobStatus.SUCCEEDED, JobStatus.EXPIRED)
    )
    return succeeded / (succeeded + expired) if succeeded + expired else None


class _Given(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def page(families: Iterable[Family]) -> bytes:
    """The families as the text that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(families))
    return generate_latest(registry)
