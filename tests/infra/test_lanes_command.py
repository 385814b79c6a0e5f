"""`batchway lanes` on a real Redis."""

import json

import pytest

from contract.functions import Functions
from infra.embedded_redis import EmbeddedRedis
from tests.contract.some_calls import claim, make_job, make_submission
from tests.infra.test_jobs_command import run_cli

pytestmark = pytest.mark.anyio


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
