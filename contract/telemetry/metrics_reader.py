"""Reads pages of metrics: lanes, workers and engines at one page and between two.

Does not fetch or display pages.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from contract.telemetry.metrics import PREFIX

CLASSES = ("decode", "mixed", "prefill")


class MetricsSamples:
    """The samples of one page, or their growth since an earlier page."""

    def __init__(self, samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float]) -> None:
        self._samples = samples

    @classmethod
    def parse(cls, text: str) -> "MetricsSamples":
        """Raises ValueError where the text is not a page of metrics."""
        return cls.of(text_string_to_metric_families(text))

    @classmethod
    def of(cls, families: Iterable[Metric]) -> "MetricsSamples":
        return cls(
            {
                (sample.name.removeprefix(PREFIX), frozenset(sample.labels.items())): sample.value
                for family in families
                for sample in family.samples
            }
        )

    def since(self, before: "MetricsSamples") -> "MetricsSamples":
        """The growth of counters and histograms; a lower value means that one has restarted."""
        earlier = before._samples
        return MetricsSamples(
            {
                key: value - earlier.get(key, 0.0) if value >= earlier.get(key, 0.0) else value
                for key, value in self._samples.items()
            }
        )

    def series(self, name: str) -> list[dict[str, str]]:
        """The labels of each series of a metric."""
        return [dict(sorted(labels)) for n, labels in self._samples if n == name]

    def value(self, name: str, **labels: str) -> float:
        """The sum of all series with these labels; 0 where there is none."""
        wanted = labels.items()
        return sum(
            value for (n, pairs), value in self._samples.items() if n == name and wanted <= pairs
        )

    def quantile(self, name: str, share: float, **labels: str) -> float | None:
        """As Prometheus computes it, linear within a bucket. None without observations."""
        wanted, counts = labels.items(), dict[float, float]()
        for (n, pairs), value in self._samples.items():
            if n == f"{name}_bucket" and wanted <= pairs:
                bound = float(dict(pairs)["le"])
                counts[bound] = counts.get(bound, 0.0) + value
        return quantile(sorted(counts.items()), share)

    def mean(self, name: str, **labels: str) -> float | None:
        count = self.value(f"{name}_count", **labels)
        return self.value(f"{name}_sum", **labels) / count if count else None


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """The quantile of ascending (upper bound, cumulative count); at most the last finite bound."""
    if not buckets or not buckets[-1][1]:
        return None
    rank = share * buckets[-1][1]
    lower, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower


@dataclass(frozen=True, slots=True)
class LaneRow:
    """A lane of a model. Times in seconds, as (p50, p99) or None; rates are None on a first
    page."""

    model: str
    lane: str
    num_running: int
    num_waiting: int
    queue_tokens: int
    oldest_s: float
    tokens_per_s: float | None
    jobs_per_s: float | None
    wait_s: tuple[float, float] | None
    ttft_s: tuple[float, float] | None
    itl_s: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker by its last heartbeat."""

    model: str
    worker: str
    seen_s: float
    num_jobs: int
    num_running: int
    num_waiting: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class EngineRow:
    """All engines of a model.

    `busy`: seconds of steps per worker and second, by class; None on a first page.
    """

    model: str
    num_workers: int
    busy: Mapping[str, float] | None
    step_share: Mapping[str, float]  # of all steps' time, by class
    step_s: Mapping[str, tuple[float, float] | None]
    batch_size: float | None
    prompt_share: float | None  # of the computed tokens
    padding: float | None
    prefix_hits: float | None
    num_preemptions: int
    num_recomputed: int


@dataclass(frozen=True, slots=True)
class MetricsReader:
    """The values of a page. `window_s`: seconds since the page before; None: since the start.
    `failed`: models that cannot stay up, each with the reason."""

    window_s: float | None
    is_broker_up: bool
    open_streams: int
    refusals: Mapping[str, int]  # by reason
    failed: Mapping[str, str]
    lanes: tuple[LaneRow, ...]
    workers: tuple[WorkerRow, ...]
    engines: tuple[EngineRow, ...]


def look(
    now: MetricsSamples, before: MetricsSamples | None = None, window_s: float | None = None
) -> MetricsReader:
    """The values of a page, with growth since the page before."""
    gained = now if before is None else now.since(before)
    return MetricsReader(
        window_s,
        now.value("broker_up") > 0,
        int(now.value("open_streams")),
        _refusals(now, gained),
        {labels["model_name"]: labels["reason"] for labels in now.series("failed_models")},
        tuple(_lane(now, gained, at, window_s) for at in now.series("num_requests_waiting")),
        tuple(_worker(now, at) for at in now.series("worker_jobs")),
        tuple(_engine(now, gained, at, window_s) for at in now.series("workers")),
    )


def _refusals(now: MetricsSamples, gained: MetricsSamples) -> dict[str, int]:
    """By reason, on all gateways; of what Redis does not refuse, on the gateway of the page."""
    sources = {at["reason"]: "admission_total" for at in now.series("admission_total")}
    sources |= {at["reason"]: "refusals_total" for at in now.series("refusals_total")}
    found = {why: int(gained.value(name, reason=why)) for why, name in sorted(sources.items())}
    return {why: num for why, num in found.items() if why and num}


def _pair(page: MetricsSamples, name: str, **labels: str) -> tuple[float, float] | None:
    p50, p99 = (page.quantile(name, share, **labels) for share in (0.5, 0.99))
    return None if p50 is None or p99 is None else (p50, p99)


def _lane(
    now: MetricsSamples, gained: MetricsSamples, at: dict[str, str], window_s: float | None
) -> LaneRow:
    def rate(name: str) -> float | None:
        return None if window_s is None else gained.value(name, **at) / window_s

    return LaneRow(
        at["model_name"],
        at["lane"],
        int(now.value("num_requests_running", **at)),
        int(now.value("num_requests_waiting", **at)),
        int(now.value("queue_tokens", **at)),
        now.value("queue_oldest_age_seconds", **at),
        rate("generation_tokens_total"),
        rate("requests_total"),
        _pair(gained, "request_queue_time_seconds", **at),
        _pair(gained, "time_to_first_token_seconds", **at),
        _pair(gained, "inter_token_latency_seconds", **at),
    )


def _worker(now: MetricsSamples, at: dict[str, str]) -> WorkerRow:
    return WorkerRow(
        at["model_name"],
        at["worker"],
        now.value("worker_seen_age_seconds", **at),
        int(now.value("worker_jobs", **at)),
        int(now.value("worker_sequences", state="running", **at)),
        int(now.value("worker_sequences", state="waiting", **at)),
        now.value("kv_cache_usage_perc", **at),
    )


def _engine(
    now: MetricsSamples, gained: MetricsSamples, at: dict[str, str], window_s: float | None
) -> EngineRow:
    num_workers = int(now.value("workers", **at))
    spent_s = {
        kind: gained.value("step_duration_seconds_sum", **{"class": kind}, **at) for kind in CLASSES
    }
    all_s = sum(spent_s.values())
    prefill, decode = (
        gained.value("step_tokens_total", kind=kind, **at) for kind in ("prefill", "decode")
    )
    queries = gained.value("prefix_cache_queries_total", **at)
    busy = None
    if window_s is not None:
        busy = {kind: s / window_s / max(1, num_workers) for kind, s in spent_s.items()}
    return EngineRow(
        at["model_name"],
        num_workers,
        busy,
        {kind: s / all_s if all_s else 0.0 for kind, s in spent_s.items()},
        {kind: _pair(gained, "step_duration_seconds", **{"class": kind}, **at) for kind in CLASSES},
        gained.mean("batch_size", **at),
        prefill / (prefill + decode) if prefill + decode else None,
        gained.mean("padding_ratio", **at),
        gained.value("prefix_cache_hits_total", **at) / queries if queries else None,
        int(gained.value("num_preemptions_total", **at)),
        int(gained.value("tokens_recomputed_total", **at)),
    )
