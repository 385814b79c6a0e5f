"""The definitions of metrics, their documentation and their format."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from contract.library import library_source
from contract.telemetry.families import counted_families, page
from contract.telemetry.metrics import (
    BATCH_BOUNDS,
    BATCHES,
    LATENCY_BOUNDS_S,
    METRICS,
    Counts,
    Source,
)
from workers.ipc.messages import EngineLoad
from workers.supervisor.metrics import Meter

ROOT = Path(__file__).resolve().parent.parent.parent


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """All samples of a /metrics page: (name, labels) → value."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_redis_and_python_have_the_same_buckets() -> None:
    source = (ROOT / "contract" / "lua" / "_totals.lua").read_text()
    found = re.search(r"LATENCY_BOUNDS_MS = \{([^}]*)\}", source)
    assert found is not None
    bounds_ms = [int(bound) for bound in found[1].replace("\n", "").split(",") if bound.strip()]
    assert [bound / 1000 for bound in bounds_ms] == list(LATENCY_BOUNDS_S)


def test_every_metric_is_counted() -> None:
    """By the functions in Redis, or by the workers."""
    lua = library_source()
    meter = (ROOT / "workers/supervisor/metrics.py").read_text() + (
        ROOT / "workers/supervisor/leases.py"
    ).read_text()
    for metric in METRICS.values():
        if metric.source is Source.JOBS:
            assert f"'{metric.name}" in lua, metric.name
        if metric.source is Source.ENGINES:
            assert f'"{metric.name}"' in meter, metric.name


def test_a_page_has_all_counts() -> None:
    """Counters unchanged; histograms cumulative, with sum and count."""
    counts = Counts()
    counts.add("num_preemptions_total", value=3)
    for seconds in (0.0005, 0.0010, 0.0011, 99.0):
        counts.observe("step_duration_seconds", "decode", value=seconds)
    counts.observe("inter_token_latency_seconds", "a:lane", value=0.02, times=7)
    shown = samples(page(list(counted_families({"m": counts.fields}, Source.ENGINES))).decode())
    model, kind = ("model_name", "m"), ("class", "decode")
    name = "batchway_step_duration_seconds"
    assert shown["batchway_num_preemptions_total", (model,)] == 3
    assert shown[f"{name}_bucket", (kind, ("le", "0.001"), model)] == 2
    assert shown[f"{name}_bucket", (kind, ("le", "0.0025"), model)] == 3
    assert shown[f"{name}_bucket", (kind, ("le", "+Inf"), model)] == 4
    assert shown[f"{name}_count", (kind, model)] == 4
    assert shown[f"{name}_sum", (kind, model)] == pytest.approx(99.0026)
    lane = ("lane", "a:lane")
    assert shown["batchway_inter_token_latency_seconds_count", (lane, model)] == 7
    assert shown["batchway_inter_token_latency_seconds_sum", (lane, model)] == pytest.approx(0.14)


def test_steps_are_counted_by_batch_size_beside_their_prediction() -> None:
    """Not before an engine can predict. One that never predicts has measured times alone."""
    meter = Meter()
    step = EngineLoad(num_step_tokens=4, num_decode_tokens=4, num_step_seqs=4, model_s=0.25)
    for predicted_s in (0.0, 0.2, 0.3):
        meter.note_step(replace(step, predicted_s=predicted_s))
    for num_seqs in (1, 5, 512, 513):
        meter.note_step(replace(step, num_step_seqs=num_seqs))
    counted = [*counted_families({"m": meter.counts.fields}, Source.ENGINES)]
    shown = samples(page(counted).decode())
    found = {
        name: {
            dict(labels)["batch"]: value
            for (shown_name, labels), value in shown.items()
            if shown_name == f"batchway_{name}" and ("class", "decode") in labels
        }
        for name in ("steps_total", "step_model_seconds_total", "step_predicted_seconds_total")
    }
    once = ("1", "5-8", "257-512", "513+")
    assert found["steps_total"] == {"3-4": 2.0} | dict.fromkeys(once, 1.0)
    assert found["step_model_seconds_total"] == {"3-4": 0.5} | dict.fromkeys(once, 0.25)
    assert found["step_predicted_seconds_total"] == {"3-4": 0.5}


def test_batch_sizes_are_named_by_their_bounds() -> None:
    lowest = [1, *(int(bound) + 1 for bound in BATCH_BOUNDS)]
    pairs = zip(lowest, BATCH_BOUNDS, strict=False)
    names = [f"{low}" if low == high else f"{low}-{high:.0f}" for low, high in pairs]
    assert list(BATCHES) == [*names, f"{lowest[-1]}+"]


def test_fields_of_another_version_are_left_out() -> None:
    """A worker may be newer than its gateway."""
    fields = {"of_tomorrow_total:x": 1, "batch_size:sum:of:more": 2, "num_preemptions_total": 1}
    shown = samples(page(list(counted_families({"m": fields}, Source.ENGINES))).decode())
    assert list(shown.values()) == [1.0]
