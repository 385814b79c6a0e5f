"""Operations on many jobs over HTTP: cancel and replay by filter, progress, rights."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.api_keys import Scope
from contract.function_types import Append, Submission
from contract.functions import Functions
from contract.jobs import Endpoint, Job, JobStatus, SamplingParams
from contract.keys import Keys, new_job_id
from contract.outbox import Outbox
from contract.payloads import open_store
from contract.payloads.encoding import with_prompts
from contract.replays import replayed_id
from infra.embedded_redis import EmbeddedRedis
from tests.batches.test_killed_gateway import gateway_process
from tests.contract.some_calls import dead_letter
from tests.fleet import until
from tests.gateway.conftest import Bearer, Gateways
from tests.gateway.fake_worker import LEASE_S, MODEL, FakeWorker
from tests.gateway.test_api_keys import code, fresh

pytestmark = pytest.mark.anyio

__all__ = ["fresh"]  # a fixture

BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab", "max_tokens": 20}
JOB: dict[str, Any] = {"endpoint": "/v1/completions", "lane": "batch", "body": BODY}


async def submit(http: httpx.AsyncClient, **fields: Any) -> str:
    answer = await http.post("/v1/jobs", json=JOB | fields)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def begin(http: httpx.AsyncClient, path: str, **filters: Any) -> dict[str, Any]:
    answer = await http.post(path, json=filters)
    assert answer.status_code == 202, answer.text
    begun: dict[str, Any] = answer.json()
    assert begun["status"] in ("running", "completed")
    return begun


async def ended(
    http: httpx.AsyncClient, begun: dict[str, Any], headers: dict[str, str] | None = None
) -> dict[str, Any]:
    """The operation once it has ended."""
    shown = begun

    async def has_ended() -> bool:
        answer = await http.get(f"/v1/operations/{begun['id']}", headers=headers)
        assert answer.status_code == 200, answer.text
        shown.update(answer.json())
        return bool(shown["status"] != "running")

    await until(has_ended)
    return shown


def counts(operation: dict[str, Any]) -> tuple[str, int, int, int]:
    return operation["status"], *(operation[name] for name in ("matched", "done", "failed"))


async def fail(functions: Functions, worker: FakeWorker) -> None:
    """The next job fails."""
    claimed = await worker.claim()
    end = Append(claimed.job.id, claimed.epoch, 1, fin=JobStatus.FAILED, code="engine_error")
    await functions.append(worker.incarnation, [end], lease_s=LEASE_S)


async def state(http: httpx.AsyncClient, job_id: str) -> str:
    return str((await http.get(f"/v1/jobs/{job_id}")).json()["status"])


async def test_jobs_are_cancelled_by_filter(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """202 with an operation, which counts what it did, and is listed."""
    kept = await submit(http, metadata={"run": "8"})
    meant = [await submit(http, metadata={"run": "7"}) for _ in range(30)]
    begun = await begin(http, "/v1/jobs/cancel", metadata={"run": "7"}, status="queued")
    assert (begun["object"], begun["kind"], begun["tenant"]) == ("operation", "cancel", "default")
    operation = await ended(http, begun)
    assert counts(operation) == ("completed", 30, 30, 0)
    assert operation["created_at"] <= operation["finished_at"]
    assert {await state(http, job_id) for job_id in meant} == {"cancelled"}
    assert await state(http, kept) == "queued"
    assert (await http.get("/v1/operations")).json()["data"] == [operation]
    answer = await http.post(f"/v1/operations/{begun['id']}/cancel")
    assert code(answer) == (409, "already_terminal")


async def test_failed_jobs_are_replayed_once(
    idle_worker: FakeWorker, http: httpx.AsyncClient, functions: Functions
) -> None:
    """With the same call, lane, priority and metadata; a second replay submits nothing."""
    body = JOB["body"] | {"priority": 5}
    failed = [await submit(http, body=body, metadata={"run": "7"}) for _ in range(12)]
    for _ in failed:
        await fail(functions, idle_worker)
    cancelled = await submit(http)
    await http.post(f"/v1/jobs/{cancelled}/cancel")
    for _ in range(2):
        operation = await ended(http, await begin(http, "/v1/jobs/replay", lane="batch"))
        assert counts(operation) == ("completed", 12, 12, 0)
        queued = (await http.get("/v1/jobs?status=queued&limit=100")).json()["data"]
        assert len(queued) == 12
    for job_id in failed:
        again = (await http.get(f"/v1/jobs/{replayed_id(job_id)}")).json()
        assert (again["lane"], again["metadata"]) == ("batch", {"run": "7"})
        key = idle_worker.keys.of("job", again["id"])
        assert await idle_worker.client.hget(key, "priority") == b"5"
    await idle_worker.run(await idle_worker.claim())
    assert idle_worker.seen[-1].params.max_tokens == 20
    done = (await http.get("/v1/jobs?status=succeeded")).json()["data"]
    assert len(done) == 1
    begun = await begin(http, "/v1/jobs/replay", status="cancelled", lane="batch")
    operation = await ended(http, begun)
    assert counts(operation) == ("completed", 1, 1, 0)
    assert await state(http, replayed_id(cancelled)) == "queued"


async def test_a_replay_waits_for_room(
    idle_worker: FakeWorker, http: httpx.AsyncClient, functions: Functions
) -> None:
    """A job that is refused for now is submitted later; the operation can be stopped meanwhile."""
    job_id = await submit(http)
    await fail(functions, idle_worker)
    await http.post("/v1/lanes/pause", json={"lane": "batch"})
    first = await begin(http, "/v1/jobs/replay", lane="batch")
    second = await begin(http, "/v1/jobs/replay", model=MODEL)
    stopped = (await http.post(f"/v1/operations/{first['id']}/cancel")).json()
    assert counts(stopped) == ("cancelled", 0, 0, 0)
    shown = (await http.get(f"/v1/operations/{second['id']}")).json()
    assert counts(shown) == ("running", 0, 0, 0)
    await http.post("/v1/lanes/resume", json={"lane": "batch"})
    assert counts(await ended(http, second)) == ("completed", 1, 1, 0)
    assert await state(http, replayed_id(job_id)) == "queued"


async def test_a_prompt_in_the_object_store_is_replayed(
    gateways: Gateways, idle_worker: FakeWorker, functions: Functions, tmp_path: Path
) -> None:
    """The new job has an object of its own. Without the old one the replay counts as failed."""
    body = BODY | {"prompt": "ab" * 100}
    async with gateways(object_store=str(tmp_path), object_min_bytes=64) as http:
        job_id, lost = [await submit(http, body=body) for _ in range(2)]
        for _ in range(2):
            await fail(functions, idle_worker)
        store = open_store(str(tmp_path))
        assert store is not None
        store.delete_job(lost)
        operation = await ended(http, await begin(http, "/v1/jobs/replay", lane="batch"))
        assert counts(operation) == ("completed", 2, 1, 1)
        assert (await http.delete(f"/v1/jobs/{job_id}")).status_code == 200
    claimed = await idle_worker.claim()
    assert claimed.job.id == replayed_id(job_id)
    assert claimed.job.stored_prompt is not None
    whole = with_prompts(claimed.job, store.get(claimed.job.stored_prompt.ref))
    assert len(whole.prompt_ids) == 200


async def test_dead_callbacks_are_replayed_by_filter(
    http: httpx.AsyncClient, functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Of one's own tenant, by default."""
    outbox = Outbox(redis_client, keys)
    meant = [await dead_letter(functions, outbox, tenant="default") for _ in range(3)]
    foreign = await dead_letter(functions, outbox, tenant="other")
    begun = await begin(http, "/v1/callbacks/dead/replay", status="cancelled")
    assert begun["kind"] == "replay_callbacks"
    assert counts(await ended(http, begun)) == ("completed", 3, 3, 0)
    due = await outbox.take(lease_s=10, max_messages=9, max_per_target=9)
    assert {each.job_id for each in due} == set(meant)
    assert [letter.record.job_id for letter in await outbox.dead("other")] == [foreign]
    begun = await begin(http, "/v1/callbacks/dead/replay", tenant="other", lane="standard")
    assert counts(await ended(http, begun)) == ("completed", 1, 1, 0)


@pytest.mark.parametrize(
    ("path", "body", "param", "refused"),
    [
        ("/v1/jobs/cancel", {}, None, (400, "missing_required_parameter")),
        ("/v1/jobs/cancel", {"status": "failed"}, "status", (400, "invalid_value")),
        ("/v1/jobs/replay", {"status": "queued"}, "status", (400, "invalid_value")),
        ("/v1/jobs/cancel", {"lane": "fast"}, "lane", (400, "invalid_value")),
        ("/v1/jobs/cancel", {"state": "queued"}, "state", (400, "unknown_parameter")),
        ("/v1/jobs/cancel", {"tenant": "a b"}, "tenant", (400, "invalid_value")),
        ("/v1/jobs/replay", {"created_before": "x"}, "created_before", (400, "invalid_value")),
        ("/v1/callbacks/dead/replay", {"tenant": "*"}, "tenant", (400, "invalid_value")),
    ],
)
async def test_a_wrong_filter_is_refused_by_name(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str, refused: tuple[int, str]
) -> None:
    """400, and nothing is begun: a misspelt filter would mean other jobs."""
    answer = await http.post(path, json=body)
    assert (code(answer), answer.json()["error"]["param"]) == (refused, param)
    assert (await http.get("/v1/operations")).json()["data"] == []


async def test_only_an_admin_reaches_other_tenants(
    fresh: httpx.AsyncClient, worker: FakeWorker, functions: Functions, bearer: Bearer
) -> None:
    """A key's lanes bound what it reaches; another tenant's operation does not exist."""
    acme, narrow = await bearer(), await bearer(lanes=("standard",))
    reader, other = await bearer(scopes=(Scope.JOBS_READ,)), await bearer("other")
    admin = await bearer("ops", scopes=(Scope.ADMIN,))
    await fresh.post("/v1/lanes/pause", json={"model": MODEL}, headers=admin)
    await fresh.post("/v1/lanes/resume", json={"model": MODEL}, headers=admin)

    async def cancel(headers: dict[str, str], **filters: Any) -> httpx.Response:
        return await fresh.post("/v1/jobs/cancel", json=filters, headers=headers)

    async def finished(headers: dict[str, str], **filters: Any) -> dict[str, Any]:
        answer = await cancel(headers, **filters)
        assert answer.status_code == 202, answer.text
        return await ended(fresh, answer.json(), headers)

    assert code(await cancel(reader, lane="batch")) == (403, "missing_scope")
    assert code(await cancel(acme, tenant="other")) == (403, "missing_scope")
    assert code(await cancel(acme, tenant="*")) == (403, "missing_scope")
    assert code(await cancel(narrow, lane="batch")) == (403, "lane_not_allowed")
    for tenant in ("acme", "acme", "other"):
        await functions.submit(job_of(tenant, "waits"), Submission(4, 600, 600))
    own = await finished(narrow, tenant="acme")
    assert own["matched"] == 0
    path = f"/v1/operations/{own['id']}"
    assert code(await fresh.get(path, headers=other)) == (404, "operation_not_found")
    assert code(await fresh.post(f"{path}/cancel", headers=other)) == (404, "operation_not_found")
    assert (await fresh.get(path, headers=admin)).status_code == 200
    assert counts(await finished(acme, lane="batch"))[1:] == (2, 2, 0)
    whole = await finished(admin, tenant="*")
    assert (whole["tenant"], *counts(whole)) == ("*", "completed", 1, 1, 0)


def job_of(tenant: str, model: str = MODEL) -> Job:
    """A job of a model that no worker runs, or of the fake one's."""
    return Job(
        id=new_job_id(),
        tenant=tenant,
        model=model,
        lane="batch",
        endpoint=Endpoint.COMPLETIONS,
        prompt_ids=(97,),
        params=SamplingParams(max_tokens=4, seed=0),
        created_s=0,
    )


@pytest.mark.e2e
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "num_jobs", [3_000, pytest.param(10_000, marks=[pytest.mark.campaign, pytest.mark.long])]
)
async def test_an_operation_outlives_the_gateway_that_works_on_it(
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    functions: Functions,
    keys: Keys,
    tmp_path: Path,
    num_jobs: int,
) -> None:
    """Thousands of jobs are cancelled by filter while the gateway is killed: another goes on, and
    all end, each once."""
    jobs = [job_of("default") for _ in range(num_jobs)]
    kept = job_of("default", "another")
    for start in range(0, num_jobs, 100):
        await asyncio.gather(
            *(functions.submit(job, Submission(4, 900, 900)) for job in jobs[start : start + 100])
        )
    await functions.submit(kept, Submission(4, 900, 900))
    url, store = redis_server.url, str(tmp_path)
    with (
        gateway_process(url, store) as (first, first_url),
        gateway_process(url, store) as (second, second_url),
    ):
        os.kill(second.pid, signal.SIGSTOP)  # so that the first one has the operation
        async with httpx.AsyncClient(timeout=20) as http:
            answer = await http.post(f"{first_url}/v1/jobs/cancel", json={"model": MODEL})
            assert answer.status_code == 202, answer.text
            operation_id = answer.json()["id"]

            async def num_done() -> int:
                raw: Any = await redis_client.hget(keys.of("operation", operation_id), "done")
                return int(raw)

            while await num_done() < 1000:  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.01)
            first.kill()
            first.wait()
            num_before = await num_done()
            assert 1000 <= num_before < num_jobs
            os.kill(second.pid, signal.SIGCONT)
        async with httpx.AsyncClient(base_url=second_url, timeout=20) as http:
            shown = await ended(http, answer.json())
    assert counts(shown) == ("completed", num_jobs, num_jobs, 0)
    for start in range(0, num_jobs, 100):
        some = jobs[start : start + 100]
        reads = await asyncio.gather(
            *(functions.read(job.id, "default", max_events=9) for job in some)
        )
        for read in reads:
            assert read is not None
            assert (read[0].status, len(read[1])) == (JobStatus.CANCELLED, 1), "one end each"
    read = await functions.read(kept.id, "default")
    assert read is not None
    assert read[0].status is JobStatus.QUEUED
