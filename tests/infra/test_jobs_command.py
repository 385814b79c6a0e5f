"""`batchway jobs quarantine` and `batchway drain` on a real Redis."""

import asyncio
import json
from pathlib import Path

import pytest
import redis.asyncio

from contract.function_types import Append, Blame
from contract.functions import Functions
from contract.jobs import Job, JobStatus
from contract.keys import Keys
from contract.replays import replayed_id
from contract.roster import Roster
from infra.embedded_redis import EmbeddedRedis
from infra.jobs_command import Quarantine
from infra.preconditions import Failed
from tests.contract.some_calls import claim, make_job, make_submission
from tests.fakes import HashModelOptions
from tests.fleet import Caller, fleet
from tests.infra.command_line import call_cli

pytestmark = [pytest.mark.anyio, pytest.mark.e2e]

ABOUT = {"prompt_sha256": "ab12", "prompt_tokens": 3, "model": "m", "lane": "standard"}


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


async def test_a_quarantined_job_is_requeued_under_a_new_id(
    quarantine: Quarantine, functions: Functions, poison: Job
) -> None:
    """With the same content and seed. The old job stays failed, and a repetition does nothing."""
    first = await quarantine.requeue(poison.id)
    again = await quarantine.requeue(poison.id)
    assert (first.is_new, again.is_new) == (True, False)
    assert first.job_id == again.job_id == replayed_id(poison.id) != poison.id
    [claimed] = await claim(functions, "w2")
    new = claimed.job
    assert (new.prompt_ids, new.params, new.tenant) == (
        poison.prompt_ids,
        poison.params,
        poison.tenant,
    )
    assert (claimed.attempt, claimed.is_alone) == (1, False)
    await functions.append(
        "w2", [Append(new.id, claimed.epoch, 1, fin=JobStatus.SUCCEEDED)], lease_s=10.0
    )
    views = [await functions.read(job_id, "t") for job_id in (poison.id, new.id)]
    assert [view and view[0].status for view in views] == ["failed", "succeeded"]
    assert (await quarantine.find(poison.id))["requeued_as"] == new.id


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


async def test_the_command_lists_shows_and_requeues(
    redis_server: EmbeddedRedis, poison: Job, tmp_path: Path
) -> None:
    """In a table and as JSON, without any text of the job."""
    status, out, _ = await run_cli(redis_server, "jobs", "quarantine", "list")
    assert status == 0
    assert poison.id in out.splitlines()[1]
    file = tmp_path / "out.json"
    arguments = ("jobs", "quarantine", "requeue", poison.id, "--json", str(file))
    status, out, _ = await run_cli(redis_server, *arguments)
    assert (status, json.loads(file.read_text())["is_new"]) == (0, True)
    status, out, _ = await run_cli(
        redis_server, "jobs", "quarantine", "show", poison.id, "--json", "-"
    )
    shown = json.loads(out)
    assert shown["requeued_as"] == replayed_id(poison.id)
    assert shown["prompt_sha256"] == "ab12"
    status, _, err = await run_cli(redis_server, "jobs", "quarantine", "show", "nothing")
    assert (status, err) == (1, "batchway jobs: there is no 'nothing' in the quarantine\n")


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
