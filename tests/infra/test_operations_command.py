"""`batchway jobs cancel` and `replay`, and `callbacks dead replay`, by filter on a real Redis."""

import asyncio
import json

import pytest
import redis.asyncio

from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from contract.operations import Operations
from contract.outbox import Outbox
from contract.replays import replayed_id
from infra.embedded_redis import EmbeddedRedis
from tests.contract.some_calls import claim, dead_letter, make_job, make_submission
from tests.fleet import until
from tests.gateway.conftest import make_settings, running_gateway
from tests.infra.test_jobs_command import run_cli

pytestmark = pytest.mark.anyio

OF_TENANT = ("--tenant", "t", "--json", "-")


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
    status, out, _ = await run_cli(redis_server, "jobs", "cancel", *filters, *OF_TENANT)
    done = json.loads(out)
    assert (status, done["status"], done["matched"], done["done"]) == (0, "completed", 120, 120)
    for job_id in meant:
        found = await functions.read(job_id, "t")
        assert found is not None
        assert found[0].status is JobStatus.CANCELLED
    status, _, err = await run_cli(redis_server, "jobs", "cancel", *OF_TENANT)
    assert (status, "at least one filter" in err) == (2, True)
    status, _, err = await run_cli(redis_server, "jobs", "cancel", kept[0], *filters, *OF_TENANT)
    assert (status, "not both" in err) == (2, True)
    assert len(await claim(functions)) == 2


async def test_failed_jobs_are_replayed_by_a_gateway(
    redis_server: EmbeddedRedis, functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """The command waits for one."""
    [job_id] = await submitted(functions, 1)
    await functions.cancel(job_id, "t")
    command = ("jobs", "replay", "--status", "cancelled", *OF_TENANT)
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
    """Without a gateway, too."""
    outbox = Outbox(redis_client, keys)
    for _ in range(3):
        await dead_letter(functions, outbox)
    command = ("callbacks", "dead", "replay", *OF_TENANT)
    status, out, _ = await run_cli(redis_server, *command, "--lane", "standard")
    assert (status, json.loads(out)["done"]) == (0, 3)
    assert await outbox.dead("t") == []
    status, _, err = await run_cli(redis_server, *command)
    assert (status, "at least one filter" in err) == (2, True)
