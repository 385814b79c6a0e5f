"""`batchway check` compares counters and lists with the jobs' records, and repairs them."""

import asyncio
from typing import Any

import pytest
import redis.asyncio

from contract.function_types import Append
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from infra.check_command import differences, repair
from infra.cli import main
from infra.embedded_redis import EmbeddedRedis
from tests.contract.some_calls import append, claim, make_job, make_submission, tokens

pytestmark = pytest.mark.anyio


async def make_jobs(functions: Functions) -> dict[str, str]:
    """Ids of three jobs: ended, running and waiting."""
    jobs = [make_job() for _ in range(3)]
    for job in jobs:
        await functions.submit(job, make_submission())
    ended, running = await claim(functions, max_jobs=2)
    for item in (ended, running):
        fin: Any = JobStatus.SUCCEEDED if item is ended else ""
        say = Append(item.job.id, item.epoch, item.next_number, tokens(0, 1, 2), 2, fin)
        await append(functions, "w1", say)
    return {"ended": ended.job.id, "running": running.job.id, "waiting": jobs[2].id}


# Planted errors; then each difference: key, field, value, value by the records ('*': any).
PLANTED: dict[str, tuple[str, list[str]]] = {
    "a lane's waiting jobs": (
        "HSET counters:m:standard queued_jobs 4",
        ["counters:m:standard queued_jobs 4 1"],
    ),
    "what running jobs have done": (
        "HINCRBY counters:m:standard done_tokens 3",
        ["counters:m:standard done_tokens 8 5"],
    ),
    "a line that was lost": (
        "DEL line:m:standard:t",
        ["line:m:standard:t jobs 0 1", "line:m:standard:t tokens 0 13"],
    ),
    "a reservation": ("HINCRBY tenant:t reserved 7", ["tenant:t reserved 33 26"]),
    "a job that its tenant cannot list": (
        "ZREM jobs:t {waiting}",
        ["jobs:t {waiting} None *"],
    ),
    "a job that never was": ("ZADD deadlines 9 job-0-none", ["deadlines job-0-none 9 None"]),
    "a job that would never expire": (
        "ZREM deadlines {waiting}",
        ["deadlines {waiting} None *"],
    ),
    "a lease": ("ZREM leases {running}", ["leases {running} None 0"]),
    "an owner's jobs": ("SREM own:w1 {running}", ["own:w1 {running} None 0"]),
    "an ended job that would be kept for ever": ("DEL kept", ["kept {ended}_0_t None *"]),
}


@pytest.mark.parametrize("name", PLANTED)
async def test_a_difference_is_shown_and_repaired(
    name: str, functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    jobs = await make_jobs(functions)
    assert await differences(redis_client, keys) == {}
    command, wanted = PLANTED[name]
    verb, key, *words = command.format(**jobs).split()
    planted: Any = redis_client.execute_command  # redis-py leaves it untyped
    await planted(verb, f"{keys.tag}:{key}", *words)
    found = await differences(redis_client, keys)
    rows = sorted(f"{k} {f.replace(' ', '_')} {h} {r}" for (k, f), (h, r) in found.items())
    for row, expected in zip(rows, sorted(w.format(**jobs) for w in wanted), strict=True):
        assert row == expected or row.startswith(expected.removesuffix("*")), rows
    for place, values in found.items():
        await repair(redis_client, keys, *place, *values)
    assert await differences(redis_client, keys) == {}


async def test_the_command_shows_what_stays_different(
    functions: Functions,
    redis_client: redis.asyncio.Redis,
    redis_server: EmbeddedRedis,
    keys: Keys,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It ends with 1 where anything differs, and with 0 after the repair."""
    await make_jobs(functions)
    await redis_client.hset(keys.of("counters", "m", "standard"), "queued_jobs", 4)
    command = ["check", f"--redis-url={redis_server.url}", f"--namespace={keys.namespace}"]

    async def run(*more: str) -> int:
        return await asyncio.to_thread(main, [*command, *more])

    assert await run() == 1
    assert "counters:m:standard queued_jobs: holds 4, the records say 1" in capsys.readouterr().out
    assert await run("--repair") == 1
    assert await run() == 0
    assert capsys.readouterr().out.endswith("differences: 0\n")
