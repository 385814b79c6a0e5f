"""Prompts that a gateway leaves to a worker: who gets them, how many wait, and what ends them."""

from typing import Any

import msgspec
import pytest
import redis.asyncio
from msgspec.structs import replace

from contract.errors import WireError
from contract.function_types import Append
from contract.functions import Functions
from contract.jobs import Job, JobStatus
from contract.keys import Keys
from contract.pauses import PauseLine, Pauses
from contract.residence import marks_of
from tests.clock import clock_key
from tests.contract.some_calls import make_job, make_submission, tokens

pytestmark = pytest.mark.anyio

MODEL, TENANT, LIVES_S = "m", "t", 60.0
IDS = tuple(range(300))


@pytest.fixture
async def job(functions: Functions) -> Job:
    """The worker w1 has computed its prompt."""
    await functions.heartbeat("w1", MODEL, [], lease_s=9.0, info="{}")
    job = replace(make_job(TENANT), prompt_ids=IDS[:200])
    await functions.submit(job, make_submission(marks=marks_of(job)))
    terms: dict[str, Any] = {"lease_s": 9.0, "max_jobs": 1, "max_tokens": 999}
    [claimed] = await functions.claim("w1", MODEL, [job.lane], **terms, prompt_token_s=1e-3)
    item = Append(job.id, claimed.epoch, 1, tokens(0, 7), 1, JobStatus.SUCCEEDED)
    await functions.append("w1", [item], lease_s=9.0)
    return job


async def leave(
    functions: Functions, job: Job, ids: tuple[int, ...] = IDS, *, lives_s: float = LIVES_S
) -> bool:
    return await functions.warm(replace(job, prompt_ids=ids), 200, lives_s=lives_s)


async def taken(functions: Functions, worker: str = "w1") -> tuple[int, ...] | None:
    found = await functions.warm_take(worker, MODEL, [])
    return None if found is None else found[1][2]


async def test_the_worker_that_holds_the_beginning_gets_it_once(
    functions: Functions, job: Job
) -> None:
    """And no other, with what is computed and how long it lives."""
    await leave(functions, job)
    assert await taken(functions, "w2") is None
    found = await functions.warm_take("w1", MODEL, [])
    assert found is not None
    assert found[1] == (TENANT, 200, IDS)
    assert 0.0 < found[0] <= LIVES_S
    assert await taken(functions) is None


async def test_what_nobody_holds_is_left_to_nobody(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys, job: Job
) -> None:
    """Another tenant's equal prompt, one that begins otherwise, one of a worker that has left, one
    that is too long: no key is written."""
    await leave(functions, replace(job, tenant="other"))
    await leave(functions, job, IDS[::-1])
    await leave(functions, job, IDS * 2000)
    await functions.leave("w1", MODEL)
    await leave(functions, job)
    assert not [key async for key in redis_client.scan_iter(keys.of("warm*"))]


async def test_the_last_eight_wait_and_end_with_the_last(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys, job: Job
) -> None:
    """The oldest are dropped."""
    prompts = [(*IDS, number) for number in range(12)]
    for prompt in prompts:
        await leave(functions, job, prompt)
    assert await redis_client.llen(keys.of("warm", "w1")) == 8
    assert 0 < await redis_client.pttl(keys.of("warm", "w1")) <= 1000 * LIVES_S
    assert [await taken(functions) for _ in prompts] == [*prompts[4:], *[None] * 4]


async def test_one_that_has_ended_is_passed_over(
    functions: Functions, redis_client: redis.asyncio.Redis, job: Job
) -> None:
    """Also while a younger one keeps the list."""
    await leave(functions, job, lives_s=5.0)
    await leave(functions, job, (*IDS, 7))
    await redis_client.set(clock_key(), 5_001)
    assert await taken(functions) == (*IDS, 7)
    assert await taken(functions) is None


@pytest.mark.parametrize(
    "line", [PauseLine(tenant=TENANT), PauseLine(lane="standard"), PauseLine(MODEL, "*", TENANT)]
)
async def test_a_pause_ends_it(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys, job: Job, line: PauseLine
) -> None:
    """One that came after it was left."""
    await leave(functions, job)
    await Pauses(redis_client, keys).pause(line, "operator")
    assert await taken(functions) is None


@pytest.mark.parametrize(
    ("tokens", "used", "is_wasted"),
    [(8191, 0, False), (8192, 819, True), (8192, 820, False), (10**6, 10**5, False)],
)
async def test_a_tenant_of_whose_warmed_tokens_few_are_of_use_is_told_of(
    functions: Functions, job: Job, tokens: int, used: int, is_wasted: bool
) -> None:
    """Summed over calls and workers, once there are enough, of the last hour; by tenant."""
    await functions.warm_take("w1", MODEL, [TENANT, tokens - 100, 0, "other", 10**6, 0])
    await functions.warm_take("w2", MODEL, [TENANT, 100, used])
    assert await leave(functions, job) is is_wasted


async def test_damaged_entries_cost_themselves_alone(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys, job: Job
) -> None:
    """No function raises after its first write; what a worker cannot read is a WireError."""
    packed = msgspec.msgpack.encode([TENANT, "standard", 2**50, "nothing"])
    for entry in (b"", b"\xc1", msgspec.msgpack.encode(7), msgspec.msgpack.encode(["t"]), packed):
        await redis_client.rpush(keys.of("warm", "w1"), entry)
    await leave(functions, job)
    with pytest.raises(WireError):
        await taken(functions)
    assert await taken(functions) == IDS
