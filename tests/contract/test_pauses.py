"""Pauses of lanes and tenants: what is refused, what waits, and in which order it goes on."""

import pytest
import redis.asyncio
from msgspec.structs import replace

from contract.functions import Functions
from contract.jobs import Job
from contract.keys import Keys
from contract.pauses import PausedByOperator, PauseLine, Pauses, TooManyPauses
from tests.contract.some_calls import claim, make_job, make_submission

pytestmark = pytest.mark.anyio


@pytest.fixture
def pauses(redis_client: redis.asyncio.Redis, keys: Keys) -> Pauses:
    return Pauses(redis_client, keys)


async def claimed_ids(functions: Functions) -> list[str]:
    return [each.job.id for each in await claim(functions)]


async def test_many_paused_tenants_hide_no_other(functions: Functions, pauses: Pauses) -> None:
    """A claim looks at few tenants of a lane, paused ones not counted."""
    for number in range(20):
        await functions.submit(make_job(f"a{number}"), make_submission())
        await pauses.pause(PauseLine(tenant=f"a{number}"), "operator")
    other = make_job("z")
    await functions.submit(other, make_submission())
    assert await claimed_ids(functions) == [other.id]


async def test_a_call_of_a_flow_is_accepted_and_waits(functions: Functions, pauses: Pauses) -> None:
    """Its flow was accepted before the pause, and must be able to end."""
    await pauses.pause(PauseLine(lane="standard"), "operator")
    call: Job = replace(make_job(), parent="job-0-" + "0" * 32)
    await functions.submit(call, make_submission())
    assert await claimed_ids(functions) == []
    await pauses.resume(PauseLine(lane="standard"), "operator")
    assert await claimed_ids(functions) == [call.id]


async def test_a_tenant_cannot_end_the_pause_of_an_operator(pauses: Pauses) -> None:
    """An operator can end that of a tenant, and take it over."""
    line = PauseLine(tenant="t")
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
        await pauses.pause(PauseLine(model=f"m{number}", tenant="t"), "tenant")
    with pytest.raises(TooManyPauses):
        await pauses.pause(PauseLine(tenant="t"), "tenant")
    await pauses.pause(PauseLine(tenant="t"), "operator")


async def test_resuming_wakes_the_workers(
    functions: Functions, pauses: Pauses, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Of the pause's model, or of all models."""
    await redis_client.sadd(keys.of("models"), "m", "n")
    async with redis_client.pubsub() as pubsub:
        await pubsub.psubscribe(keys.of("wake", "*"))
        woken: list[str] = []
        for line in (PauseLine(model="m", lane="batch"), PauseLine(tenant="t")):
            await pauses.pause(line, "operator")
            await pauses.resume(line, "operator")
        while len(woken) < 3:
            message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=5)
            if message is not None:
                woken.append(message["channel"].decode().rpartition(":")[2])
    assert sorted(woken) == ["m", "m", "n"]
