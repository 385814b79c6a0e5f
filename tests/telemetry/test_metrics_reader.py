"""Reading pages of metrics: sums, differences, quantiles."""

from contract.function_types import FleetSnapshot, LaneSnapshot, WorkerSnapshot
from contract.telemetry.families import counted_families, fleet_families, page
from contract.telemetry.metrics import Counts, Source
from contract.telemetry.metrics_reader import MetricsSamples, look, quantile

LANE = LaneSnapshot(
    num_queued=3, queued_tokens=700, num_running=2, running_tokens=90, oldest_wait_s=4.5
)
WORKER = WorkerSnapshot(
    "w1", 1.5, 2, 2, 1, num_blocks=100, num_free_blocks=25, num_retained_blocks=10
)


def page_of(counts: Counts) -> MetricsSamples:
    snapshot = FleetSnapshot(0.0, {"standard": LANE}, (WORKER,), counts.fields, {})
    families = [*counted_families({"m": counts.fields}, Source.JOBS, Source.ENGINES)]
    return MetricsSamples.parse(page([*families, *fleet_families({"m": snapshot})]).decode())


def test_a_quantile_lies_within_its_bucket() -> None:
    """Linearly interpolated as by Prometheus; never above the last finite bound."""
    buckets = [(1.0, 0.0), (2.0, 10.0), (4.0, 20.0), (float("inf"), 20.0)]
    assert quantile(buckets, 0.25) == 1.5
    assert quantile(buckets, 0.5) == 2.0
    assert quantile(buckets, 0.75) == 3.0
    assert quantile([(1.0, 0.0), (float("inf"), 5.0)], 0.5) == 1.0
    assert quantile([(1.0, 0.0), (float("inf"), 0.0)], 0.5) is None
    assert quantile([], 0.5) is None


def test_rates_and_percentiles_are_of_the_window() -> None:
    counts = Counts()
    counts.add("generation_tokens_total", "standard", value=1000)
    counts.observe("time_to_first_token_seconds", "standard", value=9.0, times=50)
    counts.observe("step_duration_seconds", "prefill", value=5.0)
    before = page_of(counts)
    counts.add("generation_tokens_total", "standard", value=40)
    counts.observe("time_to_first_token_seconds", "standard", value=0.2, times=10)
    for kind, step_s in (("decode", 3.0), ("mixed", 1.0)):
        counts.observe("step_duration_seconds", kind, value=step_s)
    counts.add("step_tokens_total", "prefill", value=30)
    counts.add("step_tokens_total", "decode", value=10)
    reader = look(page_of(counts), before, window_s=8.0)
    [lane], [worker], [engine] = reader.lanes, reader.workers, reader.engines
    assert (lane.num_waiting, lane.num_running, lane.queue_tokens) == (3, 2, 700)
    assert (lane.oldest_s, lane.tokens_per_s) == (4.5, 5.0)
    assert lane.ttft_s is not None
    assert 0.1 < lane.ttft_s[0] < lane.ttft_s[1] <= 0.25
    assert lane.wait_s is None
    assert (worker.worker, worker.kv_usage, worker.num_waiting) == ("w1", 0.75, 1)
    assert page_of(counts).value("kv_cache_retained_perc", model_name="m", worker="w1") == 0.1
    assert engine.step_share == {"decode": 0.75, "mixed": 0.25, "prefill": 0.0}
    assert engine.busy == {"decode": 0.375, "mixed": 0.125, "prefill": 0.0}
    assert engine.prompt_share == 0.75


def test_the_first_page_gives_percentiles_but_no_rates() -> None:
    counts = Counts()
    counts.observe("time_to_first_token_seconds", "standard", value=0.2)
    [lane] = look(page_of(counts)).lanes
    assert lane.tokens_per_s is None
    assert lane.ttft_s is not None


def test_a_lower_counter_counts_from_zero() -> None:
    """Redis may have been emptied."""
    big, small = Counts(), Counts()
    big.add("generation_tokens_total", "standard", value=1000)
    small.add("generation_tokens_total", "standard", value=7)
    gained = page_of(small).since(page_of(big))
    assert gained.value("generation_tokens_total") == 7
