"""Claims prefer the workers that hold a job's prefix or its session, for a bounded time."""

import random
from typing import Any, Literal

import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from contract.function_types import Append, Claims, WorkerCapacity, WorkerState
from contract.functions import Functions
from contract.jobs import Job, JobStatus
from contract.keys import Keys
from contract.residence import MARK_BYTES, mark_positions, marks_of, prefix_marks, session_mark
from tests.contract.some_calls import LEASE_S, make_job, make_submission, pass_time, tokens

pytestmark = pytest.mark.anyio

PLACES = 4
TOKEN_S = 1e-3  # of a prompt
LONGEST_S = 2.0  # that a job is left
HELD = range(400)  # a prompt that some worker has computed


def job_of(prompt: range | tuple[int, ...], session: str = "", tenant: str = "t") -> Job:
    return replace(make_job(tenant), prompt_ids=tuple(prompt), session=session)


async def submit(functions: Functions, job: Job, **terms: Any) -> Job:
    await functions.submit(job, make_submission(marks=marks_of(job), **terms))
    return job


async def beat(functions: Functions, worker: str, state: WorkerState = "up") -> None:
    capacity = WorkerCapacity(100.0, 10.0, 100_000, PLACES, ("interactive", "standard"))
    await functions.heartbeat(
        worker,
        "m",
        [],
        lease_s=LEASE_S,
        info="{}",
        state=state,
        capacity=capacity,
        counted={},
    )


async def claim(functions: Functions, worker: str, most: int = 1, *, keeps: bool = True) -> Claims:
    return await functions.claim(
        worker,
        "m",
        ["interactive", "standard"],
        lease_s=LEASE_S,
        max_jobs=most,
        max_tokens=100_000,
        prompt_token_s=TOKEN_S if keeps else None,
    )


async def run(functions: Functions, worker: str, job: Job, *, keeps: bool = True) -> None:
    """Runs a job at a worker to its end."""
    await submit(functions, job)
    [claimed] = await claim(functions, worker, keeps=keeps)
    assert claimed.job.id == job.id
    held = prefix_marks(job.tenant, (*job.prompt_ids, 7)) if keeps else b""
    for item in (
        Append(job.id, 1, 1, tokens(0, 7), 1),
        Append(job.id, 1, 2, tokens(1, 8), 1, JobStatus.SUCCEEDED, held=held),
    ):
        await functions.append(worker, [item], lease_s=LEASE_S)


def ids(claimed: Claims) -> list[str]:
    return [each.job.id for each in claimed]


@pytest.fixture
async def workers(functions: Functions) -> tuple[str, str]:
    """The first holds HELD."""
    for worker in ("a", "b"):
        await beat(functions, worker)
    await run(functions, "a", job_of(HELD))
    return "a", "b"


@given(st.lists(st.integers(0, 2**31), max_size=700), st.integers(0, 700))
def test_equal_beginnings_have_equal_marks(token_ids: list[int], num: int) -> None:
    whole, start = prefix_marks("t", token_ids), prefix_marks("t", token_ids[:num])
    assert whole.startswith(start)
    other = [*token_ids[:num], -1, *token_ids[num + 1 :]]
    num_equal = next(
        (i for i, position in enumerate(mark_positions()) if position > min(num, len(token_ids))), 0
    )
    assert prefix_marks("t", other)[: MARK_BYTES * num_equal] == whole[: MARK_BYTES * num_equal]
    if len(whole) > MARK_BYTES * num_equal and num < len(token_ids):
        assert prefix_marks("t", other) != whole


def test_tenants_have_other_marks() -> None:
    """Also where one's name begins as another's, followed by what it says."""
    marks = {prefix_marks(tenant, HELD) for tenant in ("t", "u", "t\0", "")}
    marks |= {session_mark(*pair) for pair in (("t", "us"), ("tu", "s"), ("u", "s"), ("t", "s"))}
    assert len(marks) == 8


async def test_a_job_goes_to_the_worker_that_holds_its_beginning(
    functions: Functions, workers: tuple[str, str]
) -> None:
    job = await submit(functions, job_of((*HELD, 9, 9)))
    assert ids(await claim(functions, "b")) == []
    assert ids(await claim(functions, "a")) == [job.id]


async def test_a_quote_tells_what_is_likely_found(
    functions: Functions, workers: tuple[str, str]
) -> None:
    for job, num_found in ((job_of((*HELD, 9)), 384), (job_of(HELD, tenant="u"), 0)):
        quote = await functions.quote(job, make_submission(marks=marks_of(job)))
        assert quote.num_cached_tokens == num_found


async def test_it_waits_no_longer_than_it_saves(
    functions: Functions, workers: tuple[str, str], redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    job = await submit(functions, job_of((*HELD, 9, 9)))
    left = await claim(functions, "b")
    assert left.again_s == pytest.approx(384 * TOKEN_S, abs=0.002)
    await pass_time(redis_client, keys, 0.3)
    assert ids(await claim(functions, "b")) == []
    await pass_time(redis_client, keys, 0.1)
    assert ids(await claim(functions, "b")) == [job.id]


@pytest.mark.parametrize("how", ["loading", "draining", "gone", "full", "silent"])
async def test_nothing_waits_for_a_worker_without_room(
    functions: Functions,
    workers: tuple[str, str],
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    how: Literal["loading", "draining", "gone", "full", "silent"],
) -> None:
    if how == "full":
        for _ in range(PLACES):
            await submit(functions, job_of(HELD))
        assert len(await claim(functions, "a", PLACES)) == PLACES
    elif how == "silent":
        await pass_time(redis_client, keys, 16.0)
        await beat(functions, "b")
    else:
        await beat(functions, "a", state=how)
    job = await submit(functions, job_of((*HELD, 9)))
    assert ids(await claim(functions, "b")) == [job.id]


async def test_nothing_waits_for_a_worker_that_is_much_fuller(
    functions: Functions, workers: tuple[str, str]
) -> None:
    """By more than half of its places, times the share that is found."""
    for _ in range(2):
        await submit(functions, job_of(HELD))
    assert len(await claim(functions, "a", 2)) == 2
    short = await submit(functions, job_of((*HELD, *range(1000, 2000))))
    assert ids(await claim(functions, "b")) == [short.id]


@pytest.mark.parametrize("num_prompt", [3, 400])
async def test_a_session_prefers_one_worker(
    functions: Functions, workers: tuple[str, str], num_prompt: int
) -> None:
    """From the claim on, so that a flow's calls, which come at once, meet. Others' sessions of the
    same name are not it."""
    prompts = [range(5000 + 500 * i, 5000 + 500 * i + num_prompt) for i in range(3)]
    first = await submit(functions, job_of(prompts[0], "s"))
    assert ids(await claim(functions, "b")) == [first.id]
    second = await submit(functions, job_of(prompts[1], "s"))
    assert ids(await claim(functions, "a")) == []
    assert ids(await claim(functions, "b")) == [second.id]
    other = await submit(functions, job_of(prompts[2], "s", tenant="u"))
    assert ids(await claim(functions, "a")) == [other.id]


async def test_what_is_computed_is_known_from_the_first_token(
    functions: Functions, workers: tuple[str, str]
) -> None:
    """Also of a job that is then cancelled."""
    prompt = range(7000, 7300)
    job = await submit(functions, job_of(prompt))
    [claimed] = await claim(functions, "b")
    await functions.append(
        "b", [Append(job.id, claimed.epoch, 1, tokens(0, 7), 1)], lease_s=LEASE_S
    )
    await functions.cancel(job.id, job.tenant)
    again = await submit(functions, job_of((*prompt, 1)))
    assert ids(await claim(functions, "a")) == []
    assert ids(await claim(functions, "b")) == [again.id]


async def test_a_worker_that_keeps_no_prefixes_is_not_preferred(functions: Functions) -> None:
    for worker in ("a", "b"):
        await beat(functions, worker)
    await run(functions, "a", job_of(HELD), keeps=False)
    job = await submit(functions, job_of((*HELD, 9)))
    assert ids(await claim(functions, "b")) == [job.id]


async def test_one_tenants_prompt_tells_another_nothing(
    functions: Functions, workers: tuple[str, str]
) -> None:
    job = await submit(functions, job_of(HELD, tenant="u"))
    assert ids(await claim(functions, "b")) == [job.id]


async def test_of_a_tenants_jobs_those_go_first_that_the_worker_holds(
    functions: Functions, workers: tuple[str, str]
) -> None:
    """Where the others' worker has no room; each is passed over a few times at most."""
    for _ in range(PLACES):
        await submit(functions, job_of(HELD))
    await claim(functions, "a", PLACES)
    await run(functions, "b", job_of(range(9000, 9400)))
    behind = await submit(functions, job_of((*HELD, 1)))
    passed = 0
    while True:
        own = await submit(functions, job_of((*range(9000, 9400), passed)))
        [claimed] = ids(await claim(functions, "b"))
        if claimed == behind.id:
            break
        assert claimed == own.id
        passed += 1
        item = Append(own.id, 1, 1, tokens(0, 7), 1, JobStatus.SUCCEEDED)
        await functions.append("b", [item], lease_s=LEASE_S)
    assert passed == 8


@pytest.mark.parametrize("order", ["priority", "deadline"])
async def test_what_a_tenant_wants_first_goes_before_what_is_held(
    functions: Functions, workers: tuple[str, str], order: str
) -> None:
    urgent: dict[str, Any] = {"priority": -1} if order == "priority" else {"deadline_s": 10.0}
    held = await submit(functions, job_of((*HELD, 1)))
    first = await submit(functions, job_of(range(3000, 3300)), **urgent)
    assert ids(await claim(functions, "a", 2)) == [first.id, held.id]


async def test_hints_are_bounded(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """In age, and in number: others give way to new ones."""
    for worker in ("a", "b"):
        await beat(functions, worker)
    await run(functions, "a", job_of(HELD))
    await pass_time(redis_client, keys, 11 * 60.0)
    for worker in ("a", "b"):
        await beat(functions, worker)
    job = await submit(functions, job_of(HELD))
    assert ids(await claim(functions, "b")) == [job.id]
    key = keys.of("at", "m")
    await redis_client.hset(key, mapping={f"{i:08}": "1 a" for i in range(100_000)})
    for number in range(20):
        await run(functions, "a", job_of(range(number, 400 + number)))
    assert await redis_client.hlen(key) < 100_020
    job = await submit(functions, job_of(range(19, 419)))
    assert ids(await claim(functions, "b")) == []


@pytest.mark.parametrize("seed", range(12))
async def test_every_job_is_claimed_within_the_bound(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys, seed: int
) -> None:
    """Whatever is submitted, claimed, ended and lost: no job is left to others for longer than the
    bound by a worker with room that comes again when it was told to, and none is lost."""
    rng = random.Random(seed)
    names, running = ["a", "b", "c"], dict[str, tuple[str, int]]()
    left_s, waiting = dict[str, float](), dict[str, Job]()
    now_s = 0.0
    for worker in names:
        await beat(functions, worker)
    for _ in range(150):
        match rng.choice(["submit", "submit", "claim", "claim", "claim", "end", "end", "pass"]):
            case "submit" if len(waiting) < 20:
                base = 1000 * rng.randrange(4)
                prompt = (*range(base, base + rng.choice([10, 100, 400])), rng.randrange(3))
                session = rng.choice(["", "", "x", "y"])
                job = await submit(functions, job_of(prompt, session, rng.choice("tu")))
                waiting[job.id] = job
            case "claim":
                worker, most = rng.choice(names), rng.randint(1, 2)
                claimed = await claim(functions, worker, most)
                for each in claimed:
                    running[each.job.id] = worker, each.epoch
                    del waiting[each.job.id]
                    left_s.pop(each.job.id, None)
                if len(claimed) < most:  # it has left all others
                    for job_id in waiting:
                        assert now_s - left_s.setdefault(job_id, now_s) <= LONGEST_S
            case "end" if running:
                job_id, (worker, epoch) = rng.choice(sorted(running.items()))
                del running[job_id]
                item = Append(job_id, epoch, 1, tokens(0, 7), 1, JobStatus.SUCCEEDED)
                await functions.append(worker, [item], lease_s=LEASE_S)
            case "pass":
                elapsed_s = rng.choice([0.05, 0.5, 1.0])
                await pass_time(redis_client, keys, elapsed_s)
                now_s += elapsed_s
                for worker in names:
                    await beat(functions, worker)
    for _ in range(2 * len(waiting) + 1):
        claimed = await claim(functions, "a", 5)
        for each in claimed:
            del waiting[each.job.id]
        if claimed.again_s is not None:
            assert 0 < claimed.again_s <= LONGEST_S
            await pass_time(redis_client, keys, claimed.again_s + 0.001)
    assert not waiting
