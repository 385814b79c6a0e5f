"""API keys over HTTP: what a key permits, whose jobs it sees, and how soon it is revoked."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.api_keys import ApiKey, ApiKeys, KeyTerms, Pepper, Scope
from contract.keys import Keys
from gateway.redis.key_ring import REMEMBERED_S, KeyRing
from infra.embedded_redis import EmbeddedRedis
from tests.clock import TEST_CLOCK
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import MODEL, FakeWorker

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab"}
JOB: dict[str, Any] = {"endpoint": "/v1/completions", "body": BODY}
NO_JOB = "/v1/jobs/job-0-" + "0" * 32
NO_RESPONSE = "/v1/responses/resp_0-" + "0" * 32


@pytest.fixture
async def fresh(redis_server: EmbeddedRedis) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway with an empty cache of keys."""
    with running_gateway(make_settings(redis_server.url)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            yield client


@pytest.fixture
def api_keys(redis_client: redis.asyncio.Redis, keys: Keys) -> ApiKeys:
    return ApiKeys(redis_client, keys)


async def bearer(api_keys: ApiKeys, tenant: str = "acme", **terms: Any) -> dict[str, str]:
    key, _ = await api_keys.create(KeyTerms(tenant=tenant, **terms))
    return {"authorization": f"Bearer {key}"}


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


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


async def refused(http: httpx.AsyncClient, headers: dict[str, str]) -> None:
    """Returns once a caller is refused; until then the gateway's cache still knows its key."""
    async with asyncio.timeout(10):
        while (await http.get("/v1/models", headers=headers)).status_code == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


SCOPED = [
    (Scope.INFERENCE, "POST", "/v1/completions"),
    (Scope.INFERENCE, "POST", "/v1/chat/completions"),
    (Scope.INFERENCE, "POST", "/v1/embeddings"),
    (Scope.INFERENCE, "POST", "/v1/rerank"),
    (Scope.INFERENCE, "POST", "/v1/score"),
    (Scope.INFERENCE, "POST", "/v1/classify"),
    (Scope.INFERENCE, "POST", "/v1/responses"),
    (Scope.INFERENCE, "POST", "/v1/responses/input_tokens"),
    (Scope.INFERENCE, "POST", "/v1/quote"),
    (Scope.JOBS_WRITE, "POST", "/v1/jobs"),
    (Scope.JOBS_WRITE, "POST", NO_JOB + "/cancel"),
    (Scope.JOBS_WRITE, "PATCH", NO_JOB),
    (Scope.JOBS_WRITE, "POST", NO_RESPONSE + "/cancel"),
    (Scope.JOBS_WRITE, "DELETE", NO_RESPONSE),
    (Scope.JOBS_READ, "GET", NO_JOB),
    (Scope.JOBS_READ, "GET", NO_JOB + "/events"),
    (Scope.JOBS_READ, "GET", NO_RESPONSE),
    (Scope.JOBS_READ, "GET", NO_RESPONSE + "/input_items"),
]


async def test_every_route_names_the_scope_that_a_key_lacks(
    fresh: httpx.AsyncClient, api_keys: ApiKeys
) -> None:
    """403 without it, something else with it or with `admin`."""
    for scope, method, path in SCOPED:
        others = tuple(s for s in Scope if s not in (scope, Scope.ADMIN))
        lacking = await bearer(api_keys, scopes=others)
        answer = await fresh.request(method, path, headers=lacking)
        assert code(answer) == (403, "missing_scope"), path
        assert f"'{scope}'" in answer.json()["error"]["message"]
        assert answer.json()["error"]["type"] == "permission_error"
        for scopes in ((scope,), (Scope.ADMIN,)):
            granted = await bearer(api_keys, scopes=scopes)
            answer = await fresh.request(method, path, headers=granted)
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


@pytest.mark.parametrize("prefer", ["respond-async", "wait=0", "respond-async, wait=30"])
async def test_a_call_that_may_become_a_job_needs_the_scope_of_jobs(
    fresh: httpx.AsyncClient, api_keys: ApiKeys, idle_worker: FakeWorker, prefer: str
) -> None:
    """`Prefer` does not permit with `inference` what `POST /v1/jobs` refuses."""
    headers = await bearer(api_keys, scopes=(Scope.INFERENCE,)) | {"prefer": prefer}
    answer = await fresh.post("/v1/completions", json=BODY, headers=headers)
    assert code(answer) == (403, "missing_scope")
    assert "'jobs:write'" in answer.json()["error"]["message"]


async def test_both_scopes_allow_a_call_to_become_a_job(
    fresh: httpx.AsyncClient, api_keys: ApiKeys, idle_worker: FakeWorker
) -> None:
    scopes = (Scope.INFERENCE, Scope.JOBS_WRITE)
    headers = await bearer(api_keys, scopes=scopes) | {"prefer": "wait=0"}
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


async def test_another_tenant_s_job_is_not_found(
    fresh: httpx.AsyncClient, api_keys: ApiKeys, idle_worker: FakeWorker
) -> None:
    """Read, followed, cancelled: the same 404, byte for byte."""
    ours, theirs = await bearer(api_keys, "ours"), await bearer(api_keys, "theirs")
    job_id = (await fresh.post("/v1/jobs", json=JOB, headers=ours)).json()["id"]
    change = {"lane": "batch"}
    for method, suffix in (("GET", ""), ("GET", "/events"), ("POST", "/cancel"), ("PATCH", "")):
        path, body = f"/v1/jobs/{job_id}{suffix}", change if method == "PATCH" else None
        foreign = await fresh.request(method, path, headers=theirs, json=body)
        none = await fresh.request(method, NO_JOB + suffix, headers=theirs, json=body)
        assert code(foreign) == (404, "job_not_found")
        assert foreign.content == none.content
    assert (await fresh.get(f"/v1/jobs/{job_id}", headers=ours)).json()["status"] == "queued"


async def test_idempotency_keys_of_two_tenants_are_separate(
    fresh: httpx.AsyncClient, api_keys: ApiKeys, idle_worker: FakeWorker
) -> None:
    """The same key, two jobs."""
    same = {"idempotency-key": "k"}
    one, two = [
        (await fresh.post("/v1/jobs", json=JOB, headers=same | await bearer(api_keys, name))).json()
        for name in ("one", "two")
    ]
    assert one["id"] != two["id"]


async def test_the_operator_s_own_key_works_beside_those_in_redis(
    redis_server: EmbeddedRedis, api_keys: ApiKeys, idle_worker: FakeWorker
) -> None:
    """BATCHWAY_API_KEY belongs to the default tenant and permits everything."""
    own = {"authorization": "Bearer a-key-of-the-operator"}
    settings = make_settings(redis_server.url, api_key="a-key-of-the-operator")
    with running_gateway(settings) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
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
    with running_gateway(
        make_settings(redis_server.url, key_pepper="the operator's pepper")
    ) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            assert code(await http.get("/v1/models", headers=planted)) == (401, "invalid_api_key")
            assert (await http.get("/v1/models", headers=real)).status_code == 200


async def test_a_key_is_forgotten_within_five_seconds(api_keys: ApiKeys) -> None:
    """By the cache's clock: revoked keys, and keys that expire while cached."""
    now_s = 0.0
    num_calls = 0

    async def call(function: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
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


async def test_guessed_prefixes_do_not_fill_the_memory(
    api_keys: ApiKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest are dropped; malformed keys are not looked up."""
    monkeypatch.setattr("gateway.redis.key_ring.MAX_REMEMBERED", 3)
    found: list[str] = []
    real = api_keys.find

    async def find(prefix: str) -> ApiKey | None:
        found.append(prefix)
        return await real(prefix)

    async def call(function: Any) -> Any:
        return await function()

    monkeypatch.setattr(api_keys, "find", find)
    await api_keys.create(KeyTerms(tenant="acme"))
    ring = KeyRing(api_keys, call)
    for letter in "abcde":
        assert await ring.terms_of(f"bw-{letter * 8}-{'0' * 64}") is None
    assert await ring.terms_of("sk-none") is None
    assert len(ring._found) == 3
    assert found == [letter * 8 for letter in "abcde"]


async def test_keys_are_rejected_while_redis_is_away(redis_server: EmbeddedRedis) -> None:
    """503, because the gateway cannot check the key."""
    with running_gateway(make_settings("redis://127.0.0.1:1")) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            for headers in ({}, {"authorization": f"Bearer bw-{'a' * 8}-{'0' * 64}"}):
                assert code(await http.get("/v1/models", headers=headers)) == (
                    503,
                    "broker_unavailable",
                )


async def test_keys_can_be_required_before_one_exists(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis
) -> None:
    """Beyond loopback, an empty Redis does not open the gateway."""
    with running_gateway(make_settings(redis_server.url, require_key=True)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            assert code(await http.get("/v1/models")) == (401, "invalid_api_key")


DAY_S, MONTH_S = 86_400, 30 * 86_400


@pytest.mark.parametrize(
    ("granted_s", "asked", "kept_s"),
    [
        (0.0, {}, DAY_S),
        (3600.0, {}, 3600),
        (3600.0, {"retention_s": 7200}, 7200),
        (365.0 * DAY_S, {}, MONTH_S),
    ],
    ids=["the installation's", "the key's own", "what the job asks for", "cut at the bound"],
)
async def test_a_job_is_kept_for_as_long_as_its_key_says(
    fresh: httpx.AsyncClient,
    api_keys: ApiKeys,
    idle_worker: FakeWorker,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    granted_s: float,
    asked: dict[str, Any],
    kept_s: int,
) -> None:
    """If the job does not ask for a time. It can be read until then and not afterwards."""
    headers = await bearer(api_keys, retention_s=granted_s)
    answer = await fresh.post("/v1/jobs", json=JOB | asked, headers=headers)
    path = f"/v1/jobs/{answer.json()['id']}"
    await idle_worker.run(await idle_worker.claim())
    await redis_client.incrby(TEST_CLOCK, kept_s * 1000 - 60_000)
    await idle_worker.functions.sweep()
    assert (await fresh.get(path, headers=headers)).status_code == 200
    await redis_client.incrby(TEST_CLOCK, 60_000)
    await idle_worker.functions.sweep()
    assert code(await fresh.get(path, headers=headers)) == (404, "job_not_found")


@pytest.mark.parametrize(
    ("granted_s", "headers", "kept_s"),
    [
        (120.0, {}, 120),
        (7200.0, {}, 600),
        (7200.0, {"prefer": "wait=10"}, 7200),
    ],
    ids=["no longer than jobs", "the installation's", "may become a job"],
)
async def test_the_output_of_a_call_is_kept_no_longer_than_the_key_s_jobs(
    fresh: httpx.AsyncClient,
    api_keys: ApiKeys,
    worker: FakeWorker,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    granted_s: float,
    headers: dict[str, str],
    kept_s: int,
) -> None:
    """A call that becomes a job is kept as a job."""
    headers = headers | await bearer(api_keys, retention_s=granted_s)
    answer = await fresh.post("/v1/completions", json=BODY, headers=headers)
    assert answer.status_code == 200
    ttl_ms: Any = await redis_client.hget(keys.of("job", answer.headers["x-job-id"]), "ttl_ms")
    assert int(ttl_ms) == kept_s * 1000


def test_a_retention_that_is_too_short_is_an_error() -> None:
    """A result that is deleted at once could not be read."""
    with pytest.raises(ValueError, match="a retention is 60 s or more"):
        KeyTerms(tenant="acme", retention_s=59.0)


@pytest.mark.parametrize("weight", [0.0, 0.009, 100.5, float("nan"), float("inf")])
def test_a_weight_out_of_bounds_is_an_error(weight: float) -> None:
    """Also a weight that is not a number."""
    with pytest.raises(ValueError, match="a weight is a number from"):
        KeyTerms(tenant="acme", weight=weight)


async def test_a_job_has_the_weight_of_its_key(
    fresh: httpx.AsyncClient, api_keys: ApiKeys, worker: FakeWorker
) -> None:
    """Of the key that submitted it, if a tenant has several."""
    for weight in (4.0, 1.0):
        headers = await bearer(api_keys, weight=weight)
        assert (await fresh.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
        assert worker.seen[-1].weight == weight
