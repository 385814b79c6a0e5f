"""The benchmark of the Redis functions, and the number of Redis commands that a step needs."""

import json
from pathlib import Path

import pytest
import redis.asyncio

from bench.redis_functions import main, make_job, step_of
from contract.function_types import Submission
from contract.functions import Functions

_TERMS = Submission(max_output_tokens=100, deadline_s=600, retention_s=60)


async def num_commands(functions: Functions, client: redis.asyncio.Redis, num_jobs: int) -> int:
    """The number of Redis commands for a step of this many jobs, all past their first token."""
    ids = set()
    for index in range(num_jobs):
        job = make_job(index)
        await functions.submit(job, _TERMS)
        ids.add(job.id)
    claimed = await functions.claim(
        "w", "m", ["standard"], lease_s=600, max_jobs=num_jobs, max_tokens=10**9
    )
    assert {c.job.id for c in claimed} == ids
    await functions.append("w", step_of(claimed, 1), lease_s=600)
    await client.config_resetstat()
    await functions.append("w", step_of(claimed, 2), lease_s=600)
    stats = await client.info("commandstats")
    calls: dict[str, int] = {name: found["calls"] for name, found in stats.items()}
    return sum(calls.values()) - calls["cmdstat_config|resetstat"]


@pytest.mark.anyio
async def test_a_step_needs_two_redis_commands_per_job(
    functions: Functions, redis_client: redis.asyncio.Redis
) -> None:
    """Append and publish. Progress, leases and counters are read and written for all jobs at
    once."""
    few = await num_commands(functions, redis_client, 4)
    many = await num_commands(functions, redis_client, 12)
    assert many - few == 2 * 8


@pytest.mark.parametrize(
    ("function", "names"), [("append", ["append"]), ("submit", ["submit", "read"])]
)
def test_the_command_reports_each_number_of_jobs(
    function: str, names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a table and as JSON. With `submit`, jobs are also read."""
    out = tmp_path / "out.json"
    main([function, "--calls", "4", "--jobs", "1", "9", "--json", str(out)])
    found = json.loads(out.read_text())
    assert [(f["num_jobs"], f["function"]) for f in found] == [
        (num_jobs, name) for num_jobs in (1, 9) for name in names
    ]
    assert all(f["function_ms"] > 0 and f["p50_ms"] <= f["p99_ms"] for f in found)
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(found)
