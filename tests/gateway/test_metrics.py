"""GET /metrics: who may read it, metrics of this gateway and of the fleet, without Redis."""

import httpx
import pytest
import redis.asyncio

from contract.api_keys import ApiKeys, KeyTerms, Scope
from contract.functions import Functions
from contract.jobs import Endpoint, Job, SamplingParams
from contract.keys import Keys
from contract.telemetry.families import gateway_families, page
from gateway.http.metrics import MAX_TENANTS, GatewayMetrics
from infra.embedded_redis import EmbeddedRedis
from tests.clock import TEST_CLOCK
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model
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
    settings = make_settings(redis_server.url, lane_bound_tokens=1)
    with running_gateway(settings) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            refused = await http.post("/v1/completions", json=BODY)
            assert refused.status_code == 429
            shown = await page_of(http)
    labels = {"outcome": "refused", "reason": "lane_full"}
    assert summed(shown, "admission_total", **labels) == 1


async def test_metrics_show_waiting_jobs_and_their_age(
    redis_client: redis.asyncio.Redis,
    http: httpx.AsyncClient,
    idle_worker: FakeWorker,
    keys: Keys,
) -> None:
    """Jobs, tokens, and the age of the first. A claimed job no longer counts."""
    body = {"endpoint": "/v1/completions", "body": BODY, "lane": "batch"}
    for _ in range(2):
        (await http.post("/v1/jobs", json=body)).raise_for_status()
    await redis_client.set(TEST_CLOCK, 7000)
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
    text = (await http.get(events_url)).text
    event_id = next(line[4:] for line in text.splitlines() if line.startswith("id: "))
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
    with running_gateway(make_settings(redis_server.url, namespace="with-keys")) as url:
        async with httpx.AsyncClient(base_url=url) as http:

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
    with running_gateway(make_settings("redis://127.0.0.1:1", api_key=key)) as url:
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=url, timeout=20, headers=headers) as http:
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
    return Job(
        id="job-0-x",
        tenant=tenant,
        model=MODEL,
        lane="standard",
        endpoint=Endpoint.COMPLETIONS,
        prompt_ids=(1,),
        params=SamplingParams(max_tokens=1, seed=0),
        created_s=0,
    )


async def test_deliveries_are_shown(
    http: httpx.AsyncClient,
    redis_client: redis.asyncio.Redis,
    idle_worker: FakeWorker,
    functions: Functions,
    keys: Keys,
) -> None:
    """Counts of callback deliveries by outcome."""
    await redis_client.hset(keys.of("deliveries"), mapping={"delivered": 3, "dead": 1})
    shown = await page_of(http)
    assert summed(shown, "webhook_deliveries_total", outcome="delivered") == 3
    assert summed(shown, "webhook_deliveries_total") == 4


async def test_corrections_are_shown_from_zero_on(
    http: httpx.AsyncClient,
    redis_client: redis.asyncio.Redis,
    idle_worker: FakeWorker,
    functions: Functions,
    keys: Keys,
) -> None:
    """So a rule on the increase sees the first correction."""
    shown = await page_of(http)
    assert shown["batchway_corrections_total", (("kind", "type"),)] == 0
    await redis_client.hset(keys.of("corrections"), "type", 2)
    shown = await page_of(http)
    assert summed(shown, "corrections_total", kind="type") == 2


async def test_a_scrape_before_any_model_hides_no_later_model(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis, functions: Functions, keys: Keys
) -> None:
    """A gateway that was scraped without any model accepts jobs for the first one at once."""
    with running_gateway(make_settings(redis_server.url)) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            assert "batchway_workers{" not in (await http.get("/metrics")).text
            await publish_model(redis_client, keys)
            await FakeWorker(functions).beat()
            body = {"endpoint": "/v1/completions", "body": BODY}
            assert (await http.post("/v1/jobs", json=body)).status_code == 202
