"""Metrics on Lambda: each request logs what it has added, in CloudWatch's format."""

import json
from typing import Any

import pytest

from contract.keys import Keys
from gateway.aws.environment import load_settings
from gateway.http.metrics import EmbeddedMetrics, GatewayMetrics
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model
from tests.gateway.test_metrics import BODY, _job

pytestmark = pytest.mark.anyio


async def _nothing(*_: Any) -> Any:
    """An app that sends no response."""


def parsed(lines: list[str]) -> list[dict[str, Any]]:
    """The lines as CloudWatch reads them: each declared metric is a number."""
    found = []
    for line in lines:
        record = json.loads(line)
        [about] = record["_aws"]["CloudWatchMetrics"]
        assert about["Namespace"] == "batchway"
        assert record["_aws"]["Timestamp"] == 5_000
        [dimensions] = about["Dimensions"]
        assert all(isinstance(record[name], str) for name in dimensions)
        names = [metric["Name"] for metric in about["Metrics"]]
        assert set(record) == {"_aws", *dimensions, *names}
        found.append({name: record[name] for name in (*dimensions, *names)})
    return found


async def test_each_metric_line_has_the_increase() -> None:
    """Jobs by model and lane, requests for all. Each count is logged once; without news there is
    no line."""
    metrics, lines = GatewayMetrics(), list[str]()
    app = EmbeddedMetrics(_nothing, metrics, lines.append, lambda: 5.0)
    metrics.note_acceptance(_job("t"), is_new=True)
    metrics.note_request("/v1/completions", "POST", 200)
    await app({"type": "http"}, _nothing, _nothing)
    assert parsed(lines) == [
        {"Requests": 1},
        {"Model": MODEL, "Lane": "standard", "JobsAccepted": 1},
    ]
    lines.clear()
    metrics.note_refusal(_job("t"), "lane_full")
    metrics.note_request("/v1/completions", "POST", 503)
    await app({"type": "http"}, _nothing, _nothing)
    assert parsed(lines) == [
        {"Requests": 1, "ServerErrors": 1},
        {"Model": MODEL, "Lane": "standard", "JobsRefused": 1},
    ]
    lines.clear()
    await app({"type": "http"}, _nothing, _nothing)
    assert lines == []


async def test_calls_without_a_worker_are_counted_for_their_function(redis_server: Any) -> None:
    """Each answer that a cold start explains, by the function whose alarms watch it. Other errors
    are not counted there."""
    metrics, lines = GatewayMetrics(), list[str]()
    headers: list[tuple[bytes, bytes]] = []

    async def refuse(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": headers})

    app = EmbeddedMetrics(refuse, metrics, lines.append, lambda: 5.0, "stack-Stream")
    await app({"type": "http"}, _nothing, _nothing)
    headers.append((b"x-dropped-reason", b"draining"))
    await app({"type": "http"}, _nothing, _nothing)
    assert lines == []
    headers[0] = (b"x-dropped-reason", b"no_workers")
    await app({"type": "http"}, _nothing, _nothing)
    assert parsed(lines) == [{"Function": "stack-Stream", "RefusedNoWorkers": 1}]


async def test_a_refused_call_writes_that_metric(
    redis_server: Any, redis_client: Any, keys: Keys, capfd: pytest.CaptureFixture[str]
) -> None:
    """From the app itself, whose model has a card and no live worker."""
    import httpx

    await publish_model(redis_client, keys)
    settings = make_settings(redis_server.url, embedded_metrics=True)
    with running_gateway(settings) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            assert (await http.post("/v1/completions", json=BODY)).status_code == 503
    lines = [line for line in capfd.readouterr().out.splitlines() if "_aws" in line]
    assert any("RefusedNoWorkers" in line for line in lines)


def test_only_functions_log_metrics_by_default(
    redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On by default on Lambda; elsewhere only by a setting."""
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")
    assert load_settings().embedded_metrics
    monkeypatch.setenv("BATCHWAY_EMBEDDED_METRICS", "0")
    assert not load_settings().embedded_metrics
    assert not make_settings(redis_server.url).embedded_metrics


async def test_a_call_writes_metrics_to_standard_output(
    redis_server: Any, worker: FakeWorker, capfd: pytest.CaptureFixture[str]
) -> None:
    """From the app itself, with nothing of the call but counts."""
    import httpx

    with running_gateway(make_settings(redis_server.url, embedded_metrics=True)) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            (await http.post("/v1/completions", json=BODY)).raise_for_status()
    lines = [line for line in capfd.readouterr().out.splitlines() if "_aws" in line]
    figures = {name: value for line in lines for name, value in json.loads(line).items()}
    assert figures.pop("_aws")
    assert figures == {"Requests": 1, "Model": MODEL, "Lane": "standard", "JobsAccepted": 1}
