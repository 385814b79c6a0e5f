"""What would take Redis long is done by several calls, each of which does a part; together they do
what one call would."""

from typing import Any

import pytest
import redis.asyncio
from msgspec.structs import astuple

from contract.api_keys import KeyTerms
from contract.batches import Batches, NewBatch, new_batch_id
from contract.callbacks import Callback, CallbackKind
from contract.connection import connect
from contract.events import ChoiceDelta, Tokens
from contract.function_types import Append, Blame, Claimed, JobView, Release, Verdict, Wanted
from contract.functions import Functions
from contract.jobs import Endpoint, JobStatus
from contract.keys import Keys
from contract.operations import OperationKind, Operations, new_operation_id
from contract.outbox import Outbox
from contract.pauses import PauseLine, Pauses
from infra.embedded_redis import EmbeddedRedis
from tests.contract.some_calls import LEASE_S, claim, make_job, make_submission, pass_time, tokens

pytestmark = pytest.mark.anyio

MANY = 250  # more than two pages of whatever is only looked at


async def submitted(
    functions: Functions, number: int, tenant: str = "t", **terms: Any
) -> list[str]:
    jobs = [make_job(tenant) for _ in range(number)]
    for job in jobs:
        await functions.submit(job, make_submission(**terms))
    return [job.id for job in jobs]


async def held(functions: Functions, number: int, tenant: str = "t", **terms: Any) -> list[Claimed]:
    await submitted(functions, number, tenant, **terms)
    return await claim(functions, max_jobs=number, max_tokens=10**6)


def first_outputs(jobs: list[Claimed], text: str = "x") -> list[Append]:
    event = Tokens((ChoiceDelta(0, 0, (5,), text),))
    return [Append(each.job.id, each.epoch, 1, event, 1) for each in jobs]


async def test_an_append_writes_every_event_in_order(functions: Functions) -> None:
    """First outputs, which take the jobs' records, second ones of the same jobs, and ends."""
    jobs = await held(functions, 20)
    items = first_outputs(jobs)
    items += [Append(each.job.id, each.epoch, 2, tokens(1, 6), 1) for each in jobs]
    items += [Append(each.job.id, each.epoch, 3, fin=JobStatus.SUCCEEDED) for each in jobs]
    verdicts = await functions.append("w1", items, lease_s=LEASE_S)
    assert verdicts == [(Verdict.OK, item.number + 1) for item in items]
    for each in jobs:
        view, entries = await functions.read(each.job.id, "t", max_events=9) or (None, [])
        assert view is not None
        assert view.status is JobStatus.SUCCEEDED
        assert [entry.number for entry in entries] == [1, 2, 3]


async def test_an_append_of_large_events_is_whole(functions: Functions) -> None:
    """Also of one that is larger than a call should be; a refused one is told in its place."""
    jobs = await held(functions, 4)
    items = first_outputs(jobs, "x" * 50_000)
    items[2] = Append(jobs[2].job.id, 9, 1, items[2].event, 1)
    items[3] = first_outputs(jobs[3:], "x" * 100_000)[0]
    ok = Verdict.OK, 2
    assert await functions.append("w1", items, lease_s=LEASE_S) == [ok, ok, (Verdict.FENCED, 0), ok]


async def test_many_jobs_are_renewed_attended_released_and_blamed(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    jobs = await held(functions, MANY, attendance_s=30.0)
    ids = [each.job.id for each in jobs]
    assert await functions.attend([*ids, "job-0-none"]) == MANY
    await pass_time(redis_client, keys, LEASE_S - 1)
    pairs = [(each.job.id, each.epoch + (n == 200)) for n, each in enumerate(jobs)]
    lost = await functions.heartbeat("w1", "m", pairs, lease_s=LEASE_S, info="{}")
    assert lost == [ids[200]]
    await pass_time(redis_client, keys, 2)
    assert (await functions.sweep()).num_lapsed == 1
    watched = await functions.watch("m", ["standard"])
    assert sorted(each.job_id for each in watched.held) == sorted({*ids} - {ids[200]})
    assert [(each.tenant, each.num_jobs) for each in watched.waiting] == []
    items = [Release(each.job.id, each.epoch, "drain") for each in jobs[:100]]
    assert await functions.release("w1", items) == [(Verdict.OK, 0)] * 100
    blamed = [Blame(each.job.id, each.epoch, "{}") for each in jobs[100:201]]
    verdicts = await functions.blame("w1", blamed, max_crashes=3)
    assert verdicts == [(Verdict.OK, 0)] * 100 + [(Verdict.FENCED, 0)]


async def test_a_sweep_goes_on_until_nothing_is_due_or_it_has_done_enough(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    await held(functions, 30)
    await submitted(functions, 30, deadline_s=1.0)
    await submitted(functions, 30, attendance_s=1.0)
    await pass_time(redis_client, keys, 2)
    assert sum(astuple(await functions.sweep(max_jobs=20))) == 20
    swept = await functions.sweep()
    assert (swept.num_expired, swept.num_unattended, swept.num_lapsed) == (10, 30, 0)
    await pass_time(redis_client, keys, LEASE_S)
    assert (await functions.sweep()).num_lapsed == 30


async def test_a_list_shows_as_many_jobs_as_it_may(functions: Functions) -> None:
    """Of one tenant or of all, also where most do not match."""
    ids = [
        (await submitted(functions, 1, f"t{n % 3}", metadata={"n": str(n % 4)}))[0]
        for n in range(MANY)
    ]
    for tenant, own in (("", {*ids}), ("t1", {*ids[1::3]})):
        views, after = list[JobView](), ""
        while True:
            page = await functions.list_jobs(tenant, Wanted(), after=after, max_jobs=100)
            assert page is not None
            views += page.views
            if not (after := page.position):
                break
            assert len(page.views) == 100
        listed = [(view.created_ms, view.job.id) for view in views]
        assert listed == sorted(listed, reverse=True)
        assert sorted(job_id for _, job_id in listed) == sorted(own)
        some = await functions.list_jobs(tenant, Wanted(metadata={"n": "3"}), max_jobs=100)
        assert some is not None
        assert {view.job.id for view in some.views} == own & {*ids[3::4]}


async def test_a_claim_that_ends_expired_jobs_wakes_workers_to_go_on(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Until a job that can run is found behind them."""
    await submitted(functions, 10, deadline_s=1.0)
    [live] = await submitted(functions, 1)
    await pass_time(redis_client, keys, 2)
    hints = redis_client.pubsub(ignore_subscribe_messages=True)
    await hints.subscribe(keys.of("wake", "m"))
    await hints.get_message(timeout=5)
    num_calls, claimed = 0, list[Claimed]()
    while not claimed:
        num_calls += 1
        claimed = await claim(functions)
        if not claimed:
            assert (await hints.get_message(timeout=5))["data"] == b"standard"
    assert ([each.job.id for each in claimed], num_calls) == ([live], 4)
    assert await hints.get_message(timeout=0) is None
    await hints.aclose()  # type: ignore[no-untyped-call]


async def test_suspects_that_have_expired_hide_no_other(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    jobs = await held(functions, 6, deadline_s=5.0)
    [last] = await held(functions, 1)
    blamed = [Blame(each.job.id, each.epoch, "{}") for each in (*jobs, last)]
    await functions.blame("w1", blamed, max_crashes=2)
    await pass_time(redis_client, keys, 6)
    for _ in range(2):
        assert await claim(functions, is_idle=True) == []
    [alone] = await claim(functions, is_idle=True)
    assert (alone.job.id, alone.is_alone) == (last.job.id, True)


async def test_returned_jobs_of_a_paused_tenant_hide_no_other(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """However many there are in front; they keep their order."""
    jobs = await held(functions, 30, "paused")
    others = await held(functions, 3, "other")
    items = [Release(each.job.id, each.epoch, "drain") for each in (*jobs, *others)]
    await functions.release("w1", items)
    pauses = Pauses(redis_client, keys)
    await pauses.pause(PauseLine(tenant="paused"), "operator")
    claimed = await claim(functions, max_jobs=50, max_tokens=9999)
    assert [each.job.id for each in claimed] == [each.job.id for each in others]
    await pauses.resume(PauseLine(tenant="paused"), "operator")
    claimed = await claim(functions, max_jobs=50, max_tokens=9999)
    assert [each.job.id for each in claimed] == [each.job.id for each in jobs]


async def test_every_open_batch_is_taken_however_many_there_are(
    redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """A call looks at some of them, which its token draws."""
    batches, ids, taken = Batches(redis_client, keys), set[str](), set[str]()
    for n in range(300):
        asked = NewBatch(
            endpoint=Endpoint.CHAT,
            input_file_id="file-1",
            completion_window="24h",
            terms=KeyTerms(tenant=f"t{n % 10}"),
            output_lifetime_s=3600.0,
        )
        ids.add(batch_id := new_batch_id(keys.partition))
        await batches.add(batch_id, asked, window_s=3600.0)
    for n in range(100):
        terms: dict[str, Any] = {"lease_s": 600.0, "in_progress": False, "max_batches": 20}
        taken |= {*await batches.take(f"token-{n}", **terms)}
    assert taken == ids


async def test_an_operation_is_found_behind_many_that_are_held(
    functions: Functions, redis_server: EmbeddedRedis
) -> None:
    """In a namespace of its own, where no gateway of another test takes any."""
    keys = Keys("pages")
    client = connect(redis_server.url, keys)
    operations = Operations(client, keys)
    ids = [new_operation_id(keys.partition) for _ in range(140)]
    for n, each in enumerate(ids):
        names = {"owner": f"t{n}", "tenant": f"t{n}"}
        await operations.add(each, OperationKind.CANCEL, Wanted(), **names)  # type: ignore[arg-type]
    assert await operations.take("a", lease_s=600.0, only=ids[-1]) == ids[-1]
    assert await operations.take("b", lease_s=600.0, only=ids[-1]) is None
    await operations.stop(ids[3])
    assert await operations.take("b", lease_s=600.0, only=ids[3]) is None
    taken = [await operations.take("b", lease_s=600.0) for _ in range(139)]
    assert sorted(filter(None, taken)) == sorted({*ids} - {ids[3], ids[-1]})
    await client.aclose()


async def test_busy_servers_of_one_tenant_only_delay_another_by_a_call(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    outbox = Outbox(redis_client, keys)
    terms: dict[str, Any] = {"lease_s": 600.0, "max_messages": 400, "max_per_target": 1}

    async def post(tenant: str, number: int) -> None:
        for n in range(number):
            target = f"https://host-{n}.example/x"
            callback = Callback(kind=CallbackKind.URL, target=target)
            [job_id] = await submitted(functions, 1, tenant, callback=callback)
            await functions.cancel(job_id, tenant)

    await post("many", 70)
    first = [await outbox.take(**terms), await outbox.take(**terms)]
    assert [len(each) for each in first] == [64, 6]
    await post("many", 70)
    await pass_time(redis_client, keys, 0.01)
    await post("one", 1)
    assert await outbox.take(**terms) == []
    assert len(await outbox.take(**terms)) == 1
