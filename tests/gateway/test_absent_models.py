"""Models without a worker: declared ones, whose first is started on demand, and those that cannot
stay up; what callers get, and what a job says while it waits."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import redis.asyncio
from rich.console import Console

from contract.functions import Functions
from contract.keys import Keys
from contract.starts import ANY_LANE, Starts
from contract.telemetry.metrics_reader import MetricsSamples, look
from infra.embedded_redis import EmbeddedRedis
from infra.top_screen import screen
from tests.fleet import until
from tests.gateway.conftest import gateway_client
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model
from tests.streams import events_of

pytestmark = pytest.mark.anyio

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}
TEXT = {"model": MODEL, "prompt": "ab"}
CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": TEXT,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": MODEL, "input": "a"},
    "/v1/embeddings": {"model": MODEL, "input": "a"},
    "/v1/rerank": {"model": MODEL, "query": "a", "documents": ["b"]},
    "/v1/jobs": {"endpoint": "/v1/completions", "body": TEXT},
    "/v1/quote": {"endpoint": "/v1/completions", "body": TEXT},
}
JOB = CALLS["/v1/jobs"]
REASON = "exit status 3: the weights need 20 GiB"
NEVER = "never"  # the name of a model that was neither published nor declared


@pytest.fixture
async def http(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis
) -> AsyncIterator[httpx.AsyncClient]:
    """Of a gateway that starts with an empty Redis."""
    models = (MODEL, "second")
    async with gateway_client(redis_server.url, declared_models=models, console=True) as client:
        yield client


@pytest.fixture
async def plain(redis_server: EmbeddedRedis) -> AsyncIterator[httpx.AsyncClient]:
    """Of a gateway without declared models."""
    async with gateway_client(redis_server.url) as client:
        yield client


@pytest.fixture
def starts(redis_client: redis.asyncio.Redis, keys: Keys) -> Starts:
    return Starts(redis_client, keys)


@pytest.mark.parametrize("path", CALLS)
async def test_a_call_of_a_declared_model_asks_for_its_first_worker(
    http: httpx.AsyncClient, starts: Starts, path: str
) -> None:
    """It gets 503 with the expected time, never 404, and leaves a wish that no lane limits."""
    answer = await http.post(path, json=CALLS[path])
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_workers")
    assert "retry-after" not in answer.headers  # nobody has announced a start
    assert await starts.is_wanted(MODEL, ANY_LANE)
    await starts.announce(MODEL, 200.0)
    answer = await http.post(path, json=CALLS[path])
    assert answer.status_code == 503
    assert 195 <= int(answer.headers["retry-after"]) <= 260  # with jitter
    assert answer.headers["x-dropped-reason"] == "no_workers"
    assert "should be ready in 200 s" in answer.json()["error"]["message"]


async def test_the_first_worker_may_have_failed(http: httpx.AsyncClient, starts: Starts) -> None:
    """The caller gets the reason, and the next try has something to do."""
    await starts.report_failure(MODEL, "no weights", retry_in_s=900.0)

    async def is_told() -> bool:  # a gateway knows failures a second late
        answer = await http.post("/v1/completions", json=TEXT)
        return (answer.status_code, answer.json()["error"]["code"]) == (503, "model_failed")

    await until(is_told)
    assert await starts.is_wanted(MODEL, ANY_LANE)


async def test_other_models_are_unknown_as_ever(http: httpx.AsyncClient, starts: Starts) -> None:
    """And ask for nothing. The error names the declared ones."""
    answer = await http.post("/v1/completions", json=TEXT | {"model": "hasch"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "model_not_found")
    assert "did you mean 'hash'" in error["message"]
    assert not await starts.is_wanted("hasch", ANY_LANE)


async def test_declared_models_are_listed_and_not_ready(
    http: httpx.AsyncClient, redis_client: redis.asyncio.Redis, keys: Keys, functions: Functions
) -> None:
    """Without endpoints, which nobody knows yet. /readyz says what is missing: workers."""
    listed = (await http.get("/v1/models")).json()["data"]
    assert {one["id"] for one in listed} == {MODEL, "second"}
    for one in (*listed, (await http.get(f"/v1/models/{MODEL}")).json()):
        assert (one["endpoints"], one["failed"]) == ([], None)
    for params in ({}, {"model": MODEL}):
        ready = await http.get("/readyz", params=params)
        assert (ready.status_code, ready.json()["missing"]) == (503, "workers")
    await publish_model(redis_client, keys)
    await FakeWorker(functions).beat()
    ready = await http.get("/readyz")
    assert ready.json() == {"status": "ready", "workers": {MODEL: 1, "second": 0}}


WAITS = {"waiting_for": "worker", "expected_start_s": pytest.approx(200.0, abs=5.0)}
WAITS_NO_MORE = {"waiting_for": None, "expected_start_s": None}


def wait_of(shown: dict[str, Any]) -> dict[str, Any]:
    return {name: shown[name] for name in WAITS}


async def test_a_job_says_that_it_waits_for_a_worker(
    http: httpx.AsyncClient,
    starts: Starts,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    functions: Functions,
) -> None:
    """When it is queued and whenever it is read: by itself, in a list, changed, in its stream. Not
    once a worker lives."""
    await publish_model(redis_client, keys)
    unannounced = (await http.post("/v1/jobs", json=JOB)).json()
    assert wait_of(unannounced) == {"waiting_for": "worker", "expected_start_s": None}
    await starts.announce(MODEL, 200.0)
    respond_async = {"prefer": "respond-async"}
    assert wait_of((await http.post("/v1/jobs", json=JOB)).json()) == WAITS
    call = await http.post("/v1/completions", json=TEXT, headers=respond_async)
    assert wait_of(call.json()) == WAITS
    path = f"/v1/jobs/{call.json()['id']}"
    assert wait_of((await http.get(path)).json()) == WAITS
    assert wait_of((await http.patch(path, json={"lane": "batch"})).json()) == WAITS
    listed = (await http.get("/v1/jobs")).json()["data"]
    assert [wait_of(job) for job in listed] == [WAITS] * 3
    worker = FakeWorker(functions)
    async with http.stream("GET", f"{path}/events") as answer:
        events = events_of(answer)
        assert wait_of((await anext(events)).data) == WAITS
        await worker.beat()
        assert wait_of((await anext(events)).data) == WAITS_NO_MORE
    assert wait_of((await http.get(path)).json()) == WAITS_NO_MORE
    cancelled = (await http.post(f"{path}/cancel")).json()
    assert wait_of(cancelled) == WAITS_NO_MORE


@pytest.mark.parametrize(("num_wanted", "state"), [(0, "no worker"), (1, "starting")])
async def test_the_console_tells_an_idle_pool_from_a_start(
    http: httpx.AsyncClient, starts: Starts, num_wanted: int, state: str
) -> None:
    """A pool announces at all times when a worker would be ready."""
    await starts.announce(MODEL, 200.0)
    await starts.decide(MODEL, num_wanted)

    async def is_shown() -> bool:
        async with http.stream("GET", "/console/feed") as answer:
            async for event in events_of(answer):
                if models := event.data.get("models"):
                    [shown] = [model for model in models if model["name"] == MODEL]
                    return bool((shown["wanted"], shown["state"]) == (num_wanted, state))
        return False

    await until(is_shown)


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
    failures: Starts, plain: httpx.AsyncClient
) -> None:
    """In the list, each by itself, in /readyz, in a series of /metrics each and in a line of `top`;
    other models are as ever."""
    listed = {model["id"]: model for model in (await plain.get("/v1/models")).json()["data"]}
    assert listed["served"]["failed"] is None
    for name in (MODEL, NEVER):
        failed = listed[name]["failed"]
        assert failed["reason"] == REASON
        assert 20 < failed["retry_in_s"] <= 30
        one = (await plain.get(f"/v1/models/{name}")).json()
        assert one["failed"]["reason"] == REASON
        ready = await plain.get("/readyz", params={"model": name})
        assert ready.status_code == 503
        assert (ready.json()["missing"], ready.json()["reason"]) == ("workers", REASON)
    assert listed[MODEL]["max_model_len"] == 512
    unknown = await plain.get("/readyz", params={"model": "unknown"})
    assert (unknown.status_code, unknown.json()["missing"]) == (503, "model")
    page = (await plain.get("/metrics")).text
    assert f'batchway_failed_models{{model_name="{NEVER}",reason="{REASON}"}} 1.0' in page
    seen = look(MetricsSamples.parse(page))
    assert seen.failed == {MODEL: REASON, NEVER: REASON}
    console = Console(width=150)
    with console.capture() as capture:
        console.print(screen(seen, "here"))
    assert f"{NEVER} has failed: {REASON}" in capture.get()


@pytest.mark.parametrize("model", [MODEL, NEVER])
async def test_calls_of_a_failed_model_are_told_when_it_is_tried_again(
    failures: Starts, plain: httpx.AsyncClient, model: str
) -> None:
    """503 with the reason and Retry-After, whether or not it was ever served. Jobs wait for one
    that was, as for all without a worker; of one that never was nothing is known."""
    calls = [(path, CALLS[path]) for path in list(CALLS)[:3]]
    for path, body in (*calls, ("/v1/completions", TEXT | {"stream": True})):
        refused = await plain.post(path, json=body | {"model": model})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_failed")
        assert REASON in refused.json()["error"]["message"]
        assert 20 <= int(refused.headers["retry-after"]) <= 40
        assert refused.headers["x-dropped-reason"] == "model_failed"
    answer = await plain.post("/v1/jobs", json=JOB | {"body": TEXT | {"model": model}})
    assert answer.status_code == (202 if model == MODEL else 503)


async def test_a_model_with_a_live_worker_has_not_failed(
    failures: Starts, worker: FakeWorker, plain: httpx.AsyncClient
) -> None:
    """One of several workers does not stay up: the others answer."""
    listed = {model["id"]: model for model in (await plain.get("/v1/models")).json()["data"]}
    assert listed[MODEL]["failed"] is None
    assert (await plain.get("/readyz", params={"model": MODEL})).status_code == 200
    answer = await plain.post("/v1/completions", json=TEXT)
    assert answer.status_code == 200
