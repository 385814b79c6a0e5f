"""Jobs of flows and their calls in the functions: reservations, bills, lapsed leases."""

from collections.abc import Iterator

import msgspec
import pytest
import redis
import redis.asyncio

from contract.endpoints import Endpoint
from contract.errors import JobRefused
from contract.events import MemberRun, Members
from contract.flows import Ensemble, Flow, FlowCall
from contract.function_types import Append, TenantLimits, Verdict
from contract.functions import Functions
from contract.jobs import Job, JobStatus
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.clock import clock_key
from tests.cluster import plain_client
from tests.contract.some_calls import append, claim, make_job, make_submission, pass_time, tokens
from tests.oracle.audit import Audit

pytestmark = pytest.mark.anyio

FLOW = Flow(
    definition=Ensemble(members=("a", "b"), combine="vote"), endpoints=(Endpoint.COMPLETIONS,)
)


@pytest.fixture
def audit(redis_server: EmbeddedRedis, keys: Keys) -> Iterator[Audit]:
    with plain_client(redis_server.url, keys) as client:
        yield Audit(client, keys)


def make_parent() -> Job:
    call = FlowCall(flow=FLOW, body=b"{}", retention_s=60.0)
    return msgspec.structs.replace(make_job(), flow=call)


def make_child(parent: Job) -> Job:
    return msgspec.structs.replace(make_job(), parent=parent.id)


async def level(client: redis.asyncio.Redis, keys: Keys) -> float:
    """Of the tenant's meter of tokens."""
    return float(await client.hget(keys.of("tenant", "t"), "tokens") or 0)


async def test_a_call_reserves_nothing_of_its_tenant(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys, audit: Audit
) -> None:
    """The flow's job has."""
    parent = make_parent()
    limits = TenantLimits(concurrent_tokens=13)
    await functions.submit(parent, make_submission(limits=limits))
    child = make_child(parent)
    await functions.submit(child, make_submission())
    assert await redis_client.hget(keys.of("tenant", "t"), "reserved") == b"13"
    with pytest.raises(JobRefused):
        await functions.submit(make_job(), make_submission(limits=limits))
    audit.check()
    for claimed in await claim(functions):
        fin = Append(claimed.job.id, claimed.epoch, 1, tokens(0, 1), 1, JobStatus.SUCCEEDED)
        await append(functions, "w1", fin)
    assert await redis_client.hget(keys.of("tenant", "t"), "reserved") == b"0"
    audit.check()


@pytest.mark.parametrize("ending", ["succeeded", "failed", "cancelled", "expired"])
async def test_the_meter_gets_the_tokens_of_a_flow_s_calls_however_it_ends(
    functions: Functions,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    audit: Audit,
    ending: str,
) -> None:
    """Of one that ended before the flow, and of one that ends after it; a third never ran."""
    await redis_client.set(clock_key(), "=1700000000000")
    parent = make_parent()
    limited = make_submission(limits=TenantLimits(tokens_per_min=1000), call_prompt_tokens=6)
    await functions.submit(parent, limited)
    assert await level(redis_client, keys) == 19.0  # prompts of 9, outputs of 10
    [held] = await claim(functions, "flow")
    children = [make_child(parent) for _ in range(3)]
    metered = make_submission(limits=TenantLimits(tokens_per_min=1000))
    for child in children:
        await functions.submit(child, metered)
    await claim(functions, max_jobs=2)
    early = Append(children[0].id, 1, 1, tokens(0, 1, 2), 2, JobStatus.SUCCEEDED)
    under_way = Append(children[1].id, 1, 1, tokens(0, 1), 1)
    await append(functions, "w1", early, under_way)
    assert await level(redis_client, keys) == 19.0 + 5.0
    end = Append(parent.id, held.epoch, 1, tokens(0, 1, 2), 2)
    if ending in ("succeeded", "failed"):
        end = msgspec.structs.replace(end, fin=JobStatus(ending), prompt_tokens=3)
        await append(functions, "flow", end)
        await append(functions, "flow", end)  # its reply was lost
    elif ending == "cancelled":
        await append(functions, "flow", end)
        await functions.cancel(parent.id, "t")
    else:
        await append(functions, "flow", end)
        await functions.reprioritise(parent.id, "t", deadline_s=0.0)
        await functions.sweep()
    assert await level(redis_client, keys) == 5.0
    for child in children[1:]:
        await functions.cancel(child.id, "t")
        await functions.cancel(child.id, "t")
    assert await level(redis_client, keys) == 5.0 + 4.0
    audit.check()


async def test_a_call_is_never_refused_for_its_tenant_s_limit(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys, audit: Audit
) -> None:
    """Its flow was admitted. A flow that another called reserves nothing either."""
    await redis_client.set(clock_key(), "=1700000000000")
    limited = make_submission(limits=TenantLimits(tokens_per_min=13))
    parent = make_parent()
    await functions.submit(parent, limited)
    nested = msgspec.structs.replace(make_parent(), parent=parent.id)
    await functions.submit(nested, limited)
    await functions.submit(make_child(nested), limited)
    assert await level(redis_client, keys) == 13.0
    assert await redis_client.hget(keys.of("tenant", "t"), "reserved") == b"13"
    await functions.reprioritise(nested.id, "t", lane="batch")
    assert await level(redis_client, keys) == 13.0
    audit.check()
    for claimed in await claim(functions):
        await functions.cancel(claimed.job.id, "t")
    await functions.cancel(nested.id, "t")
    assert await level(redis_client, keys) == 3.0  # the prompt of the one call that was claimed
    audit.check()


async def test_a_flow_s_bill_has_the_prompts_of_its_calls(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys, audit: Audit
) -> None:
    """Given with the end; the counters of what runs have the job's own prompt."""
    parent = make_parent()
    await functions.submit(parent, make_submission())
    [claimed] = await claim(functions)
    runs = (MemberRun("a", "x", JobStatus.SUCCEEDED, 7, 4, cached_tokens=3),)
    first = Append(parent.id, claimed.epoch, 1, tokens(0, 1, 2), 2)
    end = {"fin": JobStatus.SUCCEEDED, "prompt_tokens": 7, "cached_tokens": 3}
    last = Append(parent.id, claimed.epoch, 2, Members(runs), 2, **end)  # type: ignore[arg-type]
    assert await append(functions, "w1", first) == [(Verdict.OK, 2)]
    audit.check()
    await append(functions, "w1", last)
    view, entries = await functions.read(parent.id, "t", max_events=9) or (None, [])
    assert view is not None
    assert (view.num_prompt_tokens, view.num_output_tokens, view.num_cached_tokens) == (7, 4, 3)
    assert entries[-2].event == Members(runs)
    assert msgspec.structs.astuple(entries[-1].event)[3:] == (7, 4, 3)
    assert await redis_client.hget(keys.of("job", parent.id), "charge") == b"11"
    totals = await redis_client.hgetall(keys.of("totals", "m"))
    assert b"prompt_tokens_cached_total:standard" not in totals  # its calls have counted them
    counters = await redis_client.hgetall(keys.of("counters", "m", "standard"))
    assert set(counters.values()) == {b"0"}
    audit.check()


async def test_a_flow_whose_lease_lapsed_twice_is_no_suspect(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Nothing that runs it has an engine to kill; others of the flow must not wait for it."""
    for job in (make_parent(), make_parent()):
        await functions.submit(job, make_submission(deadline_s=600.0))
    for _ in range(3):
        assert len(await claim(functions)) == 2
        await pass_time(redis_client, keys, 11.0)
        assert (await functions.sweep()).num_lapsed == 2
    assert [claimed.is_alone for claimed in await claim(functions)] == [False, False]
