"""Alerts fire on the right series only, checked by `promtool test rules`."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tests.infra.test_monitoring import ALERTS, queries, rules

_TOOLS = Path(sys.executable).parent  # installed by scripts/setup
PROMTOOL = shutil.which("promtool", path=f"{_TOOLS}{os.pathsep}{os.environ['PATH']}")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="no promtool: scripts/setup says why")

GATEWAYS = ("a:8000", "b:8000")  # both export the same counts of the fleet


@dataclass(frozen=True)
class Case:
    """Series without `instance` and their samples, one a minute, in promtool's notation."""

    alert: str
    fires: Mapping[str, str]
    is_silent: Mapping[str, str]
    at: str  # time of evaluation
    labels: Mapping[str, str] = field(default_factory=dict)  # besides its severity
    job: str = "batchway"


_OF_M = {"model_name": "m"}
_OF_LANE = {"model_name": "m", "lane": "interactive"}


def of_m(metric: str, **labels: str) -> str:
    """A series of the model `m`."""
    says = "".join(f',{name}="{value}"' for name, value in labels.items())
    return f'batchway_{metric}{{model_name="m"{says}}}'


def of_lane(metric: str, **labels: str) -> str:
    """A series of the model `m` and the lane `interactive`."""
    return of_m(metric, lane="interactive", **labels)


def first_tokens(in_a_second: str, all_: str) -> dict[str, str]:
    """Histogram buckets: first tokens within a second, and all."""
    bounds = {"1": in_a_second, "2": all_, "+Inf": all_}
    bucket = "time_to_first_token_seconds_bucket"
    return {of_lane(bucket, le=bound): values for bound, values in bounds.items()}


def jobs(**by_status: str) -> dict[str, str]:
    return {of_lane("requests_total", status=status): n for status, n in by_status.items()}


def admissions(accepted: str, refused: str) -> dict[str, str]:
    return {
        of_lane("admission_total", outcome="accepted", reason=""): accepted,
        of_lane("admission_total", outcome="refused", reason="lane_full"): refused,
    }


def batches(num_steps: str, num_seqs: str, waiting: str) -> dict[str, str]:
    """Steps, their sequences, and jobs that wait."""
    sizes = {of_m("batch_size_count"): num_steps, of_m("batch_size_sum"): num_seqs}
    return sizes | {_WAITING: waiting}


def step_times(measured: str, predicted: str | None = None) -> dict[str, str]:
    """Seconds of steps; no prediction from an engine that makes none."""
    of_steps = {"model": measured, "predicted": predicted}
    return {
        of_m(f"step_{name}_seconds_total", **{"class": "decode"}, batch="5-8"): values
        for name, values in of_steps.items()
        if values is not None
    }


def steps(metric: str, **by_kind: str) -> dict[str, str]:
    label = "class" if metric.startswith("step_duration") else "kind"
    return {of_m(metric, **{label: kind}): values for kind, values in by_kind.items()}


_WORKERS, _WAITING = of_m("workers"), of_lane("num_requests_waiting")
_SEEN_AGE = of_m("worker_seen_age_seconds", worker="w")
_FAILURES, _RECOMPUTED = of_m("engine_failures_total"), of_m("tokens_recomputed_total")
_OLDEST = "queue_oldest_age_seconds"
_ATTEMPTS, _SIX_OF_TEN = of_lane("attempts_total"), jobs(failed="0+4x39", succeeded="0+6x39")
_TOKENS, _TIME = "step_tokens_total", "step_duration_seconds_sum"
_DELIVERIES = "batchway_webhook_deliveries_total"
_BUSY_SPELL = "0+3200x419"  # sequences of 100 steps a minute, 32 in each, for seven hours

CASES = (
    Case("BatchwayGatewayDown", {"up": "1 0x9"}, {"up": "1x9"}, "5m", job="gateway"),
    Case("BatchwayRedisDown", {"batchway_broker_up": "0x9"}, {"batchway_broker_up": "1x9"}, "5m"),
    Case(
        "BatchwayNoWorkers",
        {_WORKERS: "0x19", _WAITING: "3x19"},
        {_WORKERS: "0x19", _WAITING: "0x19"},
        "10m",
        _OF_M,
    ),
    Case(
        "BatchwayWorkerStale", {_SEEN_AGE: "8x9"}, {_SEEN_AGE: "7x9"}, "5m", _OF_M | {"worker": "w"}
    ),
    Case("BatchwayEngineDied", {_FAILURES: "4x5 5x9"}, {_FAILURES: "4x19"}, "12m", _OF_M),
    Case(
        "BatchwayInteractiveWait",
        {of_lane(_OLDEST): "6x9"},
        {of_lane(_OLDEST): "4x9", of_m(_OLDEST, lane="batch"): "600x9"},
        "5m",
        _OF_LANE,
    ),
    Case(
        "BatchwayFirstTokenSlow",
        first_tokens("0+97x29", all_="0+100x29"),
        first_tokens("0+1000x29", all_="0+1003x29"),
        "25m",
        _OF_M,
    ),
    Case(
        "BatchwayDeadlinesMissed",
        jobs(succeeded="0+98x29", expired="0+2x29"),
        jobs(succeeded="0+1000x29", expired="0+9x29"),
        "20m",
        _OF_LANE,
    ),
    Case(
        "BatchwayJobsFail",
        jobs(succeeded="0+98x29", failed="0+2x29"),
        jobs(succeeded="0+1000x29", failed="0+9x29"),
        "20m",
        _OF_LANE,
    ),
    Case(
        "BatchwayRepeatedWork",
        {_ATTEMPTS: "0+13x39", **_SIX_OF_TEN},
        {_ATTEMPTS: "0+11x39", **_SIX_OF_TEN},
        "35m",
        _OF_LANE,
    ),
    Case(
        "BatchwayPreemptions",
        {_RECOMPUTED: "0+6x29", **steps(_TOKENS, prefill="0+60x29", decode="0+40x29")},
        {_RECOMPUTED: "0+4x29", **steps(_TOKENS, prefill="0+60x29", decode="0+40x29")},
        "25m",
        _OF_M,
    ),
    Case(
        "BatchwayRefusals",
        admissions(accepted="0+94x29", refused="0+6x29"),
        admissions(accepted="0+96x29", refused="0+4x29"),
        "25m",
        {"lane": "interactive", "reason": "lane_full"},
    ),
    Case(
        "BatchwayDecodeShareLow",
        steps(_TIME, decode="0+60x69", mixed="0+40x69"),
        steps(_TIME, decode="0+80x69", mixed="0+20x69"),
        "60m",
        _OF_M,
    ),
    Case(
        "BatchwayBatchSizeFalls",
        batches("0+100x460", f"{_BUSY_SPELL} 1341600+800x40", "3x460"),
        batches("0+100x460", f"{_BUSY_SPELL} 1342400+1700x40", "3x460"),
        "458m",
        _OF_M,
    ),
    Case(
        "BatchwayPredictionDrifts",
        step_times("0+14x39", "0+10x39"),
        step_times("0+13x39", "0+10x39"),
        "35m",
        _OF_M,
    ),
    Case(
        "BatchwayCallbacksDie",
        {f'{_DELIVERIES}{{outcome="dead"}}': "0x5 1x30"},
        {f'{_DELIVERIES}{{outcome="delivered"}}': "0+9x35"},
        "20m",
        {"outcome": "dead"},
    ),
    Case(
        "BatchwayStateCorrected",
        {'batchway_corrections_total{kind="type"}': "0x5 1x30"},
        {'batchway_corrections_total{kind="type"}': "3x35"},
        "20m",
        {"kind": "type"},
    ),
    Case(
        "BatchwayModelUnreadable",
        {"batchway_unreadable_models": "1x9"},
        {"batchway_unreadable_models": "0x9"},
        "5m",
    ),
    Case(
        "BatchwayModelFailed",
        {of_m("failed_models", reason="no memory"): "1x9"},
        {of_m("failed_models", reason="no memory"): "1x2 stale"},
        "5m",
        {"model_name": "m", "reason": "no memory"},
    ),
)


# More samples, and whether the alert fires with them.
OTHERS = {
    "jobs no longer wait": (
        "BatchwayBatchSizeFalls",
        batches("0+100x460", f"{_BUSY_SPELL} 1341600+800x40", "3x419 0x40"),
        False,
    ),
    "jobs wait now and then": (
        "BatchwayBatchSizeFalls",
        batches("0+100x460", f"{_BUSY_SPELL} 1341600+800x40", "3 3 3 3 0 " * 92),
        False,
    ),
    "nothing runs": (
        "BatchwayBatchSizeFalls",
        batches("0+100x419 41900x40", f"{_BUSY_SPELL} 1340800x40", "3x460"),
        False,
    ),
    "nothing ran before": (
        "BatchwayBatchSizeFalls",
        batches("0x439 0+100x20", "0x439 0+800x20", "3x460"),
        False,
    ),
    "the fall has just begun": (
        "BatchwayBatchSizeFalls",
        batches("0+100x460", "0+3200x444 1421600+800x15", "3x460"),
        False,
    ),
    # Before the large batches a lone stream took a hundred times as many steps.
    "many short steps and an idle time hide no fall": (
        "BatchwayBatchSizeFalls",
        batches(
            "0x119 0+10000x99 990100+100x240",
            "0x119 0+10000x99 993200+3200x199 1630600+600x40",
            "3x460",
        ),
        True,
    ),
    "the engine predicts nothing": ("BatchwayPredictionDrifts", step_times("0+14x460"), False),
    "it hardly computes": (
        "BatchwayPredictionDrifts",
        step_times("0+2.8x460", "0+2x460"),
        False,
    ),
    "one step has hung": (
        "BatchwayPredictionDrifts",
        step_times("0+10x449 4790+10x10", "0+10x460"),
        False,
    ),
    # Prompts then get less of a step than its target allows.
    "steps are faster than predicted": (
        "BatchwayPredictionDrifts",
        step_times("0+10x460", "0+14x460"),
        True,
    ),
}


def promtool(*arguments: str) -> None:
    """Raises AssertionError with promtool's output if it reports an error."""
    assert PROMTOOL is not None
    ran = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def series_of(case: Case, samples: Mapping[str, str]) -> list[dict[str, str]]:
    """The samples, as both gateways export them."""
    found = []
    for name, values in samples.items():
        base, _, labels = name.rstrip("}").partition("{")
        for gateway in GATEWAYS:
            own = f'job="{case.job}",instance="{gateway}"'
            whole = ",".join(part for part in (labels, own) if part)
            found.append({"series": f"{base}{{{whole}}}", "values": values})
    return found


def labels_of(case: Case) -> list[dict[str, str]]:
    """The labels of the one alert, or of one for each gateway if the alert is about gateways."""
    rule = next(rule for rule in rules() if rule["alert"] == case.alert)
    labels = {**case.labels, **rule["labels"]}
    if case.alert == "BatchwayGatewayDown":
        return [{**labels, "job": case.job, "instance": gateway} for gateway in GATEWAYS]
    if not re.match(r"(sum|max) by|max\(|histogram_quantile", rule["expr"]):
        labels["job"] = case.job  # `without` keeps it
    return [labels]


def summary_of(alert: str, labels: Mapping[str, str]) -> str:
    """The alert's summary with its labels filled in."""
    [rule] = [rule for rule in rules() if rule["alert"] == alert]
    summary = rule["annotations"]["summary"]
    return re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels[found[1]], summary)


def run_case(
    case: Case, samples: Mapping[str, str], fired: Sequence[Mapping[str, str]], folder: Path
) -> None:
    """Fails unless exactly the alerts with these labels fire."""
    alerts = [
        {"exp_labels": labels, "exp_annotations": {"summary": summary_of(case.alert, labels)}}
        for labels in fired
    ]
    looked_at = {"eval_time": case.at, "alertname": case.alert, "exp_alerts": alerts}
    series = series_of(case, samples)
    test = {"interval": "1m", "input_series": series, "alert_rule_test": [looked_at]}
    alone = [rule for rule in rules() if rule["alert"] == case.alert]
    (folder / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": alone}]}))
    path = folder / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "tests": [test]}))
    promtool("test", "rules", str(path))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_fires_beyond_its_threshold_alone(case: Case, tmp_path: Path) -> None:
    """Once for all gateways, with the labels that its summary names."""
    run_case(case, case.fires, labels_of(case), tmp_path)
    run_case(case, case.is_silent, [], tmp_path)


@pytest.mark.parametrize("why", OTHERS)
def test_an_alert_fires_for_its_cause_alone(why: str, tmp_path: Path) -> None:
    alert, samples, fires = OTHERS[why]
    case = Case(alert, {}, samples, "458m", _OF_M)
    run_case(case, samples, labels_of(case) if fires else [], tmp_path)


def test_every_alert_has_a_case() -> None:
    assert [case.alert for case in CASES] == [rule["alert"] for rule in rules()]


def test_every_query_is_valid_promql(tmp_path: Path) -> None:
    """Those of the dashboard too, as recording rules; and the file of alerts as it is."""
    recorded = [
        {"record": f"query:{number}", "expr": re.sub(r"\$\w+", "5m", query)}
        for number, query in enumerate(queries().values())
    ]
    assert len(recorded) > len(CASES)
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "queries", "rules": recorded}]}))
    promtool("check", "rules", str(path), str(ALERTS))
