"""`batchway jobs list`, `show`, `cancel` and `delete` on a real Redis."""

import json

import pytest
import redis.asyncio

from contract.function_types import Append
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.contract.some_calls import claim, make_job, make_submission
from tests.infra.test_jobs_command import run_cli

pytestmark = pytest.mark.anyio


@pytest.mark.campaign
async def test_jobs_are_listed_cancelled_and_deleted(
    redis_server: EmbeddedRedis, functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """By id and tenant. Impossible commands exit with status 1."""
    first = make_job()
    await functions.submit(first, make_submission(metadata={"run": "7"}))
    [claimed] = await claim(functions)
    fin = Append(first.id, claimed.epoch, 1, fin=JobStatus.SUCCEEDED)
    await functions.append("w1", [fin], lease_s=10)
    second = make_job()
    await functions.submit(second, make_submission())
    of_tenant = ("--tenant", first.tenant)

    arguments = ("--metadata", "run=7", "--status", "succeeded", "--json", "-")
    status, out, _ = await run_cli(redis_server, "jobs", "list", *of_tenant, *arguments)
    assert (status, [job["id"] for job in json.loads(out)["jobs"]]) == (0, [first.id])
    status, out, _ = await run_cli(redis_server, "jobs", "list", *of_tenant)
    assert [line.split()[0] for line in out.splitlines()[1:]].count(second.id) == 1

    status, out, _ = await run_cli(redis_server, "jobs", "show", second.id, *of_tenant)
    assert "queued" in out
    status, _, err = await run_cli(redis_server, "jobs", "delete", second.id, *of_tenant)
    assert (status, "cancel it first" in err) == (1, True)
    status, _, _ = await run_cli(redis_server, "jobs", "cancel", second.id, *of_tenant)
    assert status == 0
    status, _, err = await run_cli(redis_server, "jobs", "cancel", first.id, *of_tenant)
    assert (status, "succeeded" in err) == (1, True)
    for job in (first, second):
        status, _, _ = await run_cli(redis_server, "jobs", "delete", job.id, *of_tenant)
        assert status == 0
    assert await redis_client.exists(keys.of("job", first.id), keys.of("jobs", first.tenant)) == 0
    status, _, err = await run_cli(redis_server, "jobs", "show", first.id, "--tenant", "another")
    assert (status, "has no job" in err) == (1, True)
