"""All metrics: names, labels, help texts. `python -m infra.options_page metrics` lists them.

Names follow vLLM's where one exists, under the prefix `batchway_`. Counting is done elsewhere: in
Redis Functions (contract/lua/_totals.lua), workers/supervisor/metrics.py and
gateway/http/metrics.py.
"""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

PREFIX = "batchway_"

LATENCY_BOUNDS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(300.0, 1800.0, 7200.0),
)
STEP_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5),
    *(1.0, 2.5, 10.0),
)
BATCH_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
# Names of the ranges between these bounds.
BATCHES = ("1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "65-128", "129-256", "257-512", "513+")
RATIO_BOUNDS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


class Source(StrEnum):
    """Where a metric is counted, which decides whose page shows it."""

    JOBS = "jobs"  # in Redis; on every gateway's page, for all gateways
    ENGINES = "engines"  # by workers; on their own page, and the sum on every gateway's
    FLEET = "fleet"  # the current state in Redis; on every gateway's page
    GATEWAY = "gateway"  # by one gateway, on its own page


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. `labels` exclude model_name, which all but a gateway's own metrics have. `scale`:
    the metric's units per unit of a field's whole numbers."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    source: Source
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    scale: float = 1.0

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    @property
    def all_labels(self) -> tuple[str, ...]:
        return self.labels if self.source is Source.GATEWAY else ("model_name", *self.labels)


_LANE = ("lane",)
_CONFIG = ("config",)
_STEPS = ("class", "batch")
_US = 1e-6  # seconds and shares are summed in millionths


def _jobs(name: str, help_: str, *labels: str) -> Metric:
    return Metric(name, "counter", Source.JOBS, help_, ("lane", *labels))


def _latency(name: str, help_: str, labels: tuple[str, ...] = _LANE) -> Metric:
    return Metric(name, "histogram", Source.JOBS, help_, labels, LATENCY_BOUNDS_S, _US)


def _config(name: str, help_: str, *labels: str) -> Metric:
    return Metric(name, "counter", Source.JOBS, help_, (*_CONFIG, *labels))


def _engines(name: str, help_: str, *labels: str, scale: float = 1.0) -> Metric:
    return Metric(name, "counter", Source.ENGINES, help_, labels, scale=scale)


def _engine_histogram(
    name: str, help_: str, bounds: tuple[float, ...], *labels: str, scale: float = 1.0
) -> Metric:
    return Metric(name, "histogram", Source.ENGINES, help_, labels, bounds, scale)


def _now(name: str, help_: str, *labels: str) -> Metric:
    return Metric(name, "gauge", Source.FLEET, help_, labels)


def _gateway(name: str, help_: str, *labels: str, is_gauge: bool = False) -> Metric:
    return Metric(name, "gauge" if is_gauge else "counter", Source.GATEWAY, help_, labels)


_ALL = (
    _jobs("prompt_tokens_total", "Prompt tokens of jobs that have had output."),
    _jobs("prompt_tokens_cached_total", "Those of them that were found in a prefix cache."),
    _jobs("generation_tokens_total", "Output tokens in the jobs' logs."),
    _jobs("requests_total", "Ended jobs.", "status"),
    _jobs("refusals_total", "New jobs that Redis refused, of all gateways.", "reason"),
    _jobs("attempts_total", "Claims by workers; beyond the jobs, repeated work."),
    _latency("time_to_first_token_seconds", "From a job's submission to its first output."),
    _latency("request_queue_time_seconds", "From a job's submission to its first claim."),
    _latency("e2e_request_latency_seconds", "From a job's submission to its success."),
    _config("config_submitted_total", "Jobs that an A/B assigned to a version."),
    _config("config_requests_total", "Those that have ended.", "status"),
    _config("config_generation_tokens_total", "Their output tokens, at their end."),
    _latency(
        "config_time_to_first_token_seconds",
        "From submission to first output.",
        _CONFIG,
    ),
    _latency(
        "config_inter_token_latency_seconds",
        "Mean time between tokens; one value per job.",
        _CONFIG,
    ),
    _latency(
        "config_e2e_request_latency_seconds",
        "From submission to success.",
        _CONFIG,
    ),
    Metric("warmed_tokens_total", "counter", Source.JOBS, "Tokens of likely next prompts."),
    Metric("warmed_tokens_used_total", "counter", Source.JOBS, "Those that later prompts had."),
    _engines("num_preemptions_total", "Sequences that lost their KV blocks to others."),
    _engines("tokens_recomputed_total", "Tokens computed again after a preemption."),
    _engines("tokens_forced_total", "Output tokens that a grammar forced."),
    _engines("tokens_after_cancel_total", "Tokens computed for cancelled jobs."),
    _engines("prefix_cache_queries_total", "Tokens looked up in the prefix cache."),
    _engines("prefix_cache_hits_total", "Tokens found in the prefix cache."),
    _engines("spec_decode_num_draft_tokens_total", "Tokens drafted by prompt lookup."),
    _engines("spec_decode_num_accepted_tokens_total", "Drafted tokens that were right."),
    _engines("step_tokens_total", "Tokens computed: prefill, decode, padding.", "kind"),
    _engines(
        "steps_total",
        "Steps by class and by their sequences (`1`, `2`, `3-4` … `513+`). The own engine's steps "
        "before its first prediction are left out.",
        *_STEPS,
    ),
    _engines(
        "step_model_seconds_total",
        "Time of these steps in the model: less than `step_duration_seconds`.",
        *_STEPS,
        scale=_US,
    ),
    _engines(
        "step_predicted_seconds_total",
        "The same time, as it was predicted before each step. Not with vLLM.",
        *_STEPS,
        scale=_US,
    ),
    _engines("engine_failures_total", "Engine processes that died."),
    _engine_histogram(
        "inter_token_latency_seconds",
        "Between two tokens of one choice.",
        STEP_BOUNDS_S,
        "lane",
        scale=_US,
    ),
    _engine_histogram(
        "step_duration_seconds",
        "Steps by class: decode, prefill (prompts alone), mixed.",
        STEP_BOUNDS_S,
        "class",
        scale=_US,
    ),
    _engine_histogram("batch_size", "Sequences in a step.", BATCH_BOUNDS),
    _engine_histogram(
        "padding_ratio", "Share of a step's tokens that is padding.", RATIO_BOUNDS, scale=_US
    ),
    _now("num_requests_running", "Jobs that workers hold.", "lane"),
    _now("num_requests_waiting", "Jobs that wait for a worker.", "lane"),
    _now("queue_tokens", "Cost of waiting jobs.", "lane"),
    _now("queue_oldest_age_seconds", "Age of the oldest waiting job.", "lane"),
    _now("deadline_kept_ratio", "Jobs that succeeded, of those that succeeded or expired.", "lane"),
    _now("workers", "Workers that take jobs."),
    _now("worker_seen_age_seconds", "Time since a worker's last heartbeat.", "worker"),
    _now("worker_jobs", "Jobs that a worker holds.", "worker"),
    _now(
        "worker_sequences", "Sequences of a worker: running, waiting for room.", "worker", "state"
    ),
    _now("kv_cache_usage_perc", "Share of a worker's KV blocks in use, 0 to 1.", "worker"),
    _now("kv_cache_retained_perc", "Share of KV blocks kept while sessions' tools run.", "worker"),
    _gateway("admission_total", "Answers to new jobs.", "model_name", "lane", "outcome", "reason"),
    _gateway("tenant_admission_total", "Answers to new jobs, by tenant.", "tenant", "outcome"),
    _gateway("http_requests_total", "Requests answered.", "route", "method", "status"),
    _gateway("resumed_streams_total", "Streams resumed after a broken connection."),
    _gateway("open_streams", "Open streams.", is_gauge=True),
    _gateway(
        "unreadable_models",
        "Models whose data it cannot read.",
        is_gauge=True,
    ),
    _gateway(
        "failed_models",
        "1 for each model that cannot stay up.",
        "model_name",
        "reason",
        is_gauge=True,
    ),
    _gateway(
        "pool_workers_wanted",
        "Workers that a pool should have, as decided within the last minute.",
        "model_name",
        is_gauge=True,
    ),
    _gateway("broker_up", "1 where Redis answers, else 0.", is_gauge=True),
    _gateway(
        "webhook_deliveries_total", "Attempts to deliver callbacks, of all gateways.", "outcome"
    ),
    _gateway(
        "corrections_total",
        "Keys of a wrong type that were deleted (`type`), of all gateways.",
        "kind",
    ),
)

METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _ALL})


def of_sources(*sources: Source) -> Iterable[Metric]:
    """The metrics of these sources."""
    return (metric for metric in _ALL if metric.source in sources)


class Counts:
    """What one process has counted since it began: whole numbers that only grow, by field.

    A field is `metric:label:…`, for a histogram followed by `:bucket` or `:sum`, as in the totals
    in Redis, to which a worker's counts are added.
    """

    def __init__(self) -> None:
        self.fields: Counter[str] = Counter()

    def add(self, name: str, *labels: str, value: float = 1) -> None:
        """Adds to a counter, in the metric's unit."""
        if value:
            self.fields[":".join((name, *labels))] += round(value / METRICS[name].scale)

    def set_total(self, name: str, value: int) -> None:
        """Sets a total that is counted elsewhere."""
        if value:
            self.fields[name] = value

    def observe(self, name: str, *labels: str, value: float, times: int = 1) -> None:
        """Adds `times` equal values, in the metric's unit, to a histogram."""
        metric = METRICS[name]
        series = ":".join((name, *labels))
        bucket = bisect_left(metric.bounds, value) + 1
        self.fields[f"{series}:{bucket}"] += times
        if sum_ := round(value / metric.scale) * times:
            self.fields[f"{series}:sum"] += sum_


def embedded_line(
    dimensions: Mapping[str, str],
    values: Mapping[str, float | list[float]],
    units: Mapping[str, str],
    at_s: float,
) -> str:
    """Metrics in CloudWatch's embedded metric format, which it reads from logs. `units` by name;
    `at_s` is Unix time."""
    about = {
        "Namespace": "batchway",
        "Dimensions": [list(dimensions)],
        "Metrics": [{"Name": name, "Unit": units[name]} for name in values],
    }
    stamp = {"Timestamp": int(at_s * 1000), "CloudWatchMetrics": [about]}
    return json.dumps({"_aws": stamp, **dimensions, **values})
