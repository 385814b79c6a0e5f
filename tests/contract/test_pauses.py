"""Pauses of lanes and tenants: what is refused, what waits, and in which order it goes on."""

import pytest
import redis.asyncio
from msgspec.structs import replace

from contract.errors import ErrorCode, JobRefused
from contract.function_types import Append, Blame, Release, Verdict, WorkerCapacity
from contract.functions import Functions
from contract.jobs import Job
from contract.keys import Keys
from contract.pauses import Line, PausedByOperator, Pauses, TooManyPauses
from tests.contract.some_calls import append, claim, make_job, make_submission, tokens

pytestmark = pytest.mark.anyio

PAUSES = (
    Line(lane="standard"),
    Line(model="m", lane="standard"),
    Line(tenant="t"),
    Line(model="m", tenant="t"),
    Line(lane="standard", tenant="t"),
    Line("m", "standard", "t"),
    Line(model="m"),
)
OTHERS = (Line(model="other"), Line(lane="interactive"), Line(tenant="u"), Line("m", "batch", "t"))


@pytest.fixture
def pauses(redis_client: redis.asyncio.Redis, keys: Keys) -> Pauses:
    return Pauses(redis_client, keys)


async def submitted(functions: Functions, number: int, **names: str) -> list[str]:
    jobs = [make_job(**names) for _ in range(number)]  # type: ignore[arg-type]
    for job in jobs:
        await functions.submit(job, make_submission(deadline_s=900))
    return [job.id for job in jobs]


async def claimed_ids(functions: Functions, max_jobs: int = 100) -> list[str]:
    return [each.job.id for each in await claim(functions, max_jobs=max_jobs, max_tokens=9999)]


@pytest.mark.parametrize("line", PAUSES, ids=str)
async def test_what_is_paused_waits_and_goes_on_in_order(
    functions: Functions, pauses: Pauses, line: Line
) -> None:
    """New jobs are refused, waiting ones are not claimed, running ones end, none is lost."""
    waiting = await submitted(functions, 5)
    [running] = await claim(functions, max_jobs=1)
    pause = await pauses.pause(line, "operator")
    assert await pauses.all() == [pause]

    for submit in (functions.submit, functions.quote):
        try:
            quote = await submit(make_job(), make_submission())
            refused = getattr(quote, "refusal", None)
        except JobRefused as exc:
            refused = exc
        assert refused is not None
        assert (refused.code, refused.retry_after_s) == (ErrorCode.LANE_PAUSED, 30.0)
    assert await claimed_ids(functions) == []
    item = Append(running.job.id, 1, 1, tokens(0, 7), 1)
    assert await append(functions, "w1", item) == [(Verdict.OK, 2)]

    assert await pauses.resume(line, "operator")
    assert await claimed_ids(functions) == waiting[1:]
    assert await submitted(functions, 1) == await claimed_ids(functions)
    assert not await pauses.resume(line, "operator")


@pytest.mark.parametrize("line", OTHERS, ids=str)
async def test_a_pause_holds_no_other_jobs(
    functions: Functions, pauses: Pauses, line: Line
) -> None:
    """Of another model, lane or tenant."""
    await pauses.pause(line, "operator")
    assert await submitted(functions, 2) == await claimed_ids(functions)


async def test_paused_jobs_that_were_given_back_hide_no_others(
    functions: Functions, pauses: Pauses
) -> None:
    """However many of a paused tenant wait in front."""
    paused = await submitted(functions, 40)
    others = await submitted(functions, 3, tenant="u")
    held = {each.job.id: each for each in await claim(functions, max_jobs=100, max_tokens=9999)}
    ordered = [held[job_id] for job_id in (*paused, *others)]
    await functions.release("w1", [Release(each.job.id, each.epoch, "drain") for each in ordered])
    await pauses.pause(Line(tenant="t"), "operator")
    assert await claimed_ids(functions) == others
    await pauses.resume(Line(tenant="t"), "operator")
    assert await claimed_ids(functions) == paused


async def test_many_paused_tenants_hide_no_other(functions: Functions, pauses: Pauses) -> None:
    """A claim looks at few tenants of a lane, paused ones not counted."""
    for number in range(20):
        await submitted(functions, 1, tenant=f"a{number}")
        await pauses.pause(Line(tenant=f"a{number}"), "operator")
    others = await submitted(functions, 1, tenant="z")
    assert await claimed_ids(functions) == others


async def test_a_suspect_of_a_paused_tenant_waits(functions: Functions, pauses: Pauses) -> None:
    """It also keeps no worker from its other jobs."""
    [suspect] = await submitted(functions, 1)
    await claim(functions)
    await functions.blame("w1", [Blame(suspect, 1, "{}")], max_crashes=2)
    await pauses.pause(Line(tenant="t"), "operator")
    others = await submitted(functions, 2, tenant="u")
    assert await claimed_ids(functions) == others


async def test_a_resumed_tenant_takes_turns_with_the_others(
    functions: Functions, pauses: Pauses
) -> None:
    """A pause saves up no credit: others do not wait for what the tenant has missed."""
    await submitted(functions, 20, tenant="t")
    await pauses.pause(Line(tenant="t"), "operator")
    await submitted(functions, 40, tenant="u")
    await claim(functions, max_jobs=20, max_tokens=9999)
    await claim(functions, max_jobs=1, max_tokens=9999)
    await pauses.resume(Line(tenant="t"), "operator")
    tenants = [each.job.tenant for each in await claim(functions, max_jobs=10, max_tokens=9999)]
    assert 4 <= tenants.count("t") <= 6, tenants


@pytest.mark.parametrize("line", [Line(lane="interactive"), Line(tenant="u")], ids=str)
async def test_other_lanes_do_not_wait_for_what_is_paused(
    functions: Functions, pauses: Pauses, line: Line
) -> None:
    """The predicted wait leaves it out."""
    capacity = WorkerCapacity(
        tokens_per_s=10, max_tokens=13, max_jobs=1, lanes=("interactive", "standard")
    )
    await functions.heartbeat("w1", "m", [], lease_s=10, info="{}", capacity=capacity)
    await submitted(functions, 50, tenant="u", lane="interactive")
    asked = make_job(), make_submission(deadline_s=900)
    before = (await functions.quote(*asked)).position
    await pauses.pause(line, "operator")
    after = (await functions.quote(*asked)).position
    assert (before.num_jobs_ahead, after.num_jobs_ahead) == (50, 0)
    assert (before.eta_s or 0) > 60 > (after.eta_s or 0)


async def test_a_call_of_a_flow_is_accepted_and_waits(functions: Functions, pauses: Pauses) -> None:
    """Its flow was accepted before the pause, and must be able to end."""
    await pauses.pause(Line(lane="standard"), "operator")
    call: Job = replace(make_job(), parent="job-0-" + "0" * 32)
    await functions.submit(call, make_submission())
    assert await claimed_ids(functions) == []
    await pauses.resume(Line(lane="standard"), "operator")
    assert await claimed_ids(functions) == [call.id]


async def test_a_tenant_cannot_end_the_pause_of_an_operator(pauses: Pauses) -> None:
    """An operator can end that of a tenant, and take it over."""
    line = Line(tenant="t")
    own = await pauses.pause(line, "tenant")
    assert own.by == "tenant"
    operators = await pauses.pause(line, "operator")
    assert (operators.by, operators.since_ms) == ("operator", own.since_ms)
    assert (await pauses.pause(line, "tenant")).by == "operator"
    with pytest.raises(PausedByOperator):
        await pauses.resume(line, "tenant")
    assert await pauses.resume(line, "operator")


async def test_tenants_cannot_fill_the_list_of_pauses(pauses: Pauses) -> None:
    """Each claim reads it. An operator can always pause."""
    for number in range(256):
        await pauses.pause(Line(model=f"m{number}", tenant="t"), "tenant")
    with pytest.raises(TooManyPauses):
        await pauses.pause(Line(tenant="t"), "tenant")
    await pauses.pause(Line(tenant="t"), "operator")


async def test_resuming_wakes_the_workers(
    functions: Functions, pauses: Pauses, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Of the pause's model, or of all models."""
    await redis_client.sadd(keys.of("models"), "m", "n")
    async with redis_client.pubsub() as pubsub:
        await pubsub.psubscribe(keys.of("wake", "*"))
        woken: list[str] = []
        for line in (Line(model="m", lane="batch"), Line(tenant="t")):
            await pauses.pause(line, "operator")
            await pauses.resume(line, "operator")
        while len(woken) < 3:
            message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=5)
            if message is not None:
                woken.append(message["channel"].decode().rpartition(":")[2])
    assert sorted(woken) == ["m", "m", "n"]
