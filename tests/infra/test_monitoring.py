"""Alerts, dashboard and compose file use exported metrics only."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from contract.telemetry.metrics import METRICS

ROOT = Path(__file__).resolve().parent.parent.parent
ALERTS = ROOT / "infra" / "monitoring" / "alerts.yml"
DASHBOARD = ROOT / "infra" / "monitoring" / "dashboard.json"
_NAME = re.compile(r"batchway_\w+")
_SELECTOR = re.compile(r"(batchway_\w+)\{([^}]*)\}")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
# Labels that Prometheus itself adds.
_FOREIGN = {"instance", "job", "le"}
_LABELS = {label for metric in METRICS.values() for label in metric.all_labels} | _FOREIGN


def rules() -> list[dict[str, Any]]:
    loaded = yaml.safe_load(ALERTS.read_text())
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def panels() -> Iterator[dict[str, Any]]:
    yield from json.loads(DASHBOARD.read_text())["panels"]


def queries() -> dict[str, str]:
    """Every expression, by its place."""
    found = {rule["alert"]: rule["expr"] for rule in rules()}
    for panel in panels():
        for target in panel.get("targets", []):
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    return found


def of_series(name: str) -> str:
    """The metric of a series."""
    base = name.removeprefix("batchway_")
    return base if base in METRICS else re.sub(r"_(bucket|sum|count)$", "", base)


def exported_names() -> frozenset[str]:
    """Every name that a query may contain: three for each histogram."""
    names = set()
    for metric in METRICS.values():
        if metric.kind == "histogram":
            names |= {f"{metric.full_name}_{part}" for part in ("bucket", "sum", "count")}
        else:
            names.add(metric.full_name)
    return frozenset(names)


@pytest.mark.parametrize("where", queries())
def test_queries_use_exported_names_and_labels(where: str) -> None:
    """In selectors and groupings. Brackets are closed."""
    query = queries()[where]
    for name in _NAME.findall(query):
        assert name in exported_names(), f"{where} asks for {name}"
    for name, selector in _SELECTOR.findall(query):
        labels = set(re.findall(r"(\w+)\s*(?:=|!)", selector))
        assert labels <= {*METRICS[of_series(name)].all_labels, *_FOREIGN}, where
    for group in _GROUPING.findall(query):
        assert {label.strip() for label in group.split(",") if label.strip()} <= _LABELS, where
    for opening, closing in ("()", "{}", "[]"):
        assert query.count(opening) == query.count(closing), where


def test_fleet_counts_are_not_summed_over_gateways() -> None:
    """Every gateway exports the same counts, so a sum would multiply them."""
    own = {name for name, metric in METRICS.items() if metric.source == "gateway"}
    own -= {"webhook_deliveries_total", "corrections_total"}
    for where, query in queries().items():
        names = {of_series(name) for name in _NAME.findall(query)}
        if names - own - {"workers"}:
            assert "max without (instance" in query, where


def test_every_metric_is_used_by_a_query() -> None:
    asked = {of_series(name) for query in queries().values() for name in _NAME.findall(query)}
    assert asked == set(METRICS)


def test_alerts_have_unique_names_and_explanations() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"]
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_compose_mounts_existing_files() -> None:
    """Those of the metrics profile."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    mounts = [
        volume.split(":")[0]
        for name in ("prometheus", "grafana")
        for volume in services[name]["volumes"]
        if volume.startswith("./")
    ]
    assert all((ROOT / mount).is_file() for mount in mounts)
    assert {"./infra/monitoring/alerts.yml", "./infra/monitoring/dashboard.json"} <= set(mounts)
    scrape = yaml.safe_load((ROOT / "infra/compose/prometheus.yml").read_text())
    assert scrape["scrape_configs"][0]["authorization"]["credentials_file"].startswith(
        "/run/secrets"
    )


def test_the_guide_explains_every_alert_by_existing_metrics() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    guide = page.partition("\n## From a symptom to a setting\n")[2].partition("\n## ")[0]
    assert all(f"`{rule['alert']}`" in guide for rule in rules())
    named = re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)(?:\{[^}]*\})?`", guide)
    assert len(named) > 20
    others = {"minimum_share", "eta_s", "prefill_share", "kv_high_water"}
    others |= {"max_tokens", "bucket_edges", "on_disconnect", "itl_target_ms"}
    others |= {"lane_full", "tenant_quota", "deadline_infeasible"}
    assert {of_series(f"batchway_{name}") for name in named} - others <= set(METRICS)
