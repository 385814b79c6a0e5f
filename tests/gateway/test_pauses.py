"""Pausing and resuming lanes and tenants over HTTP: who may, and what callers see."""

from typing import Any

import httpx
import pytest

from contract.api_keys import Scope
from tests.fleet import until
from tests.gateway.conftest import Bearer
from tests.gateway.fake_worker import MODEL, FakeWorker
from tests.gateway.test_api_keys import code, fresh

pytestmark = pytest.mark.anyio

__all__ = ["fresh"]  # a fixture

BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab"}
JOB: dict[str, Any] = {"endpoint": "/v1/completions", "lane": "batch", "body": BODY}


async def paused(http: httpx.AsyncClient, headers: dict[str, str] | None = None) -> list[Any]:
    answer = await http.get("/v1/lanes/paused", headers=headers)
    assert answer.status_code == 200, answer.text
    data: list[Any] = answer.json()["data"]
    return data


async def test_a_paused_lane_refuses_calls_and_keeps_its_jobs(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """503 `lane_paused` with Retry-After; after the resume the jobs run."""
    first = (await http.post("/v1/lanes/pause", json={"lane": "standard"})).json()
    names = {"lane": "standard", "tenant": None, "model": None}
    assert first == {"object": "pause", **names, "since": first["since"], "by": "operator"}
    assert await paused(http) == [first]
    answer = await http.post("/v1/completions", json=BODY)
    assert code(answer) == (503, "lane_paused")
    assert answer.headers["x-dropped-reason"] == "lane_paused"
    assert int(answer.headers["retry-after"]) >= 30
    quote = (await http.post("/v1/quote", json=JOB | {"lane": "standard"})).json()
    assert quote["refusal"]["code"] == "lane_paused"

    waiting = (await http.post("/v1/jobs", json=JOB)).json()["id"]  # of another lane
    assert (await http.post("/v1/lanes/pause", json={"tenant": "default"})).status_code == 200
    answer = await http.post("/v1/lanes/resume", json={"lane": "standard"})
    assert answer.json() == {"object": "pause", **names, "resumed": True}
    assert code(await http.post("/v1/jobs", json=JOB)) == (503, "lane_paused")
    assert (await http.post("/v1/lanes/resume", json={"tenant": "default"})).status_code == 200
    assert await paused(http) == []

    async def has_ended() -> bool:
        return bool((await http.get(f"/v1/jobs/{waiting}")).json()["status"] == "succeeded")

    await until(has_ended)
    assert (await http.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_pause_names_what_exists(worker: FakeWorker, http: httpx.AsyncClient) -> None:
    """A misspelt name pauses nothing, and is refused."""
    for body, refused in (
        ({}, (400, "missing_required_parameter")),
        ({"lane": "nosuch"}, (400, "invalid_value")),
        ({"lane": "*"}, (400, "invalid_value")),
        ({"model": "nosuch"}, (404, "model_not_found")),
        ({"lanes": "batch"}, (400, "unknown_parameter")),
    ):
        assert code(await http.post("/v1/lanes/pause", json=body)) == refused, body
    answer = await http.post("/v1/lanes/resume", json={"lane": "batch"})
    assert code(answer) == (404, "pause_not_found")
    assert await paused(http) == []


async def test_a_key_pauses_its_own_tenant_only(
    fresh: httpx.AsyncClient, worker: FakeWorker, bearer: Bearer
) -> None:
    """And only in its lanes. It cannot end what an operator has paused."""
    writer = (Scope.JOBS_READ, Scope.JOBS_WRITE)
    acme = await bearer(scopes=writer)
    narrow = await bearer(scopes=writer, lanes=("batch",))
    reader = await bearer(scopes=(Scope.JOBS_READ,))
    other = await bearer("other", scopes=writer)
    admin = await bearer("ops", scopes=(Scope.ADMIN,))

    async def pause(headers: dict[str, str], verb: str = "pause", **body: str) -> httpx.Response:
        return await fresh.post(f"/v1/lanes/{verb}", json=body, headers=headers)

    assert code(await pause(reader, lane="batch")) == (403, "missing_scope")
    assert code(await pause(acme, tenant="other")) == (403, "missing_scope")
    assert code(await pause(narrow, model=MODEL)) == (403, "lane_not_allowed")
    assert code(await pause(narrow, lane="standard")) == (403, "lane_not_allowed")
    own = (await pause(acme, lane="batch")).json()
    assert (own["tenant"], own["lane"], own["by"]) == ("acme", "batch", "tenant")
    assert code(await fresh.post("/v1/jobs", json=JOB, headers=acme)) == (503, "lane_paused")
    assert (await fresh.post("/v1/jobs", json=JOB, headers=other)).status_code == 202
    assert [await paused(fresh, who) for who in (acme, other, admin)] == [[own], [], [own]]
    assert (await pause(narrow, "resume", lane="batch")).status_code == 200

    assert (await pause(admin, tenant="acme")).json()["by"] == "operator"
    assert code(await pause(acme, "resume", tenant="acme")) == (403, "missing_scope")
    assert (await pause(admin, lane="batch")).json()["tenant"] is None
    assert [len(await paused(fresh, who)) for who in (acme, other)] == [2, 1]
    assert code(await fresh.post("/v1/jobs", json=JOB, headers=other)) == (503, "lane_paused")
