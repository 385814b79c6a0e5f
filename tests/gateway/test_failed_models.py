"""Models that cannot stay up: how they are listed, and what their callers get."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.keys import Keys
from contract.starts import Starts
from contract.telemetry.metrics_reader import MetricsSamples, look
from infra.embedded_redis import EmbeddedRedis
from infra.top_screen import screen
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model, says

pytestmark = pytest.mark.anyio

REASON = "exit status 3: the weights need 20 GiB"
NEVER = "never"  # the name of a model that was not published


@pytest.fixture
async def http(redis_server: EmbeddedRedis) -> AsyncIterator[httpx.AsyncClient]:
    with running_gateway(make_settings(redis_server.url)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            yield client


@pytest.fixture
async def failures(redis_client: redis.asyncio.Redis, keys: Keys) -> Starts:
    """A published model without a worker and one that never was, both reported; a third serves."""
    await publish_model(redis_client, keys, "served")
    await publish_model(redis_client, keys)
    reports = Starts(redis_client, keys)
    for model in (MODEL, NEVER):
        await reports.report_failure(model, REASON, retry_in_s=30.0)
    return reports


async def test_failed_models_are_listed_with_their_reasons(
    failures: Starts, http: httpx.AsyncClient
) -> None:
    """In the list, each by itself, and in /readyz; other models are as ever."""
    listed = {model["id"]: model for model in (await http.get("/v1/models")).json()["data"]}
    assert listed["served"]["failed"] is None
    for name in (MODEL, NEVER):
        failed = listed[name]["failed"]
        assert failed["reason"] == REASON
        assert 20 < failed["retry_in_s"] <= 30
        one = (await http.get(f"/v1/models/{name}")).json()
        assert one["failed"]["reason"] == REASON
        ready = await http.get("/readyz", params={"model": name})
        assert ready.status_code == 503
        assert (ready.json()["missing"], ready.json()["reason"]) == ("workers", REASON)
    assert listed[MODEL]["max_model_len"] == 512
    unknown = await http.get("/readyz", params={"model": "unknown"})
    assert (unknown.status_code, unknown.json()["missing"]) == (503, "model")


@pytest.mark.parametrize("model", [MODEL, NEVER])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "ab"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}]}),
        ("/v1/responses", {"input": "ab"}),
        ("/v1/completions", {"prompt": "ab", "stream": True}),
    ],
)
async def test_calls_of_a_failed_model_are_told_when_it_is_tried_again(
    failures: Starts, http: httpx.AsyncClient, model: str, path: str, body: dict[str, Any]
) -> None:
    """503 with the reason and Retry-After, whether or not it was ever served."""
    refused = await http.post(path, json={"model": model, **body})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_failed")
    assert REASON in refused.json()["error"]["message"]
    assert 20 <= int(refused.headers["retry-after"]) <= 40
    assert refused.headers["x-dropped-reason"] == "model_failed"


async def test_jobs_wait_for_a_failed_model_that_was_served(
    failures: Starts, http: httpx.AsyncClient
) -> None:
    """As for every model without a worker; of one that never was nothing is known."""
    asked = {"endpoint": "/v1/completions", "body": {"prompt": "ab"}}
    statuses = {}
    for model in (MODEL, NEVER):
        job = {**asked, "body": {"model": model, "prompt": "ab"}}
        statuses[model] = (await http.post("/v1/jobs", json=job)).status_code
    assert statuses == {MODEL: 202, NEVER: 503}


async def test_a_model_with_a_live_worker_has_not_failed(
    failures: Starts, idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """One of several workers does not stay up: the others answer."""
    listed = {model["id"]: model for model in (await http.get("/v1/models")).json()["data"]}
    assert listed[MODEL]["failed"] is None
    assert (await http.get("/readyz", params={"model": MODEL})).status_code == 200
    idle_worker.script = says("yes")
    answer = await http.post(
        "/v1/jobs",
        json={"endpoint": "/v1/completions", "body": {"model": MODEL, "prompt": "ab"}},
    )
    assert answer.status_code == 202


async def test_metrics_and_top_show_failed_models(
    failures: Starts, http: httpx.AsyncClient
) -> None:
    """One series for each, and a line with the reason."""
    page = (await http.get("/metrics")).text
    assert f'batchway_failed_models{{model_name="{NEVER}",reason="{REASON}"}} 1.0' in page
    seen = look(MetricsSamples.parse(page))
    assert seen.failed == {MODEL: REASON, NEVER: REASON}
    from rich.console import Console

    console = Console(width=150)
    with console.capture() as capture:
        console.print(screen(seen, "here"))
    assert f"{NEVER} has failed: {REASON}" in capture.get()
