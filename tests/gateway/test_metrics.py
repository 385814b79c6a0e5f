"""GET /metrics: who may read it, metrics of this gateway and of the fleet, without Redis. On Lambda
each request logs what it has added, in CloudWatch's format."""

import asyncio
import json
from typing import Any

import httpx
import pytest
import redis.asyncio
from msgspec.structs import replace

from contract.api_keys import ApiKeys, KeyTerms, Scope
from contract.functions import Functions
from contract.jobs import Job
from contract.keys import Keys
from contract.telemetry.families import gateway_families, page
from gateway.aws.environment import load_settings
from gateway.http.metrics import MAX_TENANTS, EmbeddedMetrics, GatewayMetrics
from infra.embedded_redis import EmbeddedRedis
from tests.clock import TEST_CLOCK
from tests.gateway.conftest import gateway_client, make_settings
from tests.gateway.fake_worker import MODEL, FakeWorker, job_of_one, publish_model
from tests.streams import whole_stream
from tests.telemetry.test_exactness import page_of, summed
from tests.telemetry.test_metrics import samples

pytestmark = pytest.mark.anyio

BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 20}


async def test_answers_are_counted_by_route_and_by_lane(
    http: httpx.AsyncClient, worker: FakeWorker
) -> None:
    """A call, a refusal, an unknown path. No label contains an id or a caller's path."""
    before = await page_of(http)
    await http.post("/v1/completions", json=BODY)
    await http.get("/v1/jobs/job-0-00000000000000000000000000000000")
    await http.get("/no/such/path")
    shown = await page_of(http)

    def gained(name: str, **labels: str) -> float:
        return summed(shown, name, **labels) - summed(before, name, **labels)

    assert gained("http_requests_total", route="/v1/completions", status="200") == 1
    assert gained("http_requests_total", route="/v1/jobs/{job_id}", status="404") == 1
    assert gained("http_requests_total", route="other", status="404") == 1
    assert gained("admission_total", lane="standard", outcome="accepted") == 1
    assert gained("generation_tokens_total", model_name=MODEL) > 0
    assert summed(shown, "broker_up") == 1


async def test_refusals_are_counted_by_reason(
    redis_server: EmbeddedRedis, idle_worker: FakeWorker
) -> None:
    """By the reason that the caller gets."""
    async with gateway_client(redis_server.url, lane_bound_tokens=1) as http:
        refused = await http.post("/v1/completions", json=BODY)
        assert refused.status_code == 429
        shown = await page_of(http)
    labels = {"outcome": "refused", "reason": "lane_full"}
    assert summed(shown, "admission_total", **labels) == 1


async def test_metrics_show_waiting_jobs_and_their_age(
    http: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    """Jobs, tokens, and the age of the first. A claimed job no longer counts."""
    body = {"endpoint": "/v1/completions", "body": BODY, "lane": "batch"}
    for _ in range(2):
        (await http.post("/v1/jobs", json=body)).raise_for_status()
    await idle_worker.client.set(TEST_CLOCK, 7000)
    await idle_worker.beat()
    lane = {"model_name": MODEL, "lane": "batch"}
    shown = await page_of(http)
    assert summed(shown, "num_requests_waiting", **lane) == 2
    assert summed(shown, "queue_tokens", **lane) > 0
    assert 7 <= summed(shown, "queue_oldest_age_seconds", **lane) < 60
    for _ in range(2):
        await idle_worker.claim()
    shown = await page_of(http)
    assert summed(shown, "num_requests_running", **lane) == 2
    assert summed(shown, "num_requests_waiting", **lane) == 0
    assert summed(shown, "queue_oldest_age_seconds", **lane) == 0
    assert summed(shown, "request_queue_time_seconds_sum", **lane) >= 14


async def test_a_resumed_stream_is_counted(http: httpx.AsyncClient, worker: FakeWorker) -> None:
    """A reader that starts at the beginning is not counted."""
    job = (await http.post("/v1/jobs", json={"endpoint": "/v1/completions", "body": BODY})).json()
    events_url = f"/v1/jobs/{job['id']}/events"
    events = whole_stream((await http.get(events_url)).text)
    event_id = next(event.id for event in events if event.id)
    before = await page_of(http)
    await http.get(events_url, headers={"last-event-id": event_id})
    shown = await page_of(http)
    assert summed(shown, "resumed_streams_total") - summed(before, "resumed_streams_total") == 1
    assert summed(shown, "open_streams") == 0


async def test_metrics_of_the_fleet_need_a_scope(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis
) -> None:
    """They include all tenants, so an ordinary key may not read them."""
    store = ApiKeys(redis_client, Keys("with-keys"), None)
    ordinary, _ = await store.create(KeyTerms(tenant="t"))
    scraper, _ = await store.create(KeyTerms(tenant="ops", scopes=(Scope.METRICS,)))
    async with gateway_client(redis_server.url, namespace="with-keys") as http:

        async def status(path: str, key: str | None) -> int:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return (await http.get(path, headers=headers)).status_code

        assert await status("/metrics", None) == 401
        assert await status("/metrics", ordinary) == 403
        assert await status("/metrics", scraper) == 200
        assert await status("/v1/jobs", scraper) == 403


async def test_a_gateway_without_redis_serves_its_own_metrics() -> None:
    """Its own counts, and that the broker is down, for the one key that needs no Redis."""
    key = "0123456789abcdef"
    headers = {"authorization": f"Bearer {key}"}
    async with gateway_client("redis://127.0.0.1:1", headers, api_key=key) as http:
        await http.get("/livez")
        shown = await page_of(http)
    assert summed(shown, "broker_up") == 0
    assert summed(shown, "http_requests_total", route="/livez") == 1


def test_the_number_of_tenants_with_own_labels_is_limited() -> None:
    """Beyond the limit tenants share one label, so the sums stay right."""
    metrics = GatewayMetrics()
    for i in range(3 * MAX_TENANTS):
        metrics.note_acceptance(_job(f"tenant-{i}"), is_new=True)
    metrics.note_acceptance(_job("tenant-0"), is_new=True)
    shown = samples(page(gateway_families(metrics.counts())).decode())
    assert summed(shown, "tenant_admission_total") == 3 * MAX_TENANTS + 1
    assert summed(shown, "tenant_admission_total", tenant="tenant-0") == 2
    assert summed(shown, "tenant_admission_total", tenant="other") == 2 * MAX_TENANTS


def _job(tenant: str) -> Job:
    return replace(job_of_one(), tenant=tenant)


async def test_deliveries_and_corrections_are_shown(
    http: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    """Callback deliveries by outcome. Corrections from zero on, so that a rule on the increase sees
    the first one."""
    shown = await page_of(http)
    assert shown["batchway_corrections_total", (("kind", "type"),)] == 0
    await idle_worker.client.hset(
        idle_worker.keys.of("deliveries"), mapping={"delivered": 3, "dead": 1}
    )
    await idle_worker.client.hset(idle_worker.keys.of("corrections"), "type", 2)
    shown = await page_of(http)
    assert summed(shown, "webhook_deliveries_total", outcome="delivered") == 3
    assert summed(shown, "webhook_deliveries_total") == 4
    assert summed(shown, "corrections_total", kind="type") == 2


async def test_a_scrape_before_any_model_hides_no_later_model(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis, functions: Functions, keys: Keys
) -> None:
    """A gateway that was scraped without any model accepts jobs for the first one at once."""
    async with gateway_client(redis_server.url) as http:
        assert "batchway_workers{" not in (await http.get("/metrics")).text
        await publish_model(redis_client, keys)
        await FakeWorker(functions).beat()
        body = {"endpoint": "/v1/completions", "body": BODY}
        assert (await http.post("/v1/jobs", json=body)).status_code == 202


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


async def test_calls_without_a_worker_are_counted_for_their_function() -> None:
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


def test_only_functions_log_metrics_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """On by default on Lambda; elsewhere only by a setting."""
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")
    assert load_settings().embedded_metrics
    monkeypatch.setenv("BATCHWAY_EMBEDDED_METRICS", "0")
    assert not load_settings().embedded_metrics
    assert not make_settings("redis://127.0.0.1:1").embedded_metrics


async def test_a_call_writes_metrics_to_standard_output(
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    functions: Functions,
    keys: Keys,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """From the app itself, with nothing of the call but counts: refused while the model has a card
    and no live worker, then served. A line may follow its answer, so the gateway ends first."""

    def figures() -> dict[str, Any]:
        lines = [line for line in capfd.readouterr().out.splitlines() if "_aws" in line]
        return {name: value for line in lines for name, value in json.loads(line).items()}

    await publish_model(redis_client, keys)
    async with gateway_client(redis_server.url, embedded_metrics=True) as http:
        assert (await http.post("/v1/completions", json=BODY)).status_code == 503
    assert figures()["RefusedNoWorkers"] == 1
    async with gateway_client(redis_server.url, embedded_metrics=True) as http:
        worker = FakeWorker(functions)
        await worker.beat()
        call = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await worker.run(await worker.claim())
        (await call).raise_for_status()
    counted = figures()
    assert counted.pop("_aws")
    assert counted == {"Requests": 1, "Model": MODEL, "Lane": "standard", "JobsAccepted": 1}
