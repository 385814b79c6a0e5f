"""Jobs of flows: their calls, cancel, failures, deadlines, bills, quotes."""

import asyncio
import subprocess
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.errors import ErrorCode
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from contract.replays import replayed_id
from tests.fleet import until
from tests.gateway.conftest import until_listed
from tests.gateway.flows.conftest import (
    Fleet,
    answer_of,
    chat,
    ended,
    job,
    submitted,
    until_live,
)
from tests.gateway.flows.model_files import CHAT

pytestmark = pytest.mark.anyio


async def test_calls_inherit_from_the_flow_s_job(
    flows: httpx.AsyncClient, fleet: Fleet, functions: Functions
) -> None:
    """Tenant, lane, priority, and what is left of the deadline; they know their parent."""
    asked: dict[str, Any] = job("pipe", lane="batch", deadline_s=500, metadata={"a": "b"})
    asked["body"]["priority"] = -3
    job_id = await submitted(flows, asked)
    found = await ended(flows, job_id)
    assert found["status"] == "succeeded", found
    assert found["result"]["choices"][0]["message"]["content"] == "I am large"
    parent, _ = await functions.read(job_id, "default") or (None, None)
    assert parent is not None
    for member in found["members"]:
        child = (await flows.get(f"/v1/jobs/{member['job_id']}")).json()
        assert (child["parent"], child["lane"], child["status"]) == (job_id, "batch", "succeeded")
        view, _ = await functions.read(member["job_id"], "default") or (None, None)
        assert view is not None
        assert abs(view.deadline_ms - parent.deadline_ms) < 1_000
        key = functions._keys.of("job", view.job.id)
        assert await functions._client.hget(key, "priority") == b"-3"
    listed = (await flows.get("/v1/jobs")).json()["data"]
    assert {each["parent"] for each in listed} == {None, job_id}


async def test_a_moved_flow_moves_its_calls(flows: httpx.AsyncClient, fleet: Fleet) -> None:
    """Those under way to its lane and deadline, and those that come."""
    await fleet.stop_serving("small")
    job_id = await submitted(flows, job("pipe", lane="batch"))
    claimed = await fleet.workers["small"].claim()
    change = {"lane": "interactive", "deadline_s": 100}
    assert (await flows.patch(f"/v1/jobs/{job_id}", json=change)).status_code == 200

    async def has_moved() -> bool:
        call = (await flows.get(f"/v1/jobs/{claimed.job.id}")).json()
        left_s = call["timings"]["deadline_at"] - call["timings"]["queued_at"]
        return (call["lane"], 95 < left_s < 105) == ("interactive", True)

    await until(has_moved, 20)
    await fleet.workers["small"].run(claimed)
    assert (await ended(flows, job_id))["status"] == "succeeded"
    [later] = fleet.workers["large"].seen
    assert later.lane == "interactive"


async def test_a_cancelled_flow_cancels_its_calls(flows: httpx.AsyncClient, fleet: Fleet) -> None:
    await fleet.stop_serving("large")
    job_id = await submitted(flows, job("vote"))
    claimed = await fleet.workers["large"].claim()
    answer = await flows.post(f"/v1/jobs/{job_id}/cancel")
    assert answer.json()["status"] == "cancelled"
    assert await fleet.workers["large"].wait_until_ended(claimed) is JobStatus.CANCELLED
    found = await ended(flows, job_id)
    statuses = {m["model"]: m["status"] for m in found["members"]}
    assert statuses["large"] == "cancelled"


@pytest.mark.parametrize("is_by_filter", [False, True])
async def test_a_flow_that_nobody_runs_is_cancelled_with_its_calls(
    runner: subprocess.Popen[str], http: httpx.AsyncClient, fleet: Fleet, is_by_filter: bool
) -> None:
    """By the gateway that cancels it, because its log names them."""
    await fleet.stop_serving("large")
    await until_live(fleet, "cascade")
    await until_listed(http, {"cascade"})
    job_id = await submitted(http, job("cascade"))
    claimed = await fleet.workers["large"].claim()
    runner.kill()
    if is_by_filter:
        answer = await http.post("/v1/jobs/cancel", json={"model": "cascade"})
    else:
        answer = await http.post(f"/v1/jobs/{job_id}/cancel")
    assert answer.is_success, answer.text
    assert await fleet.workers["large"].wait_until_ended(claimed) is JobStatus.CANCELLED


async def test_a_flow_is_replayed_whole(flows: httpx.AsyncClient, fleet: Fleet) -> None:
    """Its calls are those of a new flow; those of the old one are not submitted again."""
    await fleet.stop_serving("small")
    job_id = await submitted(flows, job("pipe"))
    claimed = await fleet.workers["small"].claim()
    await flows.post(f"/v1/jobs/{job_id}/cancel")
    assert await fleet.workers["small"].wait_until_ended(claimed) is JobStatus.CANCELLED
    filters = {"status": "cancelled", "created_after": 1}
    answer = await flows.post("/v1/jobs/replay", json=filters)
    assert answer.status_code == 202, answer.text
    again = await fleet.workers["small"].claim()
    assert again.job.parent == replayed_id(job_id)
    await fleet.workers["small"].run(again)
    assert (await ended(flows, replayed_id(job_id)))["status"] == "succeeded"
    shown = (await flows.get(f"/v1/operations/{answer.json()['id']}")).json()
    assert (shown["matched"], shown["done"]) == (1, 1)


async def test_a_caller_who_leaves_takes_the_calls_along(
    flows: httpx.AsyncClient, fleet: Fleet
) -> None:
    await fleet.stop_serving("large")
    call = asyncio.create_task(flows.post(CHAT, json=chat("cascade")))
    claimed = await fleet.workers["large"].claim()
    call.cancel()
    assert await fleet.workers["large"].wait_until_ended(claimed) is JobStatus.CANCELLED


@pytest.mark.parametrize(
    ("flow", "failing", "text"),
    [("cascade", "small", "I am large"), ("vote", "small", "I am large"), ("pipe", "large", None)],
)
async def test_a_failed_call_fails_the_flow_unless_others_can_answer(
    flows: httpx.AsyncClient, fleet: Fleet, flow: str, failing: str, text: str | None
) -> None:
    await fleet.stop_serving(failing)
    job_id = await submitted(flows, job(flow))
    claimed = await fleet.workers[failing].claim()
    await fleet.workers[failing].finish(claimed, 1, ErrorCode.POISON, "it killed engines")
    found = await ended(flows, job_id)
    if text is not None:
        assert found["result"]["choices"][0]["message"]["content"] == text
        return
    assert found["status"] == "failed"
    error = found["error"]
    assert error == {"code": "poison", "message": "final: it killed engines"}
    call = asyncio.create_task(flows.post(CHAT, json=chat(flow)))
    claimed = await fleet.workers[failing].claim()
    await fleet.workers[failing].finish(claimed, 1, ErrorCode.POISON, "it killed engines")
    assert (await call).status_code == 500
    assert (await call).headers["x-batchway-models"] == "small, large"
    answer = await flows.post(CHAT, json={**chat(flow), "n": 2})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


async def test_a_flow_s_bill_is_that_of_its_calls(
    flows: httpx.AsyncClient, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """The flow alone reserves and is charged; nothing stays reserved."""
    job_id = await submitted(flows, job("vote"))
    found = await ended(flows, job_id)
    total = sum(call["usage"]["total_tokens"] for call in found["members"])
    assert found["usage"]["total_tokens"] == total
    assert int(await redis_client.hget(keys.of("job", job_id), "charge") or 0) == total
    assert await redis_client.hget(keys.of("tenant", "default"), "reserved") == b"0"


async def test_a_repeated_call_finds_its_flow(flows: httpx.AsyncClient, fleet: Fleet) -> None:
    body, headers = chat("cascade"), {"idempotency-key": "k"}
    first = await flows.post(CHAT, json=body, headers=headers)
    second = await flows.post(CHAT, json=body, headers=headers)
    assert first.json() == second.json()
    assert second.headers["x-batchway-models"] == "small, large"
    assert [len(fleet.workers[name].seen) for name in ("small", "large")] == [1, 1]


async def test_a_flow_is_refused_and_quoted_as_its_first_call(
    flows: httpx.AsyncClient, redis_client: redis.asyncio.Redis
) -> None:
    answer = await flows.post("/v1/quote", json=job("cascade"))
    assert answer.json()["model"] == "cascade"
    assert answer.json()["is_admitted"]
    await redis_client.delete("{bw:test:0}:workers:small")
    refused = await flows.post(CHAT, json=chat("cascade"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_workers")
    assert "'small'" in refused.json()["error"]["message"]
    assert await redis_client.keys("{bw:test:0}:wanted:*") == [b"{bw:test:0}:wanted:small:standard"]


@pytest.mark.parametrize("model", ["cascade", "nested"])
async def test_a_deleted_flow_takes_its_calls_along(flows: httpx.AsyncClient, model: str) -> None:
    """Also those of a flow within it."""
    job_id = await submitted(flows, job(model))
    await ended(flows, job_id)
    assert (await flows.delete(f"/v1/jobs/{job_id}")).status_code == 200
    assert (await flows.get("/v1/jobs")).json()["data"] == []


async def test_documents_are_for_flows(flows: httpx.AsyncClient) -> None:
    refused = await flows.post(CHAT, json={**chat("small"), "documents": ["a"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents")
    answer_of(await flows.post(CHAT, json={**chat("cascade"), "documents": ["a"]}))


async def test_a_stored_chat_of_a_flow_is_one(flows: httpx.AsyncClient, fleet: Fleet) -> None:
    """Its calls are none; a route's is found by the name that its answer has."""
    ids = {}
    for model in ("pipe", "vote", "by-tier"):
        ids[model] = (await flows.post(CHAT, json=chat(model, store=True))).json()["id"]
    listed = (await flows.get(CHAT)).json()["data"]
    assert [each["id"] for each in listed] == [*ids.values()]
    for model, id_ in ids.items():
        [found] = (await flows.get(CHAT, params={"model": model})).json()["data"]
        assert (found["id"], found["model"]) == (id_, model)
    assert (await flows.delete(f"{CHAT}/{ids['vote']}")).json()["deleted"] is True
    assert len((await flows.get(CHAT)).json()["data"]) == 2
