"""`batchway jobs`, `lanes`, `callbacks dead replay` and `drain` on a real Redis."""

import asyncio
import json
from pathlib import Path

import pytest
import redis.asyncio

from contract.function_types import Append, Blame
from contract.functions import Functions
from contract.jobs import Job, JobStatus
from contract.keys import Keys
from contract.operations import Operations
from contract.outbox import Outbox
from contract.replays import replayed_id
from contract.roster import Roster
from infra.embedded_redis import EmbeddedRedis
from infra.jobs_command import Quarantine
from infra.preconditions import Failed
from tests.contract.some_calls import append, claim, dead_letter, make_job, make_submission
from tests.fakes import HashModelOptions
from tests.fleet import Caller, fleet, until
from tests.gateway.conftest import make_settings, running_gateway
from tests.infra.command_line import call_cli

pytestmark = pytest.mark.anyio

ABOUT = {"prompt_sha256": "ab12", "prompt_tokens": 3, "model": "m", "lane": "standard"}
OF_TENANT = ("--tenant", "t")


@pytest.fixture
def quarantine(redis_client: redis.asyncio.Redis, keys: Keys) -> Quarantine:
    return Quarantine(redis_client, keys)


@pytest.fixture
async def poison(functions: Functions) -> Job:
    """A quarantined job, on which several engines have died."""
    job = make_job()
    await functions.submit(job, make_submission(metadata={"colour": "blue"}))
    [claimed] = await claim(functions)
    blame = Blame(job.id, claimed.epoch, json.dumps(ABOUT))
    assert await functions.blame("w1", [blame], max_crashes=1) == [(JobStatus.FAILED, 0)]
    return job


async def run_cli(server: EmbeddedRedis, *arguments: str) -> tuple[int, str, str]:
    """Returns exit status, standard output and standard error."""
    own = ("--redis-url", server.url, "--namespace", "test")
    done = await asyncio.to_thread(call_cli, *arguments, *own)
    return done.returncode, done.stdout, done.stderr


async def test_deleted_jobs_cannot_be_run_again(
    quarantine: Quarantine, redis_client: redis.asyncio.Redis, keys: Keys, poison: Job
) -> None:
    """The quarantine record stays, with sizes and hashes."""
    await redis_client.delete(keys.of("job", poison.id))
    [record] = await quarantine.records()
    assert record.items() >= {"id": poison.id, **ABOUT, "can_run_again": False}.items()
    with pytest.raises(Failed, match="have expired"):
        await quarantine.requeue(poison.id)
    with pytest.raises(Failed):
        await quarantine.requeue("job-0-" + "0" * 32)


async def test_a_quarantined_job_is_shown_and_requeued_under_a_new_id(
    redis_server: EmbeddedRedis, functions: Functions, poison: Job, tmp_path: Path
) -> None:
    """In a table and as JSON, without any text of the job. The new one has the same content and
    seed; the old job stays failed, and a repetition does nothing."""
    quarantine = ("jobs", "quarantine")
    status, out, _ = await run_cli(redis_server, *quarantine, "list")
    assert status == 0
    assert poison.id in out.splitlines()[1]
    file = tmp_path / "out.json"
    for is_new in (True, False):
        requeue = (*quarantine, "requeue", poison.id, "--json", str(file))
        assert (await run_cli(redis_server, *requeue))[0] == 0
        done = json.loads(file.read_text())
        assert (done["requeued_as"], done["is_new"]) == (replayed_id(poison.id), is_new)
    [claimed] = await claim(functions, "w2")
    new = claimed.job
    assert new.id == replayed_id(poison.id) != poison.id
    assert (new.prompt_ids, new.params) == (poison.prompt_ids, poison.params)
    assert (new.tenant, claimed.attempt, claimed.is_alone) == (poison.tenant, 1, False)
    await append(functions, "w2", Append(new.id, claimed.epoch, 1, fin=JobStatus.SUCCEEDED))
    views = [await functions.read(job_id, "t") for job_id in (poison.id, new.id)]
    assert [view and view[0].status for view in views] == ["failed", "succeeded"]
    _, out, _ = await run_cli(redis_server, *quarantine, "show", poison.id, "--json", "-")
    shown = json.loads(out)
    assert (shown["requeued_as"], shown["prompt_sha256"]) == (new.id, "ab12")
    status, _, err = await run_cli(redis_server, *quarantine, "show", "nothing")
    assert (status, err) == (1, "batchway jobs: there is no 'nothing' in the quarantine\n")


@pytest.mark.e2e
async def test_the_command_drains_workers_and_waits(
    redis_server: EmbeddedRedis,
    functions: Functions,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
) -> None:
    """It shows the held jobs until the worker has left. No job is lost. A wrong name drains no
    worker."""
    roster = Roster(redis_client, keys)
    caller = Caller(functions, redis_client, keys)
    slow = HashModelOptions(step_s=0.05, eos_rate=0.0)
    async with fleet(redis_server.url, 1, slow, drain_s=3.0) as [worker]:
        job = await caller.submit("go on", max_tokens=480)
        await caller.has_output(job, 2)
        [there] = await roster.workers(["m"])
        both = ("--worker", there.incarnation, "--worker", "nobody")
        status, _, err = await run_cli(redis_server, "drain", *both)
        assert (status, "there is no worker nobody; nothing was changed" in err) == (1, True)
        assert not await roster.is_to_drain(there.incarnation)
        status, out, err = await run_cli(redis_server, "drain", "--all", "--wait")
        assert (status, out) == (0, "workers that have left: 1\n")
        assert "draining, jobs held: 1" in err
        assert err.splitlines()[-1].endswith("has left")
        view = await caller.view(job)
        assert (view.status, view.attempt) == (JobStatus.QUEUED, 0)
        assert await asyncio.to_thread(worker.wait, 20) == 0


@pytest.mark.campaign
async def test_lanes_are_paused_listed_and_resumed(
    redis_server: EmbeddedRedis, functions: Functions
) -> None:
    """What waits is claimed after the resume; a pause that does not exist exits with 1."""
    job = make_job()
    await functions.submit(job, make_submission())
    of_lane = ("--lane", "standard")
    status, out, _ = await run_cli(redis_server, "lanes", "pause", *of_lane)
    assert (status, out.strip()) == (0, "paused: lane standard, tenant all, model all")
    assert await claim(functions) == []
    status, out, _ = await run_cli(redis_server, "lanes", "list")
    assert out.splitlines()[1].split()[:3] == ["standard", "all", "all"]
    status, out, _ = await run_cli(redis_server, "lanes", "list", "--json", "-")
    assert [pause["lane"] for pause in json.loads(out)["pauses"]] == ["standard"]
    status, out, _ = await run_cli(redis_server, "lanes", "resume", *of_lane)
    assert status == 0
    assert [each.job.id for each in await claim(functions)] == [job.id]
    status, _, _ = await run_cli(redis_server, "lanes", "resume", *of_lane)
    assert status == 1
    status, _, err = await run_cli(redis_server, "lanes", "pause")
    assert (status, "--tenant" in err) == (2, True)


@pytest.mark.campaign
async def test_jobs_are_listed_cancelled_and_deleted(
    redis_server: EmbeddedRedis, functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """By id and tenant. Impossible commands exit with status 1."""
    first = make_job()
    await functions.submit(first, make_submission(metadata={"run": "7"}))
    [claimed] = await claim(functions)
    await append(functions, "w1", Append(first.id, claimed.epoch, 1, fin=JobStatus.SUCCEEDED))
    second = make_job()
    await functions.submit(second, make_submission())

    arguments = ("--metadata", "run=7", "--status", "succeeded", "--json", "-")
    status, out, _ = await run_cli(redis_server, "jobs", "list", *OF_TENANT, *arguments)
    assert (status, [job["id"] for job in json.loads(out)["jobs"]]) == (0, [first.id])
    status, out, _ = await run_cli(redis_server, "jobs", "list", *OF_TENANT)
    assert [line.split()[0] for line in out.splitlines()[1:]].count(second.id) == 1

    status, out, _ = await run_cli(redis_server, "jobs", "show", second.id, *OF_TENANT)
    assert "queued" in out
    status, _, err = await run_cli(redis_server, "jobs", "delete", second.id, *OF_TENANT)
    assert (status, "cancel it first" in err) == (1, True)
    status, _, _ = await run_cli(redis_server, "jobs", "cancel", second.id, *OF_TENANT)
    assert status == 0
    status, _, err = await run_cli(redis_server, "jobs", "cancel", first.id, *OF_TENANT)
    assert (status, "succeeded" in err) == (1, True)
    for job in (first, second):
        status, _, _ = await run_cli(redis_server, "jobs", "delete", job.id, *OF_TENANT)
        assert status == 0
    assert await redis_client.exists(keys.of("job", first.id), keys.of("jobs", first.tenant)) == 0
    status, _, err = await run_cli(redis_server, "jobs", "show", first.id, "--tenant", "another")
    assert (status, "has no job" in err) == (1, True)


async def submitted(functions: Functions, number: int, **metadata: str) -> list[str]:
    jobs = [make_job() for _ in range(number)]
    for job in jobs:
        await functions.submit(job, make_submission(metadata=metadata))
    return [job.id for job in jobs]


async def test_jobs_are_cancelled_by_filter_without_a_gateway(
    redis_server: EmbeddedRedis, functions: Functions
) -> None:
    """And only those: neither without a filter, nor together with an id."""
    meant, kept = await submitted(functions, 120, run="7"), await submitted(functions, 2)
    filters = ("--metadata", "run=7", "--status", "queued", "--newer-than", "600")
    status, out, _ = await run_cli(
        redis_server, "jobs", "cancel", *filters, *OF_TENANT, "--json", "-"
    )
    done = json.loads(out)
    assert (status, done["status"], done["matched"], done["done"]) == (0, "completed", 120, 120)
    for job_id in meant:
        found = await functions.read(job_id, "t")
        assert found is not None
        assert found[0].status is JobStatus.CANCELLED
    status, _, err = await run_cli(redis_server, "jobs", "cancel", *OF_TENANT, "--json", "-")
    assert (status, "at least one filter" in err) == (2, True)
    status, _, err = await run_cli(
        redis_server, "jobs", "cancel", kept[0], *filters, *OF_TENANT, "--json", "-"
    )
    assert (status, "not both" in err) == (2, True)
    assert len(await claim(functions)) == 2


async def test_failed_jobs_are_replayed_by_a_gateway(
    redis_server: EmbeddedRedis, functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """The command waits for one."""
    [job_id] = await submitted(functions, 1)
    await functions.cancel(job_id, "t")
    command = ("jobs", "replay", "--status", "cancelled", *OF_TENANT, "--json", "-")
    running = asyncio.create_task(run_cli(redis_server, *command))

    async def has_begun() -> bool:
        return bool(await redis_client.exists(keys.of("operations", "t")))

    await until(has_begun)
    with running_gateway(make_settings(redis_server.url)):
        status, out, err = await running
    assert (status, json.loads(out)["done"], "gateways" in err) == (0, 1, True)
    found = await functions.read(replayed_id(job_id), "t")
    assert found is not None
    assert found[0].status is JobStatus.QUEUED
    assert len(await Operations(redis_client, keys).of_owner("t")) == 1


async def test_dead_callbacks_are_replayed_by_filter(
    redis_server: EmbeddedRedis, functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    outbox = Outbox(redis_client, keys)
    for _ in range(3):
        await dead_letter(functions, outbox)
    command = ("callbacks", "dead", "replay", *OF_TENANT, "--json", "-")
    status, out, _ = await run_cli(redis_server, *command, "--lane", "standard")
    assert (status, json.loads(out)["done"]) == (0, 3)
    assert await outbox.dead("t") == []
    status, _, err = await run_cli(redis_server, *command)
    assert (status, "at least one filter" in err) == (2, True)
