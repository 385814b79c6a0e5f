"""The audit's findings name the key, the field, its value and the value by the records."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from contract.function_types import Append
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.contract.some_calls import append, claim, make_job, make_submission, tokens
from tests.oracle.audit import Audit

pytestmark = pytest.mark.anyio

KEYS = Keys("test")


@pytest.fixture
def client(redis_server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_server.url) as client:
        yield client


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


def finding(client: redis.Redis) -> str:
    """The audit's finding, or ''."""
    try:
        Audit(client, KEYS).check()
    except AssertionError as found:
        return str(found)
    return ""


async def test_half_a_record_is_a_finding_and_no_error(
    client: redis.Redis, functions: Functions
) -> None:
    """Whichever field of whichever record is missing or not a number."""
    jobs = await make_jobs(functions)
    assert finding(client) == ""
    for job_id in jobs.values():
        key = KEYS.of("job", job_id)
        fields: Any = client.hgetall(key)
        for raw_name, value in fields.items():
            name = raw_name.decode()
            client.hdel(key, name)
            found = finding(client)
            assert name not in ("state", "tenant", "cost", "epoch") or job_id in found, found
            client.hset(key, name, "nonsense")
            finding(client)
            client.hset(key, name, value)
    client.hdel(KEYS.of("job", jobs["waiting"]), "stream")
    wanted = f"job:{jobs['waiting']} stream: holds nothing, and every such record has it"
    assert finding(client) == wanted


# Planted errors and their findings; {waiting} and the others are ids.
PLANTED = {
    "a counter": (
        ("HSET", "counters:m:standard", "queued_jobs", "4"),
        "I11: counters: counters:m:standard queued_jobs: holds 4, the records say 1",
    ),
    "a line": (
        ("HSET", "line:m:standard:t", "tokens", "99"),
        "I11: lines: line:m:standard:t tokens: holds 99, the records say 13",
    ),
    "a reservation": (
        ("HSET", "tenant:t", "reserved", "7"),
        "I11: reservations: tenant:t reserved: holds 7, the records say 26",
    ),
    "a negative figure": (
        ("HSET", "tenant:t", "tokens", "-5"),
        "no figure is negative: tenant:t tokens: holds -5",
    ),
    "a tenant's list": (
        ("ZREM", "jobs:t", "{waiting}"),
        "I15: the lists of jobs: jobs:t {waiting}: holds 'nothing', the records say \\d+",
    ),
    "what is kept": (
        ("ZADD", "kept", "5", "job-0-none 0 t"),
        "I15: what will be forgotten: kept job-0-none 0 t: holds 5, the records say 'nothing'",
    ),
    "a lease": (
        ("ZREM", "leases", "{running}"),
        "I1: a running job: job:{running} has a lease: holds False, the records say True",
    ),
    "a deadline": (
        ("ZREM", "deadlines", "{waiting}"),
        "a deadline for each open job: deadlines {waiting}: holds 'nothing', the records say \\d+",
    ),
    "an owner's jobs": (
        ("SADD", "own:w1", "{ended}"),
        "I11: own:: own:w1 {ended}: holds 'it', the records say 'nothing'",
    ),
    "what runs without a record": (
        ("HSET", "run:w1", "job-0-none", "x"),
        "run:w1 job-0-none: there is no such record",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
async def test_planted_errors_are_named(
    client: redis.Redis, functions: Functions, name: str
) -> None:
    jobs = await make_jobs(functions)
    command, message = PLANTED[name]
    verb, key, *words = (word.format(**jobs) for word in command)
    client.execute_command(verb, f"{KEYS.tag}:{key}", *words)  # type: ignore[no-untyped-call]
    found = finding(client)
    wanted = re.escape(message.format(**jobs)).replace(re.escape("\\d+"), r"\d+")
    assert re.fullmatch(wanted, found), found
