"""A tenant's jobs: listed, filtered, deleted; and what another tenant sees."""

import re
from typing import Any

import httpx
import pytest
import redis.asyncio
from msgspec.structs import replace

from contract.functions import Functions
from contract.keys import Keys, new_job_id
from tests.clock import TEST_CLOCK
from tests.contract.some_calls import make_submission
from tests.gateway.conftest import operations, until_listed
from tests.gateway.fake_worker import MODEL, FakeWorker, job_of_one, publish_model

pytestmark = pytest.mark.anyio

OTHER = "somebody else"  # a tenant
JOB: dict[str, Any] = {
    "endpoint": "/v1/completions",
    "body": {"model": MODEL, "prompt": "ab", "max_tokens": 20},
}


async def submit(http: httpx.AsyncClient, **fields: Any) -> str:
    answer = await http.post("/v1/jobs", json=JOB | fields)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def listed(http: httpx.AsyncClient, **query: Any) -> dict[str, Any]:
    answer = await http.get("/v1/jobs", params=query)
    assert answer.status_code == 200, answer.text
    page: dict[str, Any] = answer.json()
    return page


def ids(page: dict[str, Any]) -> list[str]:
    return [job["id"] for job in page["data"]]


async def submit_for(functions: Functions, tenant: str) -> str:
    """A job that the gateway's caller did not submit."""
    job = replace(job_of_one(), id=new_job_id(), tenant=tenant)
    await functions.submit(job, make_submission())
    return job.id


async def test_a_list_is_read_page_by_page(
    idle_worker: FakeWorker, http: httpx.AsyncClient, functions: Functions
) -> None:
    """Youngest first, each once, none of another tenant; `last_id` leads to the next page."""
    submitted = [await submit(http) for _ in range(5)]
    await submit_for(functions, OTHER)
    seen: list[str] = []
    query: dict[str, Any] = {"limit": 2}
    while True:
        page = await listed(http, **query)
        seen += ids(page)
        assert page["object"] == "list"
        assert (page["first_id"], page["last_id"]) == (ids(page)[0], ids(page)[-1])
        if not page["has_more"]:
            break
        query["after"] = page["last_id"]
    assert sorted(seen) == sorted(submitted)
    created = [job["timings"]["queued_at"] for job in (await listed(http))["data"]]
    assert created == sorted(created, reverse=True)


async def test_jobs_are_filtered(idle_worker: FakeWorker, http: httpx.AsyncClient) -> None:
    """By state, lane, model, metadata and age."""
    done = await submit(http, lane="interactive", metadata={"run": "7", "team": "a"})
    await idle_worker.run(await idle_worker.claim())
    running = await submit(http, lane="interactive", metadata={"run": "7"})
    await idle_worker.claim()
    queued = await submit(http, lane="batch")

    assert ids(await listed(http, status="succeeded")) == [done]
    assert ids(await listed(http, status="running")) == [running]
    assert ids(await listed(http, lane="batch")) == [queued]
    assert ids(await listed(http, lane="scoring")) == []
    assert ids(await listed(http, model="another")) == []
    assert set(ids(await listed(http, **{"metadata[run]": "7"}))) == {done, running}
    both = await listed(http, **{"metadata[run]": "7", "metadata[team]": "a"})
    assert ids(both) == [done]
    assert both["data"][0]["metadata"] == {"run": "7", "team": "a"}
    assert "result" not in both["data"][0]
    youngest = max((await listed(http))["data"], key=lambda job: job["timings"]["queued_at"])
    after = youngest["timings"]["queued_at"]
    assert ids(await listed(http, created_after=f"{after:.3f}")) == []
    assert len(ids(await listed(http, created_after=f"{after - 3600:.3f}"))) == 3


async def test_jobs_are_filtered_by_error_and_time(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """`created_before` excludes its own time, as `created_after` does."""
    await idle_worker.client.set(TEST_CLOCK, "=1700000000000")
    old = await submit(http)
    await idle_worker.finish(await idle_worker.claim(), 1, "engine_error", "it")
    await idle_worker.client.set(TEST_CLOCK, "=1700000010000")
    young = await submit(http)
    assert ids(await listed(http, error_code="engine_error")) == [old]
    assert ids(await listed(http, error_code="poison")) == []
    assert ids(await listed(http, created_before="1700000010.001")) == [young, old]
    assert ids(await listed(http, created_before="1700000010")) == [old]
    between = {"created_after": "1700000000", "created_before": "1700000010"}
    assert ids(await listed(http, **between)) == []


async def test_an_admin_lists_the_jobs_of_all_tenants(
    idle_worker: FakeWorker, http: httpx.AsyncClient, functions: Functions
) -> None:
    """In the order of their submission, page by page; `tenant` names each."""
    expected = [
        await submit_for(functions, "busy" if number % 3 else f"t{number % 7}")
        for number in range(150)
    ]
    seen: list[dict[str, Any]] = []
    page: dict[str, Any] = {"has_more": True}
    while page["has_more"]:
        after = {"after": page["last_id"]} if seen else {}
        page = await listed(http, tenant="*", limit=40, **after)
        seen += page["data"]
    order = [(each["timings"]["queued_at"], each["id"]) for each in seen]
    assert order == sorted(order, reverse=True)
    assert sorted(each["id"] for each in seen) == sorted(expected)
    assert {each["tenant"] for each in seen} == {"busy", *(f"t{number}" for number in range(7))}
    busy = await listed(http, tenant="busy", limit=100)
    assert len(busy["data"]) == 100
    assert {each["tenant"] for each in busy["data"]} == {"busy"}
    assert ids(await listed(http)) == []  # without `tenant`, one's own


async def test_jobs_of_an_operators_lane_are_found(
    http: httpx.AsyncClient, functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """A lane that a model's workers define; an unknown lane is rejected."""
    await publish_model(redis_client, keys)  # gateways remember cards for a second
    await publish_model(redis_client, keys, "nocturnal", lanes=("nightly",))
    await FakeWorker(functions, model="nocturnal").beat()
    await until_listed(http, {"nocturnal"})
    body = {"model": "nocturnal", "prompt": "ab", "max_tokens": 4}
    job_id = await submit(http, body=body, lane="nightly")
    assert ids(await listed(http, lane="nightly")) == [job_id]
    assert ids(await listed(http, lane="batch")) == []
    answer = await http.get("/v1/jobs", params={"lane": "weekly"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "lane")
    assert "nightly" in error["message"]


async def test_a_rare_job_is_found_behind_many(
    idle_worker: FakeWorker, http: httpx.AsyncClient, functions: Functions
) -> None:
    """One function call searches 500 jobs; the gateway repeats it."""
    rare = await submit(http, metadata={"rare": "yes"})
    for _ in range(520):
        await submit_for(functions, "default")
    page = await listed(http, **{"metadata[rare]": "yes"})
    assert (ids(page), page["has_more"]) == ([rare], False)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=²", "limit"),
        ("status=claimed", "status"),
        ("lane=fast", "lane"),
        ("created_after=yesterday", "created_after"),
        ("created_before=-1", "created_before"),
        ("tenant=a%20b", "tenant"),
        ("after=x", "after"),
        ("after=job-0-" + "0" * 32, "after"),
        ("colour=red", "colour"),
        ("lane=batch&lane=batch", "lane"),
        ("metadata[]=1", "metadata[]"),
        ("&".join(f"metadata[{name}]=1" for name in range(17)), "metadata"),
    ],
)
async def test_a_wrong_query_names_its_parameter(
    redis_client: redis.asyncio.Redis, http: httpx.AsyncClient, query: str, param: str
) -> None:
    """400, never a list that omits something."""
    answer = await http.get(f"/v1/jobs?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_job_is_forgotten_when_its_retention_is_over(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """It can be read until then; nothing is left of it afterwards, also in the list."""
    path = f"/v1/jobs/{await submit(http, retention_s=60)}"
    await idle_worker.run(await idle_worker.claim())
    await idle_worker.client.incrby(TEST_CLOCK, 59_000)
    await idle_worker.functions.sweep()
    assert len(ids(await listed(http))) == 1
    assert (await http.get(path)).status_code == 200
    await idle_worker.client.incrby(TEST_CLOCK, 1_000)
    await idle_worker.functions.sweep()
    assert ids(await listed(http)) == []
    assert (await http.get(path)).status_code == 404
    found: Any = await idle_worker.client.keys(f"{idle_worker.keys.tag}:*")
    left = {key.decode().split(":")[3] for key in found}
    assert not left & {"job", "log", "jobs", "kept"}


async def test_a_deletion_removes_all_data_of_a_job(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """409 before its end; then 404 on every route, and nothing is left in Redis."""
    job_id = await submit(http, metadata={"k": "v"})
    answer = await http.delete(f"/v1/jobs/{job_id}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "not_terminal")
    await idle_worker.run(await idle_worker.claim())
    answer = await http.delete(f"/v1/jobs/{job_id}")
    assert answer.json() == {"id": job_id, "object": "job", "deleted": True}
    for route in ("", "/events"):
        assert (await http.get(f"/v1/jobs/{job_id}{route}")).status_code == 404
    assert (await http.delete(f"/v1/jobs/{job_id}")).status_code == 404
    assert ids(await listed(http)) == []
    assert await idle_worker.client.keys(f"*{job_id}*") == []
    assert await idle_worker.client.zcard(idle_worker.keys.of("kept")) == 0


def job_routes() -> list[tuple[str, str]]:
    """Method and path of every route of one job, taken from the app. Objects are excluded: they
    are read by signed URLs, without a key."""
    found = [
        (method, path)
        for method, path in operations()
        if "{job_id}" in path and not path.startswith("/v1/objects/")
    ]
    assert len(found) >= 7
    assert ("POST", "/v1/callbacks/dead/{job_id}/replay") in found
    return found


@pytest.mark.parametrize(("method", "path"), job_routes())
async def test_another_tenants_job_does_not_exist(
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    http: httpx.AsyncClient,
    functions: Functions,
    method: str,
    path: str,
) -> None:
    """Each route answers as for an unknown id."""
    await publish_model(redis_client, keys)
    foreign, unknown = await submit_for(functions, OTHER), new_job_id()
    has_body = method in ("POST", "PATCH") and not path.endswith("/token")
    body = {"json": {"lane": "batch"}} if has_body else {}
    answers = [
        await http.request(method, re.sub(r"\{job_id\}", job_id, path), **body)  # type: ignore[arg-type]
        for job_id in (foreign, unknown)
    ]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert answers[0].content == answers[1].content
    names = [sorted(set(answer.headers) - {"x-request-id"}) for answer in answers]
    assert names[0] == names[1]
    found = await functions.read(foreign, OTHER)
    assert found is not None
    assert (found[0].status, found[0].lane) == ("queued", "standard")
