"""Alarms of template.yaml: what they watch is emitted, and they tell trouble from a cold start."""

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from contract.function_types import FleetSnapshot
from gateway.http.metrics import EmbeddedMetrics, GatewayMetrics
from infra.aws import pool_service
from infra.aws.pool_metrics import FleetLines
from tests.aws.template import as_list, chosen, of_type, transformed

alarms = partial(of_type, "AWS::CloudWatch::Alarm")
_FUNCTIONS: Mapping[str, Any] = {
    "FILL": lambda value, default: default if value is None else value,
    "IF": lambda condition, yes, no: yes if condition else no,
}


def watched(alarm: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Namespace, name and dimensions of each metric of an alarm."""
    metrics = [m["MetricStat"]["Metric"] for m in alarm.get("Metrics", []) if "MetricStat" in m]
    return [
        (
            metric["Namespace"],
            metric["MetricName"],
            {pair["Name"]: pair["Value"] for pair in metric["Dimensions"]},
        )
        for metric in metrics or [alarm]
    ]


def value_of(alarm: str, **values: float | None) -> float:
    """What the expression of an alarm is where its metrics have these values; None: no data."""
    [expression] = [m["Expression"] for m in alarms()[alarm]["Metrics"] if "Expression" in m]
    ids = {m["Id"] for m in alarms()[alarm]["Metrics"] if "MetricStat" in m}
    assert ids == set(values)
    return float(eval(expression.replace(" AND ", " and "), {**_FUNCTIONS, **values}))


async def _cold(_scope: Any, _receive: Any, send: Any) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": 503,
            "headers": [(b"x-dropped-reason", b"no_workers")],
        }
    )


async def _ignore(*_: Any) -> Any:
    """Takes what the app sends."""


@pytest.mark.anyio
async def test_every_metric_of_ours_that_an_alarm_watches_is_emitted() -> None:
    """With the same dimensions; no linter knows them."""
    lines: list[str] = []
    app = EmbeddedMetrics(_cold, GatewayMetrics(), lines.append, lambda: 1.0, "f")
    await app({"type": "http"}, _ignore, _ignore)
    none = FleetSnapshot(now_s=1.0, lanes={}, workers=(), totals={}, deliveries={})
    lines += FleetLines("m").lines(none)
    emitted = {(name, ("Model",)) for name in pool_service.METRICS}
    for record in map(json.loads, lines):
        [about] = record["_aws"]["CloudWatchMetrics"]
        emitted |= {(m["Name"], tuple(about["Dimensions"][0])) for m in about["Metrics"]}
    ours = {
        (name, tuple(dimensions))
        for alarm in alarms().values()
        for namespace, name, dimensions in watched(chosen(alarm))
        if namespace == "batchway"
    }
    assert ours <= emitted
    assert {"RefusedNoWorkers", "JobsFailed", "StrandedCalls"} <= {name for name, _ in ours}


@pytest.mark.parametrize("is_durable", [False, True])
@pytest.mark.parametrize("num_nodes", [2, 3])
def test_alarms_of_the_cache_look_at_every_node(num_nodes: int, is_durable: bool) -> None:
    """After a failover the primary is another one."""
    conditions = ["HasThirdNode"] * (num_nodes == 3) + ["IsDurable"] * is_durable
    shard = "-0001" if is_durable else ""
    nodes = {f"cache{shard}-00{n}" for n in range(1, num_nodes + 1)}
    num_alarms = 0
    for name, alarm in alarms().items():
        given = chosen(alarm, *conditions)
        found = [d["CacheClusterId"] for n, _, d in watched(given) if n == "AWS/ElastiCache"]
        if not found:
            continue
        names = ["".join("cache" if part == {"Ref": "Cache"} else part for part in f["Fn::Join"][1])
                 for f in found]  # fmt: skip
        assert sorted(names) == sorted(nodes), name
        num_alarms += 1
    assert num_alarms == 4


def test_a_cold_start_is_no_error_and_a_real_one_is() -> None:
    """API Gateway counts each 503 as 5xx."""
    threshold = alarms()["ErrorsAlarm"]["Threshold"]
    assert value_of("ErrorsAlarm", errors=500, calls=20, streams=480) <= threshold
    assert value_of("ErrorsAlarm", errors=500, calls=None, streams=480) > threshold
    assert value_of("ErrorsAlarm", errors=30, calls=None, streams=None) > threshold


def test_refusals_without_any_worker_are_told() -> None:
    """Such a call leaves no job, so no backlog shows it. One that brings a worker is normal."""
    alarm = alarms()["NoCapacityAlarm"]
    assert (alarm["MetricName"], alarm["Statistic"]) == ("StrandedCalls", "Minimum")
    assert alarm["Period"] * alarm["EvaluationPeriods"] == 1_800  # twice a usual cold start


def test_failed_jobs_are_told() -> None:
    """By the same share as Prometheus' alert."""
    threshold = alarms()["FailedJobsAlarm"]["Threshold"]
    assert value_of("FailedJobsAlarm", failed=2, succeeded=98) > threshold
    assert value_of("FailedJobsAlarm", failed=1, succeeded=999) <= threshold
    assert value_of("FailedJobsAlarm", failed=0, succeeded=5) <= threshold


def test_every_service_that_dies_is_noticed_and_none_while_the_stack_is_made() -> None:
    """Silence is an alarm only for services that ran before the alarm was made. Workers may be
    none."""
    silent = {n: a for n, a in alarms().items() if a["TreatMissingData"] == "breaching"}
    services = set()
    for name in silent:
        resource = transformed()["Resources"][name]
        waits = set(as_list(resource.get("DependsOn", [])))
        waits |= set(re.findall(r"'Fn::GetAtt': \['(\w+)', 'Name'\]", str(resource)))
        [service] = waits
        services.add(service)
        made = transformed()["Resources"][service]
        assert made.get("Condition") == resource.get("Condition")
    assert services == set(of_type("AWS::ECS::Service")) - {"WorkerService"}
