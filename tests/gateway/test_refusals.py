"""Rejected load: status, reason and Retry-After of each case. A caller that follows Retry-After
is accepted."""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest
import redis.asyncio
from fastapi import FastAPI

from contract.api_keys import ApiKeys, KeyTerms
from contract.errors import RateLimit, RateLimits
from contract.function_types import WorkerCapacity
from contract.keys import Keys
from contract.library import max_memory
from contract.starts import Starts
from gateway.app import create_app
from gateway.child_process import ChildPool
from gateway.http.errors import JITTER, rate_headers, retry_after
from gateway.prepare.calls import INTERACTIVE_TARGET_S, bound_of, stored_bounds, tokens_in
from gateway.settings import GatewaySettings, LaneBound, parse_lane_bounds
from infra.embedded_redis import EmbeddedRedis
from tests.clock import TEST_CLOCK
from tests.gateway.conftest import Bearer, Gateways, make_settings
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model, says

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab", "max_tokens": 98}  # costs 100 tokens
JOB: dict[str, Any] = {"endpoint": "/v1/completions", "body": BODY}
JSON = {"content-type": "application/json"}
# One worker that holds one job, drains 10 tokens a second and streams 5.
SLOW = WorkerCapacity(tokens_per_s=10.0, stream_tokens_per_s=5.0, max_tokens=100, max_jobs=1)


@asynccontextmanager
async def running(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app without a server."""
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


@pytest.fixture
def apps(redis_server: EmbeddedRedis) -> Gateways:
    """Runs an app with the settings that a test gives; its Retry-After has no jitter."""

    def started(**settings: Any) -> AbstractAsyncContextManager[httpx.AsyncClient]:
        return running(create_app(make_settings(redis_server.url, **settings), draw=lambda: 0.0))

    return started


@pytest.fixture
def gateway(apps: Gateways, slow_worker: FakeWorker) -> Gateways:
    """The same in front of the slow worker."""
    return apps


@pytest.fixture
async def slow_worker(idle_worker: FakeWorker) -> FakeWorker:
    """A live worker with measured rates."""
    idle_worker.capacity = SLOW
    await idle_worker.beat()
    return idle_worker


def refusal_of(answer: httpx.Response) -> tuple[int, str, str | None, str | None]:
    headers = answer.headers
    code = answer.json()["error"]["code"]
    return answer.status_code, code, headers.get("x-dropped-reason"), headers.get("retry-after")


async def key_of(client: redis.asyncio.Redis, keys: Keys, **limits: Any) -> dict[str, str]:
    key, _ = await ApiKeys(client, keys).create(KeyTerms(tenant="acme", **limits))
    return {"authorization": f"Bearer {key}"}


async def test_a_lane_full_of_tokens(slow_worker: FakeWorker, gateway: Gateways) -> None:
    """429 until the excess has drained: 50 tokens at 10 per second, for calls and jobs. The
    second may retry 20 s after the first, because half of the rate is left to others."""
    async with gateway(lane_bound_tokens=250) as http:
        for _ in range(2):
            assert (await http.post("/v1/jobs", json=JOB)).status_code == 202
        for path, body, retry_s in (("/v1/jobs", JOB, "5"), ("/v1/completions", BODY, "25")):
            answer = await http.post(path, json=body)
            assert refusal_of(answer) == (429, "lane_full", "lane_full", retry_s)
            assert answer.json()["error"]["type"] == "rate_limit_error"
        await slow_worker.claim()
        assert (await http.post("/v1/jobs", json=JOB)).status_code == 202


async def test_a_lane_whose_wait_is_too_long(gateway: Gateways) -> None:
    """The limit in seconds of one lane; another lane has its own."""
    bounds = ("standard=15s", "batch=1000s")
    async with gateway(lane_bounds=bounds) as http:
        answers = [await http.post("/v1/jobs", json=JOB) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [202, 202, 429]
        assert refusal_of(answers[2]) == (429, "lane_full", "lane_full", "5")
        assert (await http.post("/v1/jobs", json=JOB | {"lane": "batch"})).status_code == 202


@pytest.mark.parametrize(
    ("limits", "num_admitted", "retry_s"),
    [
        ({"requests_per_minute": 2}, 2, "30"),
        ({"tokens_per_minute": 250}, 2, "12"),  # 50 of 250 a minute
        ({"concurrent_tokens": 250}, 2, "5"),
        ({"lane_share": 0.25}, 2, "5"),  # of 1000
    ],
)
async def test_a_tenant_over_its_quota(
    gateway: Gateways, bearer: Bearer, limits: dict[str, Any], num_admitted: int, retry_s: str
) -> None:
    """429 for this tenant only. Each response reports what is left of the limits per minute."""
    limited, other = await bearer(**limits), await bearer("other")
    async with gateway(lane_bound_tokens=1000) as http:
        for _ in range(num_admitted):
            answer = await http.post("/v1/jobs", json=JOB, headers=limited)
            assert answer.status_code == 202
        answer = await http.post("/v1/jobs", json=JOB, headers=limited)
        assert refusal_of(answer) == (429, "tenant_quota", "tenant_quota", retry_s)
        assert "limit" in answer.json()["error"]["message"] or "share" in answer.text
        assert (await http.post("/v1/jobs", json=JOB, headers=other)).status_code == 202


async def test_stored_bytes_are_limited(
    bearer: Bearer, gateway: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tenant: 429, and other tenants are accepted; of all: 503. Deleted jobs make room."""
    monkeypatch.setattr("gateway.prepare.calls.stored_bytes_beside", lambda memory_bytes: 35_000)
    ours, others = await bearer(), await bearer("other")
    async with gateway(max_tenant_stored_bytes=20_000) as http:
        jobs = [await http.post("/v1/jobs", json=JOB, headers=ours) for _ in range(2)]
        assert [job.status_code for job in jobs] == [202, 202]  # 8 kB each
        refused = await http.post("/v1/jobs", json=JOB, headers=ours)
        assert refusal_of(refused) == (429, "tenant_quota", "tenant_quota", None)
        assert "ask for less retention_s" in refused.json()["error"]["message"]
        for status in (202, 202, 503):
            answer = await http.post("/v1/jobs", json=JOB, headers=others)
            assert answer.status_code == status
        assert refusal_of(answer) == (503, "storage_full", "storage_full", None)
        job = f"/v1/jobs/{jobs[0].json()['id']}"
        assert (await http.post(f"{job}/cancel", headers=ours)).status_code == 200
        assert (await http.post("/v1/jobs", json=JOB, headers=ours)).status_code == 503
        assert (await http.delete(job, headers=ours)).status_code == 200
        assert (await http.post("/v1/jobs", json=JOB, headers=ours)).status_code == 202


def test_stored_bytes_are_limited_by_default() -> None:
    """Eight times the memory of Redis, half of it for one tenant, or what is set; 0: no limit."""
    assert stored_bounds(make_settings(""), 2**30) == (2**33, 2**32)
    assert stored_bounds(make_settings(""), 1) == (2**29, 2**28)
    assert stored_bounds(make_settings("", max_tenant_stored_bytes=0), 2**30) == (2**33, 0)


async def test_rate_limit_headers_are_in_every_response(gateway: Gateways, bearer: Bearer) -> None:
    """Accepted or rejected, and in quotes. Without limits there are no such headers."""
    headers = await bearer(requests_per_minute=2, tokens_per_minute=10_000)
    names = [f"x-ratelimit-{a}-{b}" for b in ("requests", "tokens") for a in
             ("limit", "remaining", "reset")]  # fmt: skip
    async with gateway() as http:
        first = await http.post("/v1/jobs", json=JOB, headers=headers)
        assert [first.headers[name] for name in names] == ["2", "1", "30s", "10000", "9900", "1s"]
        await http.post("/v1/jobs", json=JOB, headers=headers)
        refused = await http.post("/v1/jobs", json=JOB, headers=headers)
        quoted = await http.post("/v1/quote", json=JOB, headers=headers)
        for answer in (refused, quoted):
            assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    async with gateway(api_key="k" * 16) as http:
        own = {"authorization": f"Bearer {'k' * 16}"}
        answer = await http.post("/v1/jobs", json=JOB, headers=own)
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
# Bodies that cost work before they would be refused, or that queue nothing.
COSTLY: list[tuple[str, Any]] = [
    ("/v1/quote", JOB),
    ("/v1/quote", {"endpoint": "/v1/chat/completions", "body": CHAT | {"response_format": SCHEMA}}),
    ("/v1/completions", BODY | {"guided_regex": "a{1000000}"}),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "function"}]}),
    ("/v1/responses/input_tokens", {"model": MODEL, "input": "Hi"}),
    ("/v1/messages/count_tokens", CHAT),
    ("/v1/completions", BODY | {"max_tokens": -2}),
]


@pytest.mark.parametrize(("path", "body"), COSTLY, ids=range(len(COSTLY)))
async def test_every_call_counts_before_anything_is_done_for_it(
    gateway: Gateways, redis_client: redis.asyncio.Redis, bearer: Bearer, path: str, body: Any
) -> None:
    """Also quotes and what is refused otherwise. No process sees what is over the limit."""
    limited = await bearer(requests_per_minute=2)
    seconds, _ = await redis_client.time()
    await redis_client.set(TEST_CLOCK, f"={seconds * 1000}")
    async with gateway() as http:
        for _ in range(2):
            assert (await http.post(path, json=body, headers=limited)).status_code in (200, 400)
        with no_child_process():
            answers = [
                await http.post(path, json=body, headers=limited),
                await http.post(path, content=b"{", headers={**JSON, **limited}),
                await http.post("/v1/completions", json=BODY, headers=limited),
            ]
        for answer in answers:
            assert refusal_of(answer) == (429, "tenant_quota", "tenant_quota", "30")


async def test_a_call_that_the_queue_refuses_is_given_back(
    slow_worker: FakeWorker,
    gateway: Gateways,
    bearer: Bearer,
) -> None:
    """And one that repeats another: exactly as many jobs are accepted as the limit says."""
    limited = await bearer(requests_per_minute=3)
    key = {"idempotency-key": "a", **limited}
    async with gateway(lane_bound_tokens=250) as http:
        for headers in (key, key, limited):
            assert (await http.post("/v1/jobs", json=JOB, headers=headers)).status_code == 202
        for _ in range(3):
            answer = await http.post("/v1/jobs", json=JOB, headers=limited)
            assert refusal_of(answer)[:2] == (429, "lane_full")
        await slow_worker.claim()
        assert (await http.post("/v1/jobs", json=JOB, headers=limited)).status_code == 202
        answer = await http.post("/v1/jobs", json=JOB, headers=limited)
        assert refusal_of(answer)[:2] == (429, "tenant_quota")


async def test_a_long_body_of_a_refused_call_is_not_read(gateway: Gateways, bearer: Bearer) -> None:
    limited = await bearer(requests_per_minute=1)
    long = json.dumps(BODY | {"prompt": "a" * 1_000_000}).encode()

    was_read: list[bool] = []

    async def content() -> AsyncIterator[bytes]:
        was_read.append(True)
        yield long

    async with gateway() as http:
        await http.post("/v1/completions", json=BODY | {"max_tokens": -2}, headers=limited)
        headers = {**JSON, **limited, "content-length": str(len(long))}
        refused = await http.post("/v1/completions", content=content(), headers=headers)
        assert refusal_of(refused)[:2] == (429, "tenant_quota")
        assert not was_read


@contextlib.contextmanager
def no_child_process() -> Iterator[None]:
    """No process for untrusted input is asked for anything."""

    async def asked(self: ChildPool, request: Any) -> str:
        raise AssertionError("a process was asked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChildPool, "ask", asked)
        yield


@pytest.mark.parametrize("limits", [{"requests_per_minute": 2}, {"tokens_per_minute": 250}])
async def test_a_caller_that_follows_retry_after_is_accepted(
    slow_worker: FakeWorker,
    gateway: Gateways,
    redis_client: redis.asyncio.Redis,
    bearer: Bearer,
    limits: dict[str, Any],
) -> None:
    """Exactly from that time on, by the clock of Redis."""
    headers = await bearer(**limits)
    seconds, _ = await redis_client.time()
    await redis_client.set(TEST_CLOCK, f"={seconds * 1000}")
    async with gateway() as http:
        for _ in range(2):
            await http.post("/v1/jobs", json=JOB, headers=headers)
        refused = await http.post("/v1/jobs", json=JOB, headers=headers)
        retry_s = int(refused.headers["retry-after"])
        for wait_s, status in ((retry_s - 1, 429), (retry_s, 202)):
            await redis_client.set(TEST_CLOCK, f"={(seconds + wait_s) * 1000}")
            await slow_worker.beat()
            answer = await http.post("/v1/jobs", json=JOB, headers=headers)
            assert answer.status_code == status


async def test_a_deadline_that_cannot_be_kept(gateway: Gateways) -> None:
    """98 tokens at 5 per second take 19.6 s. Without Retry-After if no time would help. A cap is no
    reason to refuse, as most outputs are shorter."""
    async with gateway() as http:
        assert (await http.post("/v1/jobs", json=JOB | {"deadline_s": 5})).status_code == 202
        answer = await http.post("/v1/jobs", json=JOB | {"deadline_s": 5})
        assert refusal_of(answer) == (429, "deadline_infeasible", "deadline_infeasible", "5")
        job_id = (await http.get("/v1/jobs")).json()["data"][0]["id"]
        await http.post(f"/v1/jobs/{job_id}/cancel")
    known = JOB | {"body": JOB["body"] | {"expected_output_tokens": 98}}
    async with gateway() as http:
        answer = await http.post("/v1/jobs", json=known | {"deadline_s": 10})
        assert refusal_of(answer) == (429, "deadline_infeasible", "deadline_infeasible", None)
        assert (await http.post("/v1/jobs", json=known | {"deadline_s": 25})).status_code == 202
        answer = await http.post("/v1/jobs", json=known | {"deadline_s": 25})
        assert refusal_of(answer) == (429, "deadline_infeasible", "deadline_infeasible", "5")


async def test_no_worker_to_answer_a_call(
    apps: Gateways, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """503 for calls. Jobs are queued, with the cold start in their ETA."""
    await publish_model(redis_client, keys)
    async with apps(cold_start_s=40.0) as http:
        answer = await http.post("/v1/completions", json=BODY)
        assert refusal_of(answer) == (503, "no_workers", "no_workers", None)
        queued = (await http.post("/v1/jobs", json=JOB)).json()
        assert (queued["position"], queued["eta_s"]) == (0, 40.0)


async def test_a_worker_that_is_on_its_way(
    apps: Gateways, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """The 503 names its time as announced, from what its last start took; a second once that is
    over, and no time a minute later. A queue at another model changes nothing."""
    await publish_model(redis_client, keys)
    start_ms = 1_700_000_000_000
    await redis_client.set(TEST_CLOCK, f"={start_ms}")
    starts = Starts(redis_client, keys)
    async with apps() as http:

        async def retry_after_of_call() -> str | None:
            answer = await http.post("/v1/completions", json=BODY)
            assert refusal_of(answer)[:3] == (503, "no_workers", "no_workers")
            return refusal_of(answer)[3]

        await starts.announce_another(MODEL, 0.5)
        assert await retry_after_of_call() is None  # nobody knows how long it takes
        await starts.measured(MODEL, 30.0)
        await redis_client.hset(keys.of("pool", MODEL), "ready_at", start_ms + 30_500)
        assert await retry_after_of_call() == "31"
        await redis_client.set(TEST_CLOCK, f"={start_ms + 40_000}")
        assert await retry_after_of_call() == "1"
        await redis_client.set(TEST_CLOCK, f"={start_ms + 100_000}")
        assert await retry_after_of_call() is None


async def test_a_redis_that_is_away() -> None:
    """503 with a short Retry-After."""
    settings = make_settings("redis://127.0.0.1:1", api_key="k" * 16)
    async with running(create_app(settings, draw=lambda: 0.0)) as http:
        own = {"authorization": f"Bearer {'k' * 16}"}
        for path, body in (("/v1/jobs", JOB), ("/v1/completions", BODY), ("/v1/quote", JOB)):
            answer = await http.post(path, json=body, headers=own)
            assert refusal_of(answer) == (503, "broker_unavailable", "broker_unavailable", "1")


async def test_a_gateway_that_is_draining(
    slow_worker: FakeWorker, redis_server: EmbeddedRedis
) -> None:
    """503 for new calls; existing jobs can be read."""
    app = create_app(make_settings(redis_server.url), draw=lambda: 0.0)
    async with running(app) as http:
        job_id = (await http.post("/v1/jobs", json=JOB)).json()["id"]
        app.state.gateway.drain.begin(10.0)
        for path, body in (("/v1/jobs", JOB), ("/v1/completions", BODY)):
            refused = refusal_of(await http.post(path, json=body))
            assert refused == (503, "draining", "draining", "1")
        assert (await http.get(f"/v1/jobs/{job_id}")).status_code == 200


async def test_a_lane_that_nobody_serves(
    apps: Gateways, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """400 with the lanes of the model's workers."""
    await publish_model(redis_client, keys, lanes=("gold", "standard"))
    async with apps() as http:
        answer = await http.post("/v1/jobs", json=JOB | {"lane": "batch"})
        assert refusal_of(answer)[:2] == (400, "unknown_lane")
        assert answer.json()["error"]["param"] == "lane"
        assert "gold, standard" in answer.json()["error"]["message"]
        assert (await http.post("/v1/jobs", json=JOB | {"lane": "gold"})).status_code == 202


async def test_a_waiting_job_shows_its_position_and_eta(
    slow_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """In the 202, in the job's status and as events when they change; null once it runs."""
    first = (await http.post("/v1/jobs", json=JOB)).json()
    assert (first["position"], first["eta_s"]) == (0, 0.0)
    second = (await http.post("/v1/jobs", json=JOB)).json()
    third = (await http.post("/v1/jobs", json=JOB)).json()
    assert (second["position"], second["eta_s"]) == (1, 10.0)
    assert (third["position"], third["eta_s"]) == (2, 20.0)
    shown = (await http.get(f"/v1/jobs/{third['id']}")).json()
    assert (shown["position"], shown["eta_s"]) == (2, 20.0)

    async with http.stream("GET", third["events_url"]) as stream:
        lines = stream.aiter_lines()
        seen: list[str] = []
        for position in (2, 1, 0):
            async with asyncio.timeout(10):
                while not any(f'"position":{position}' in line for line in seen):
                    seen.append(await anext(lines))
            if position:
                await slow_worker.claim()
    events = [line for line in seen if line.startswith("event")]
    assert set(events) == {"event: queued"}
    claimed = await slow_worker.claim()
    shown = (await http.get(f"/v1/jobs/{claimed.job.id}")).json()
    assert (shown["status"], shown["position"], shown["eta_s"]) == ("running", None, None)


async def test_a_quote_gives_the_answer_of_a_submission_and_queues_nothing(
    gateway: Gateways, redis_client: redis.asyncio.Redis
) -> None:
    """Prompt tokens, position and times; and the refusal if the job would be rejected."""
    async with gateway(lane_bound_tokens=250) as http:
        await http.post("/v1/jobs", json=JOB)
        before = await redis_client.dbsize()
        for _ in range(2):
            quote = (await http.post("/v1/quote", json=JOB)).json()
        assert await redis_client.dbsize() == before
        assert (quote["prompt_tokens"], quote["predicted_output_tokens"]) == (2, 98)
        assert (quote["position"], quote["eta_s"], quote["run_s"]) == (1, 10.0, 19.6)
        assert (quote["is_admitted"], quote["refusal"]) == (True, None)
        expecting = JOB | {"body": JOB["body"] | {"expected_output_tokens": 30}}
        quote = (await http.post("/v1/quote", json=expecting)).json()
        # It tells the time; what is reserved is the cap, as no output has been seen.
        assert (quote["predicted_output_tokens"], quote["run_s"]) == (98, 6.0)
        queued = (await http.post("/v1/jobs", json=JOB)).json()
        assert (queued["position"], queued["eta_s"]) == (1, 10.0)
        refusal = (await http.post("/v1/quote", json=JOB)).json()["refusal"]
        assert (refusal["status"], refusal["code"]) == (429, "lane_full")
        assert refusal["retry_after_s"] == 5.0
        wrong = await http.post("/v1/quote", json=JOB | {"body": BODY | {"n": 9}})
        assert wrong.json()["error"]["param"] == "body.n"


QUOTED = BODY | {"max_tokens": 50}
QUOTED_CHAT = CHAT | {"max_tokens": 50}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
LEARNED = 3  # tokens of the worker's outputs
NUM_OUTPUTS = 5  # until they predict others


@pytest.mark.parametrize(
    ("endpoint", "body", "predicted"),
    [
        (COMPLETIONS, QUOTED, LEARNED),
        (COMPLETIONS, QUOTED | {"ignore_eos": True}, 50),
        (COMPLETIONS, QUOTED | {"ignore_eos": True, "n": 2}, 100),
        (COMPLETIONS, QUOTED | {"ignore_eos": True, "prompt": ["a", "b", "cd"]}, 150),
        (COMPLETIONS, QUOTED | {"ignore_eos": True, "expected_output_tokens": 7}, 50),
        # The context of 512 has room for 4 more tokens.
        (COMPLETIONS, QUOTED | {"ignore_eos": True, "prompt": ["a", "b" * 508]}, 54),
        (COMPLETIONS, QUOTED | {"ignore_eos": True, "stop": "x"}, 50),
        (COMPLETIONS, QUOTED | {"ignore_eos": True, "stop_token_ids": [65]}, 50),
        (COMPLETIONS, QUOTED | {"ignore_eos": False}, LEARNED),
        (COMPLETIONS, QUOTED | {"min_tokens": 9, "expected_output_tokens": 7}, 9),
        (CHATS, QUOTED_CHAT, LEARNED),
        (CHATS, QUOTED_CHAT | {"ignore_eos": True}, 50),
        (CHATS, QUOTED_CHAT | {"ignore_eos": True, "stop": []}, 50),
    ],
)
async def test_what_ends_at_max_tokens_alone_is_quoted_with_all_of_them(
    worker: FakeWorker, http: httpx.AsyncClient, endpoint: str, body: dict[str, Any], predicted: int
) -> None:
    """Otherwise earlier outputs tell."""
    worker.script = says("abc")
    for _ in range(NUM_OUTPUTS):
        assert (await http.post(COMPLETIONS, json=QUOTED)).status_code == 200
    asked = {"endpoint": endpoint, "body": body, "lane": "standard"}
    quote = (await http.post("/v1/quote", json=asked)).json()
    assert quote["predicted_output_tokens"] == predicted, quote


async def test_server_timing_reports_phases(worker: FakeWorker, http: httpx.AsyncClient) -> None:
    """`Server-Timing` in milliseconds: admission, first token, total."""
    whole = (await http.post("/v1/completions", json=BODY)).headers["server-timing"]
    marks = dict(part.split(";dur=") for part in whole.split(", "))
    assert list(marks) == ["admission", "first_token", "total"]
    assert sorted(map(float, marks.values())) == list(map(float, marks.values()))
    for body in (BODY | {"stream": True}, BODY):
        headers = {} if "stream" in body else {"prefer": "respond-async"}
        answer = await http.post("/v1/completions", json=body, headers=headers)
        assert answer.headers["server-timing"].startswith("admission;dur=")


@pytest.mark.parametrize("retry_s", [0.0, 0.2, 1.0, 7.3, 60.0])
def test_jitter_only_makes_callers_wait_longer(retry_s: float) -> None:
    """Whole seconds, at least one, never before the time, spread over a quarter of it."""
    draws: list[Callable[[], float]] = [lambda: 0.0, lambda: 0.5, lambda: 0.999]
    waits = [int(retry_after(retry_s, draw)) for draw in draws]
    assert waits == sorted(waits)
    assert waits[0] == max(1, math.ceil(retry_s))
    assert waits[0] < waits[2] == waits[0] + math.ceil(JITTER * waits[0])


def test_only_existing_limits_have_headers() -> None:
    """Resets in whole seconds, rounded up."""
    assert rate_headers(None) == {} == rate_headers(RateLimits())
    told_ = rate_headers(RateLimits(tokens=RateLimit(100, 40, 36.2)))
    assert set(told_.values()) == {"100", "40", "37s"}


def test_bounds_of_lanes_are_read_strictly() -> None:
    """Tokens, seconds or both, by lane. An error quotes the entry."""
    bounds = parse_lane_bounds(["batch=500000", "interactive=2.5s", "batch=60s"])
    assert bounds == {"batch": LaneBound(500_000, 60.0), "interactive": LaneBound(None, 2.5)}
    for wrong in ("batch", "batch=", "batch=-1", "batch=2m", "=5", "a b=5"):
        with pytest.raises(ValueError, match="must be like batch=500000"):
            parse_lane_bounds([wrong])


def test_lanes_are_limited_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens by the memory of Redis, seconds by the lane; 0 removes a limit, of one lane or all."""
    settings = make_settings("redis://x", sync_deadline_s=60.0)
    fitting = tokens_in(2**30)
    assert bound_of(settings, "interactive", 2**30) == (fitting, INTERACTIVE_TARGET_S / 2)
    assert bound_of(settings, "standard", 2**30) == (fitting, 30.0)
    assert bound_of(settings, "batch", 2**30) == (fitting, 0.0)
    assert bound_of(settings, "gold", 0) == (0, 30.0)

    monkeypatch.setenv("REDIS_URL", "redis://x")
    monkeypatch.setenv("BATCHWAY_LANE_BOUND_S", "9")
    monkeypatch.setenv("BATCHWAY_LANE_BOUND_TOKENS", "0")
    monkeypatch.setenv("BATCHWAY_LANE_BOUNDS", "batch=7,batch=0s")
    settings = GatewaySettings.from_env()
    assert bound_of(settings, "batch", 2**30) == (7, 0.0)
    assert bound_of(settings, "interactive", 2**30) == (0, 9.0)
    monkeypatch.setenv("BATCHWAY_LANE_BOUND_TOKENS", "2s")
    with pytest.raises(ValueError, match="BATCHWAY_LANE_BOUND_TOKENS: Input should be a valid int"):
        GatewaySettings.from_env()


@pytest.mark.parametrize(("lane", "num_taken"), [("interactive", 1), ("standard", 7)])
async def test_waits_are_limited_by_default(gateway: Gateways, lane: str, num_taken: int) -> None:
    """Jobs of 100 tokens at 10 per second: 5 s in interactive, half of a call's deadline in
    standard, no limit in batch."""
    async with gateway() as http:
        for _ in range(num_taken):
            assert (await http.post("/v1/jobs", json=JOB | {"lane": lane})).status_code == 202
        answer = await http.post("/v1/jobs", json=JOB | {"lane": lane})
        assert refusal_of(answer)[:3] == (429, "lane_full", "lane_full")
        assert answer.headers["retry-after"]
        for _ in range(20):
            assert (await http.post("/v1/jobs", json=JOB | {"lane": "batch"})).status_code == 202


@pytest.fixture
async def memory(redis_client: redis.asyncio.Redis) -> AsyncIterator[Callable[[int], Any]]:
    """Sets Redis's maxmemory for a test."""
    before = (await redis_client.config_get("maxmemory"))["maxmemory"] or 0
    yield partial(redis_client.config_set, "maxmemory")
    await redis_client.config_set("maxmemory", before)


async def test_tokens_are_limited_by_the_memory_of_redis_by_default(
    gateway: Gateways, memory: Callable[[int], Any]
) -> None:
    """Jobs of 2,002 tokens: batch accepts as many as fit into two fifths of the memory at 32
    bytes per token."""
    job = JOB | {"lane": "batch", "body": BODY | {"max_tokens": 500, "n": 4}}
    await memory(16 * 2**20)
    async with gateway() as http:
        for _ in range(tokens_in(16 * 2**20) // 2002):
            answer = await http.post("/v1/jobs", json=job)
            assert answer.status_code == 202, answer.text
        assert refusal_of(await http.post("/v1/jobs", json=job))[:2] == (429, "lane_full")


async def test_a_redis_without_maxmemory_is_logged(
    redis_client: redis.asyncio.Redis,
    gateway: Gateways,
    memory: Callable[[int], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once. The memory of its machine is used instead."""
    await memory(0)
    machine_bytes = (await redis_client.info("memory"))["total_system_memory"]
    assert await max_memory(redis_client) == (machine_bytes, False)
    async with gateway() as http:
        for _ in range(2):
            assert (await http.post("/v1/jobs", json=JOB)).status_code == 202
    assert caplog.text.count("Redis has no maxmemory") == 1
