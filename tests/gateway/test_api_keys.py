"""API keys over HTTP: what a key permits, whose jobs it sees, and how soon it is revoked."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.api_keys import ApiKeys, KeyTerms, Pepper, Scope
from contract.keys import Keys
from gateway.redis.key_ring import REMEMBERED_S, KeyRing
from infra.embedded_redis import EmbeddedRedis
from tests.clock import TEST_CLOCK
from tests.fleet import until
from tests.gateway.conftest import gateway_client
from tests.gateway.fake_worker import MODEL, FakeWorker

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab"}
JOB: dict[str, Any] = {"endpoint": "/v1/completions", "body": BODY}
NO_JOB = "/v1/jobs/job-0-" + "0" * 32
NO_RESPONSE = "/v1/responses/resp_0-" + "0" * 32


@pytest.fixture
async def fresh(redis_server: EmbeddedRedis) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway with an empty cache of keys."""
    async with gateway_client(redis_server.url) as client:
        yield client


@pytest.fixture
def api_keys(redis_client: redis.asyncio.Redis, keys: Keys) -> ApiKeys:
    return ApiKeys(redis_client, keys)


async def bearer(api_keys: ApiKeys, tenant: str = "acme", **terms: Any) -> dict[str, str]:
    key, _ = await api_keys.create(KeyTerms(tenant=tenant, **terms))
    return {"authorization": f"Bearer {key}"}


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def refused(http: httpx.AsyncClient, headers: dict[str, str]) -> None:
    """Returns once a caller is refused; until then the gateway's cache still knows its key."""

    async def is_so() -> bool:
        return (await http.get("/v1/models", headers=headers)).status_code != 200

    await until(is_so)


async def test_calls_without_a_key_are_served_until_the_first_key_is_created(
    fresh: httpx.AsyncClient, api_keys: ApiKeys, worker: FakeWorker
) -> None:
    """On loopback. After that every call needs a key, even once the key is revoked."""
    assert (await fresh.post("/v1/completions", json=BODY)).status_code == 200
    headers = await bearer(api_keys)
    await refused(fresh, {})
    assert code(await fresh.post("/v1/completions", json=BODY)) == (401, "invalid_api_key")
    assert (await fresh.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
    assert worker.seen[-1].tenant == "acme"
    await api_keys.revoke(headers["authorization"].split("-")[1])
    await refused(fresh, headers)
    assert code(await fresh.get("/v1/models")) == (401, "invalid_api_key")


_CALLS = (
    *("completions", "chat/completions", "embeddings", "rerank", "score", "classify"),
    *("responses", "responses/input_tokens", "messages", "messages/count_tokens", "quote"),
)
SCOPED = {
    Scope.INFERENCE: [
        *(f"POST /v1/{path}" for path in _CALLS),
        *("POST /tokenize", "POST /detokenize"),
    ],
    Scope.JOBS_WRITE: [
        *("POST /v1/jobs", f"POST {NO_JOB}/cancel", f"PATCH {NO_JOB}"),
        *(f"POST {NO_RESPONSE}/cancel", f"DELETE {NO_RESPONSE}"),
    ],
    Scope.JOBS_READ: [
        *(f"GET {NO_JOB}", f"GET {NO_JOB}/events"),
        *(f"GET {NO_RESPONSE}", f"GET {NO_RESPONSE}/input_items"),
    ],
}


@pytest.mark.parametrize("scope", SCOPED)
async def test_every_route_names_the_scope_that_a_key_lacks(
    fresh: httpx.AsyncClient, api_keys: ApiKeys, scope: Scope
) -> None:
    """403 without it, something else with it or with `admin`."""
    lacking = await bearer(api_keys, scopes=tuple({*Scope} - {scope, Scope.ADMIN}))
    granted = [await bearer(api_keys, scopes=(each,)) for each in (scope, Scope.ADMIN)]
    for route in SCOPED[scope]:
        method, path = route.split()
        answer = await fresh.request(method, path, headers=lacking)
        assert code(answer) == (403, "missing_scope"), path
        assert f"'{scope}'" in answer.json()["error"]["message"]
        assert answer.json()["error"]["type"] == "permission_error"
        for headers in granted:
            answer = await fresh.request(method, path, headers=headers)
            assert answer.status_code not in (401, 403), path


async def test_a_key_permits_only_its_lanes(
    fresh: httpx.AsyncClient, api_keys: ApiKeys, idle_worker: FakeWorker
) -> None:
    """Whether the lane is named or implied by the service tier."""
    headers = await bearer(api_keys, lanes=("batch", "interactive"))
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", BODY),
        ("/v1/jobs", JOB),
        ("/v1/jobs", JOB | {"lane": "standard"}),
    ]
    for path, body in calls:
        answer = await fresh.post(path, json=body, headers=headers)
        assert code(answer) == (403, "lane_not_allowed")
        assert "only for batch, interactive" in answer.json()["error"]["message"]
    answer = await fresh.post("/v1/jobs", json=JOB | {"lane": "batch"}, headers=headers)
    assert answer.status_code == 202


async def test_a_call_that_may_become_a_job_needs_the_scope_of_jobs(
    fresh: httpx.AsyncClient, api_keys: ApiKeys, idle_worker: FakeWorker
) -> None:
    """`Prefer` does not permit with `inference` what `POST /v1/jobs` refuses."""
    lacking = await bearer(api_keys, scopes=(Scope.INFERENCE,))
    for prefer in ("respond-async", "wait=0", "respond-async, wait=30"):
        headers = lacking | {"prefer": prefer}
        answer = await fresh.post("/v1/completions", json=BODY, headers=headers)
        assert code(answer) == (403, "missing_scope")
        assert "'jobs:write'" in answer.json()["error"]["message"]
    headers = await bearer(api_keys, scopes=(Scope.INFERENCE, Scope.JOBS_WRITE))
    headers["prefer"] = "wait=0"
    assert (await fresh.post("/v1/completions", json=BODY, headers=headers)).status_code == 202


async def test_a_key_changes_no_job_of_another_lane(
    fresh: httpx.AsyncClient, api_keys: ApiKeys, worker: FakeWorker
) -> None:
    """A job of the same tenant in another lane cannot be moved, postponed, cancelled or deleted,
    nor can one be moved into that lane."""
    limited, free = await bearer(api_keys, lanes=("batch",)), await bearer(api_keys)

    async def ended_job(lane: str) -> str:
        answer = await fresh.post("/v1/jobs", json=JOB | {"lane": lane}, headers=free)
        path = f"/v1/jobs/{answer.json()['id']}"
        await fresh.get(f"{path}/events", headers=free)
        return path

    path = await ended_job("standard")
    before = (await fresh.get(path, headers=free)).json()
    requests: list[tuple[str, str, dict[str, Any] | None]] = [
        ("PATCH", "", {"lane": "batch"}),
        ("PATCH", "", {"deadline_s": 60}),
        ("POST", "/cancel", None),
        ("DELETE", "", None),
    ]
    for method, suffix, body in requests:
        answer = await fresh.request(method, path + suffix, headers=limited, json=body)
        assert code(answer) == (403, "lane_not_allowed"), (method, suffix)
    assert (await fresh.get(path, headers=free)).json() == before

    path = await ended_job("batch")
    answer = await fresh.patch(path, headers=limited, json={"lane": "standard"})
    assert code(answer) == (403, "lane_not_allowed")
    assert code(await fresh.post(f"{path}/cancel", headers=limited)) == (409, "already_terminal")
    assert (await fresh.delete(path, headers=limited)).status_code == 200


async def test_an_idempotency_key_does_not_lead_to_a_job_of_another_lane(
    fresh: httpx.AsyncClient, api_keys: ApiKeys, idle_worker: FakeWorker
) -> None:
    """The job has been moved since; repeating the call could cancel it by disconnecting."""
    limited, free = await bearer(api_keys, lanes=("standard",)), await bearer(api_keys)
    headers = limited | {"idempotency-key": "k", "prefer": "wait=0"}
    call = await fresh.post("/v1/completions", json=BODY, headers=headers)
    path = f"/v1/jobs/{call.json()['id']}"
    assert (await fresh.patch(path, json={"lane": "batch"}, headers=free)).status_code == 200
    call = await fresh.post("/v1/completions", json=BODY, headers=headers)
    assert code(call) == (403, "lane_not_allowed")


async def test_only_an_admin_lists_the_jobs_of_other_tenants(
    fresh: httpx.AsyncClient, api_keys: ApiKeys, worker: FakeWorker
) -> None:
    """By `tenant`; one's own name is always possible."""
    acme, admin = await bearer(api_keys), await bearer(api_keys, "ops", scopes=(Scope.ADMIN,))
    job_id = (await fresh.post("/v1/jobs", json=JOB, headers=acme)).json()["id"]
    for tenant in ("ops", "*"):
        answer = await fresh.get("/v1/jobs", params={"tenant": tenant}, headers=acme)
        assert code(answer) == (403, "missing_scope")
    for who, tenant in ((acme, "acme"), (admin, "acme"), (admin, "*")):
        answer = await fresh.get("/v1/jobs", params={"tenant": tenant}, headers=who)
        assert [each["id"] for each in answer.json()["data"]] == [job_id]
    assert (await fresh.get("/v1/jobs", headers=admin)).json()["data"] == []


async def test_jobs_and_idempotency_keys_of_two_tenants_are_separate(
    fresh: httpx.AsyncClient, api_keys: ApiKeys, idle_worker: FakeWorker
) -> None:
    """Another's job is not found. The same idempotency key makes two jobs."""
    ours, theirs = await bearer(api_keys, "ours"), await bearer(api_keys, "theirs")
    same = {"idempotency-key": "k"}
    job_id, other_id = [
        (await fresh.post("/v1/jobs", json=JOB, headers=same | each)).json()["id"]
        for each in (ours, theirs)
    ]
    assert job_id != other_id
    path = f"/v1/jobs/{job_id}"
    assert code(await fresh.get(path, headers=theirs)) == (404, "job_not_found")
    assert (await fresh.get(path, headers=ours)).json()["status"] == "queued"


async def test_the_operator_s_own_key_works_beside_those_in_redis(
    redis_server: EmbeddedRedis, api_keys: ApiKeys, idle_worker: FakeWorker
) -> None:
    """BATCHWAY_API_KEY belongs to the default tenant and permits everything."""
    own = {"authorization": "Bearer a-key-of-the-operator"}
    async with gateway_client(redis_server.url, api_key="a-key-of-the-operator") as http:
        made = await bearer(api_keys)
        answers = [await http.post("/v1/jobs", json=JOB, headers=h) for h in (own, made)]
    assert [answer.status_code for answer in answers] == [202, 202]
    claimed = {(await idle_worker.claim()).job.tenant for _ in range(2)}
    assert claimed == {"default", "acme"}


async def test_a_key_under_another_pepper_is_invalid(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Without the pepper, writing to Redis does not create a valid key."""
    planted = await bearer(ApiKeys(redis_client, keys))
    real = await bearer(ApiKeys(redis_client, keys, Pepper(b"the operator's pepper")))
    async with gateway_client(redis_server.url, key_pepper="the operator's pepper") as http:
        assert code(await http.get("/v1/models", headers=planted)) == (401, "invalid_api_key")
        assert (await http.get("/v1/models", headers=real)).status_code == 200


async def test_a_key_is_forgotten_within_five_seconds(api_keys: ApiKeys) -> None:
    """By the cache's clock: revoked keys, and keys that expire while cached. Malformed keys are not
    looked up; of others also that they are unknown is kept."""
    now_s = 0.0

    async def call(function: Any) -> Any:
        return await function()

    ring = KeyRing(api_keys, call, lambda: now_s)
    key, prefix = await api_keys.create(KeyTerms(tenant="acme"))
    ending, _ = await api_keys.create(KeyTerms(tenant="acme"), lifetime_s=1.5)
    assert await ring.terms_of(key) == KeyTerms(tenant="acme") == await ring.terms_of(ending)
    await api_keys.revoke(prefix)
    now_s = 1.6
    assert await ring.terms_of(key) is not None
    assert await ring.terms_of(ending) is None
    assert REMEMBERED_S <= 5
    now_s = REMEMBERED_S
    assert await ring.terms_of(key) is None
    assert await ring.terms_of("sk-none") is None
    assert len(ring._found) == 1
    assert await ring.terms_of(f"bw-{'a' * 8}-{'0' * 64}") is None
    assert len(ring._found) == 2


async def test_keys_are_rejected_while_redis_is_away() -> None:
    """503, because the gateway cannot check the key."""
    async with gateway_client("redis://127.0.0.1:1") as http:
        for headers in ({}, {"authorization": f"Bearer bw-{'a' * 8}-{'0' * 64}"}):
            answer = await http.get("/v1/models", headers=headers)
            assert code(answer) == (503, "broker_unavailable")


async def test_keys_can_be_required_before_one_exists(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis
) -> None:
    """Beyond loopback, an empty Redis does not open the gateway."""
    async with gateway_client(redis_server.url, require_key=True) as http:
        assert code(await http.get("/v1/models")) == (401, "invalid_api_key")


DAY_S, MONTH_S = 86_400, 30 * 86_400
CALL = "/v1/completions"


@pytest.mark.parametrize(
    ("granted_s", "path", "body", "headers", "kept_s"),
    [
        (0.0, "/v1/jobs", JOB, {}, DAY_S),
        (3600.0, "/v1/jobs", JOB, {}, 3600),
        (3600.0, "/v1/jobs", JOB | {"retention_s": 7200}, {}, 7200),
        (365.0 * DAY_S, "/v1/jobs", JOB, {}, MONTH_S),
        (120.0, CALL, BODY, {}, 120),
        (7200.0, CALL, BODY, {}, 600),
        (7200.0, CALL, BODY, {"prefer": "wait=10"}, 7200),
    ],
    ids=[
        *("the installation's", "the key's own", "what the job asks for", "cut at the bound"),
        *("a call no longer than jobs", "a call, the installation's", "a call that becomes a job"),
    ],
)
async def test_a_job_is_kept_for_as_long_as_its_key_says(
    fresh: httpx.AsyncClient,
    api_keys: ApiKeys,
    worker: FakeWorker,
    granted_s: float,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
    kept_s: int,
) -> None:
    """If the job does not ask for a time. The output of a call is kept no longer than that; a call
    that becomes a job is kept as a job."""
    headers = headers | await bearer(api_keys, retention_s=granted_s)
    answer = await fresh.post(path, json=body, headers=headers)
    assert answer.status_code in (200, 202)
    job_id = answer.headers.get("x-job-id") or answer.json()["id"]
    ttl_ms: Any = await worker.client.hget(worker.keys.of("job", job_id), "ttl_ms")
    assert int(ttl_ms) == kept_s * 1000


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"retention_s": 59.0}, "a retention is 60 s or more"),
        *(
            ({"weight": weight}, "a weight is a number from")
            for weight in (0.0, 0.009, 100.5, float("nan"), float("inf"))
        ),
    ],
)
def test_terms_out_of_bounds_are_an_error(terms: dict[str, float], message: str) -> None:
    """A result that is deleted at once could not be read; a weight may be no number."""
    with pytest.raises(ValueError, match=message):
        KeyTerms(tenant="acme", **terms)  # type: ignore[arg-type]


async def test_a_job_has_the_weight_of_its_key(
    fresh: httpx.AsyncClient, api_keys: ApiKeys, worker: FakeWorker
) -> None:
    """Of the key that submitted it, if a tenant has several."""
    for weight in (4.0, 1.0):
        headers = await bearer(api_keys, weight=weight)
        assert (await fresh.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
        assert worker.seen[-1].weight == weight


@pytest.mark.parametrize(
    ("tier", "counted", "left"), [("flex", 21.5, "970"), ("default", 43.0, "940")]
)
async def test_tokens_of_the_lane_batch_count_less_in_a_key_s_limit(
    redis_server: EmbeddedRedis,
    api_keys: ApiKeys,
    worker: FakeWorker,
    tier: str,
    counted: float,
    left: str,
) -> None:
    """BATCHWAY_BATCH_PRICE: half of them; the usage of an answer stays the true number."""
    await worker.client.set(TEST_CLOCK, "=1700000000000")
    headers = await bearer(api_keys, tokens_per_minute=1000)
    body = BODY | {"prompt": "x" * 30, "max_tokens": 30, "service_tier": tier}
    async with gateway_client(redis_server.url, headers, batch_price=0.5) as http:
        answer = await http.post("/v1/completions", json=body)
        job = (await http.get(f"/v1/jobs/{answer.headers['x-job-id']}")).json()
    usage: dict[str, object] = {"prompt_tokens": 30, "completion_tokens": 13, "total_tokens": 43}
    usage["prompt_tokens_details"] = {"cached_tokens": 0}
    assert answer.json()["usage"] == job["usage"] == usage
    assert answer.headers["x-ratelimit-remaining-tokens"] == left  # of 30 and at most 30 tokens
    level = await worker.client.hget(worker.keys.of("tenant", "acme"), "tokens")
    assert float(level or 0) == counted
