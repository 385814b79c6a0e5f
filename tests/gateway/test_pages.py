"""The pages over HTTP: their policy, sessions of browsers, and who sees what in the feed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.api_keys import ApiKeys, KeyTerms, Scope
from contract.connection import end_tasks
from contract.keys import Keys
from gateway.follow.fleet import FleetWatch
from gateway.redis.broker import Broker
from gateway.redis.key_ring import csrf_token
from gateway.state import Gateway
from infra.embedded_redis import EmbeddedRedis
from tests.fleet import until
from tests.gateway.conftest import Bearer, Gateways, gateway_client, make_settings
from tests.gateway.fake_worker import MODEL, FakeWorker
from tests.streams import events_of

pytestmark = pytest.mark.anyio

PAGES = ("/", "/docs", "/console", "/assets/console.js", "/assets/vendor/uPlot.iife.min.js")
JOB = {"endpoint": "/v1/completions", "body": {"model": MODEL, "prompt": "ab"}}


@pytest.fixture
async def fresh(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis
) -> AsyncIterator[httpx.AsyncClient]:
    """A client, with a browser's jar of cookies, of a gateway that remembers no key."""
    async with gateway_client(redis_server.url, console=True) as client:
        yield client


async def log_in(http: httpx.AsyncClient, headers: dict[str, str]) -> dict[str, Any]:
    """A session for the key of a header."""
    key = headers["authorization"].removeprefix("Bearer ")
    answer = await http.post("/console/session", json={"key": key})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def status_of(url: httpx.URL | str, session: str = "") -> int:
    """The status for a caller of its own, with this session."""
    async with httpx.AsyncClient() as http:
        answer = await http.get(url, headers={"cookie": f"batchway_session={session}"})
    return answer.status_code


async def first_state(http: httpx.AsyncClient) -> dict[str, Any]:
    """The first state of the feed that names a model."""
    async with http.stream("GET", "/console/feed") as answer:
        async for event in events_of(answer):
            if event.data.get("models"):
                return event.data
    raise AssertionError("the feed has ended")


async def test_the_pages_need_no_key_and_permit_no_other_script(
    fresh: httpx.AsyncClient, bearer: Bearer
) -> None:
    """Each has a policy without `unsafe-inline`, and holds no inline script, style or handler."""
    await bearer("a")
    for path in PAGES:
        answer = await fresh.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        if answer.headers["content-type"].startswith("text/html"):
            assert "<style" not in answer.text
            assert " style=" not in answer.text
            assert " on" not in answer.text.replace(" on where", "").partition("<main")[0]
            assert "<script>" not in answer.text
    for path in ("/assets/nothing.js", "/assets/../app.py", "/assets/%2e%2e/app.py"):
        assert (await fresh.get(path)).status_code == 404, path


async def test_the_pages_are_off_by_a_setting(gateways: Gateways) -> None:
    async with gateways(console=False) as http:
        for path in (*PAGES, "/console/feed", "/console/session"):
            assert (await http.get(path)).status_code == 404, path


async def test_a_key_becomes_a_session_that_ends_with_it(
    fresh: httpx.AsyncClient, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """The cookie is hidden from scripts and other sites; a wrong key gets none; a revoked key's
    session is refused."""
    api_keys = ApiKeys(redis_client, keys)
    key, prefix = await api_keys.create(KeyTerms(tenant="a"))
    assert (await fresh.get("/v1/jobs")).status_code == 401
    answer = await fresh.post("/console/session", json={"key": key[:-1] + "0"})
    assert answer.status_code == 401 or key.endswith("0")
    found = await log_in(fresh, {"authorization": key})
    assert (found["tenant"], found["is_admin"], found["sees_fleet"]) == ("a", False, False)
    answer = await fresh.post("/console/session", json={"key": key})
    cookie = answer.headers["set-cookie"]
    assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", "Max-Age=3600"))
    assert key not in cookie
    assert (await fresh.get("/v1/jobs")).status_code == 200
    forged = fresh.cookies["batchway_session"]
    name, last = forged[:-1], forged[-1]
    for wrong in (f"{name}{'0' if last != '0' else '1'}", forged.replace(prefix, "abcdefgh"), "x"):
        assert await status_of(fresh.base_url.join("/v1/jobs"), wrong) == 401, wrong
    end = forged.split("-")[2]
    later = forged.replace(end, str(int(end) + 3600))
    assert await status_of(fresh.base_url.join("/v1/jobs"), later) == 401

    token = {"x-csrf-token": (await fresh.get("/console/session")).json()["token"]}
    assert (await fresh.delete("/console/session")).status_code == 403
    assert (await fresh.delete("/console/session", headers=token)).status_code == 204
    assert (await fresh.get("/v1/jobs")).status_code == 401
    await log_in(fresh, {"authorization": key})
    await api_keys.revoke(prefix)

    async def is_refused() -> bool:
        return (await fresh.get("/v1/jobs")).status_code == 401

    await until(is_refused)


async def test_a_change_in_a_session_needs_the_pages_token(
    fresh: httpx.AsyncClient, worker: FakeWorker, bearer: Bearer
) -> None:
    """Each method that changes something is refused without it; reading is not."""
    found = await log_in(fresh, await bearer("a"))
    token = found["token"]
    assert token == csrf_token(fresh.cookies["batchway_session"])
    job = (await fresh.post("/v1/jobs", json=JOB, headers={"x-csrf-token": token})).json()
    for method, path, body in (
        ("POST", "/v1/jobs", JOB),
        ("POST", f"/v1/jobs/{job['id']}/cancel", None),
        ("PATCH", f"/v1/jobs/{job['id']}", {"lane": "batch"}),
        ("DELETE", f"/v1/jobs/{job['id']}", None),
        ("POST", "/v1/lanes/pause", {"tenant": "a"}),
        ("POST", "/v1/chat/completions", {"model": MODEL, "messages": []}),
    ):
        for wrong in ({}, {"x-csrf-token": ""}, {"x-csrf-token": token[:-1] + "g"}):
            answer = await fresh.request(method, path, json=body, headers=wrong)
            assert answer.status_code == 403, (method, path, wrong)
            assert answer.json()["error"]["code"] == "csrf_token_missing"
    assert (await fresh.get(f"/v1/jobs/{job['id']}")).status_code == 200


async def test_tenants_see_their_own_and_operators_all(
    fresh: httpx.AsyncClient, idle_worker: FakeWorker, bearer: Bearer
) -> None:
    """Held and waiting jobs of another tenant, workers and lanes are in the feed of those who may
    read the metrics, and in no other's."""
    own, other = [await bearer(name) for name in ("own", "other")]
    operators = await bearer("ops", scopes=(Scope.ADMIN,))
    for headers in (own, other, other):
        assert (await fresh.post("/v1/jobs", json=JOB, headers=headers)).status_code == 202
    await idle_worker.claim()
    await log_in(fresh, operators)
    state = await first_state(fresh)
    assert {row["tenant"] for row in (*state["held"], *state["waiting"])} == {"own", "other"}
    assert [worker["incarnation"] for worker in state["workers"]] == ["w1"]
    assert state["lanes"]
    await log_in(fresh, own)
    state = await first_state(fresh)
    assert {row["tenant"] for row in (*state["held"], *state["waiting"])} <= {"own"}
    assert not {"workers", "lanes", "engines", "refusals", "newest"} & state.keys()


async def test_the_first_state_has_the_jobs(
    fresh: httpx.AsyncClient, idle_worker: FakeWorker, redis_server: EmbeddedRedis
) -> None:
    """Also after a look that nobody watched, which reads no jobs."""
    assert (await fresh.post("/v1/jobs", json=JOB)).status_code == 202
    settings = make_settings(redis_server.url)
    gateway = Gateway(settings, Broker(settings))
    watch = FleetWatch(gateway)
    await watch._look()
    looking = asyncio.create_task(watch.run())
    async with aclosing(watch.states()) as states:
        assert len((await anext(states))["waiting"]) == 1
    await end_tasks(looking)
    await gateway.broker.aclose()


async def test_a_worker_is_drained_by_an_operator_alone(
    fresh: httpx.AsyncClient,
    idle_worker: FakeWorker,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    bearer: Bearer,
) -> None:
    """The order is in the worker's record; an unknown worker is 404."""
    admin = await bearer(scopes=(Scope.ADMIN,))
    for headers, status in ((await bearer(), 403), (admin, 200)):
        answer = await fresh.post("/v1/workers/w1/drain", json={}, headers=headers)
        assert answer.status_code == status
    assert await redis_client.hget(keys.of("worker", "w1"), "order") == b"drain"
    answer = await fresh.post("/v1/workers/nobody/drain", json={}, headers=admin)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "worker_not_found")


async def test_an_operator_reads_and_ends_a_tenants_job_but_not_its_output(
    fresh: httpx.AsyncClient, idle_worker: FakeWorker, bearer: Bearer
) -> None:
    """With `tenant`; a tenant may not name another one."""
    own, admin = await bearer("own"), await bearer("ops", scopes=(Scope.ADMIN,))
    ended = (await fresh.post("/v1/jobs", json=JOB, headers=own)).json()["id"]
    await idle_worker.run(await idle_worker.claim())
    waiting = (await fresh.post("/v1/jobs", json=JOB, headers=own)).json()["id"]
    shown = (await fresh.get(f"/v1/jobs/{ended}?tenant=own", headers=admin)).json()
    assert (shown["status"], shown["result"], shown["result_url"]) == ("succeeded", None, None)
    assert (await fresh.get(f"/v1/jobs/{ended}", headers=own)).json()["result"] is not None
    assert (await fresh.get(f"/v1/jobs/{ended}", headers=admin)).status_code == 404
    assert (await fresh.get(f"/v1/jobs/{ended}?tenant=ops", headers=own)).status_code == 403
    path = f"/v1/jobs/{waiting}"
    moved = await fresh.patch(f"{path}?tenant=own", json={"lane": "batch"}, headers=admin)
    assert moved.json()["lane"] == "batch"
    answer = await fresh.post(f"{path}/cancel?tenant=own", headers=admin)
    assert answer.json()["status"] == "cancelled"
    assert (await fresh.post(f"{path}/cancel?tenant=ops", headers=own)).status_code == 403
