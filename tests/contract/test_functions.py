"""The Redis functions on a real Redis: each transition of the state table.

Over 300 lines: a test for each transition.
"""

import contextlib

import pytest
import redis.asyncio

from contract.connection import connect
from contract.errors import BrokerUnavailable, ErrorCode, JobRefused
from contract.events import End
from contract.function_types import Append, Blame, FairRoom, LaneRoom, Release, Swept, Verdict
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.cluster import Node
from tests.contract.relay import Relay
from tests.contract.some_calls import (
    LEASE_S,
    append,
    claim,
    make_job,
    make_submission,
    pass_time,
    tokens,
)

pytestmark = pytest.mark.anyio


async def test_a_job_runs_from_submission_to_its_one_terminal_event(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Submit, claim, two events, end. Only the readable record remains."""
    job = make_job()
    submitted = await functions.submit(job, make_submission())
    assert submitted.is_new

    [claimed] = await claim(functions)
    assert (claimed.job, claimed.epoch, claimed.attempt, claimed.next_number) == (job, 1, 1, 1)
    first = Append(job.id, 1, 1, tokens(0, 7), 1)
    last = Append(job.id, 1, 2, tokens(1, 8, 9), 2, JobStatus.SUCCEEDED)
    assert await append(functions, "w1", first) == [(Verdict.OK, 2)]
    assert await append(functions, "w1", last) == [(Verdict.OK, 4)]

    found = await functions.read(job.id, "t", max_events=100)
    assert found is not None
    view, entries = found
    assert view.status is JobStatus.SUCCEEDED
    assert [e.number for e in entries] == [1, 2, 3]
    assert entries[-1].event == End(JobStatus.SUCCEEDED, "", "", 3, 3)
    assert len({e.hash for e in entries}) == 3
    for key in (
        keys.of("leases"),
        keys.of("deadlines"),
        keys.of("own", "w1"),
        keys.of("q", "m", "standard", "t"),
    ):
        assert not await redis_client.exists(key), key
    assert await redis_client.pttl(keys.of("job", job.id)) > 0
    assert await redis_client.pttl(keys.of("log", job.id)) > 0
    counters = await redis_client.hgetall(keys.of("counters", "m", "standard"))
    assert set(counters.values()) == {b"0"}


async def test_every_call_may_be_repeated(functions: Functions) -> None:
    """A client library that repeats a call after a lost reply changes nothing."""
    job = make_job()
    await functions.submit(job, make_submission())
    assert not (await functions.submit(job, make_submission())).is_new
    [claimed] = await claim(functions)
    item = Append(job.id, claimed.epoch, 1, tokens(0, 7), 1)
    assert await append(functions, "w1", item) == [(Verdict.OK, 2)]
    assert await append(functions, "w1", item) == [(Verdict.OK, 2)]
    fin = Append(job.id, claimed.epoch, 2, fin=JobStatus.SUCCEEDED)
    assert await append(functions, "w1", fin) == [(Verdict.OK, 3)]
    assert await append(functions, "w1", fin) == [(JobStatus.SUCCEEDED, 0)]
    found = await functions.read(job.id, "t", max_events=100)
    assert found is not None
    assert [e.number for e in found[1]] == [1, 2]


async def test_a_gap_and_too_much_output_are_refused(functions: Functions) -> None:
    """The log has no gaps and never exceeds the job's cap."""
    job = make_job()
    await functions.submit(job, make_submission())
    await claim(functions)
    assert await append(functions, "w1", Append(job.id, 1, 2, tokens(1, 7), 1)) == [
        (Verdict.GAP, 1)
    ]
    assert await append(functions, "w1", Append(job.id, 1, 1, tokens(0, *range(11)), 11)) == [
        (Verdict.OVER, 0)
    ]
    assert await append(functions, "w1", Append("job-0-none", 1, 1)) == [(Verdict.GONE, 0)]


async def test_a_job_with_an_expired_lease_moves_to_another_worker(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """The second worker continues where the log ends; every write of the first is refused."""
    job = make_job()
    await functions.submit(job, make_submission())
    await claim(functions, "w1")
    await append(functions, "w1", Append(job.id, 1, 1, tokens(0, 7), 1))
    await pass_time(redis_client, keys, LEASE_S + 1)

    assert (await functions.sweep()).num_lapsed == 1
    [again] = await claim(functions, "w2")

    assert (again.epoch, again.attempt, again.next_number, again.num_logged_tokens) == (2, 2, 2, 1)
    late = Append(job.id, 1, 2, tokens(1, 8), 1)
    assert await append(functions, "w1", late) == [(Verdict.FENCED, 0)]
    assert await append(functions, "w2", Append(job.id, 2, 2, tokens(1, 8), 1)) == [(Verdict.OK, 3)]
    found = await functions.read(job.id, job.tenant)
    assert found is not None
    runs = found[0].runs
    assert [(run.worker, run.first_number) for run in runs] == [("w1", 1), ("w2", 2)]
    assert runs[1].claimed_ms - runs[0].claimed_ms >= 1000 * LEASE_S


async def test_a_heartbeat_renews_leases_and_names_lost_jobs(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """A worker that sends heartbeats keeps its jobs. The reply names those it no longer holds."""
    kept, lost = make_job(), make_job()
    for job in (kept, lost):
        await functions.submit(job, make_submission())
    await claim(functions)
    await functions.cancel(lost.id, "t")
    await pass_time(redis_client, keys, LEASE_S - 1)

    held = [(kept.id, 1), (lost.id, 1)]
    answer = await functions.heartbeat("w1", "m", held, lease_s=LEASE_S, info="{}")

    assert answer == [lost.id]
    await pass_time(redis_client, keys, LEASE_S - 1)
    assert await functions.sweep() == Swept(0, 0, 0, 0)


async def test_a_cancelled_queued_job_never_runs(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Its entry is removed from the queue. Only its owner can cancel it, and a second cancel has
    the same result."""
    job = make_job()
    await functions.submit(job, make_submission())
    assert await functions.cancel(job.id, "someone else") is None
    assert await functions.cancel(job.id, "t") is JobStatus.CANCELLED
    assert await functions.cancel(job.id, "t") is JobStatus.CANCELLED
    assert await claim(functions) == []
    assert not await redis_client.exists(keys.of("q", "m", "standard", "t"))


async def test_a_cancel_fences_the_worker_at_once(functions: Functions) -> None:
    """No append is accepted after an acknowledged cancel, and the log ends with one terminal
    event."""
    job = make_job()
    await functions.submit(job, make_submission())
    await claim(functions)
    await functions.cancel(job.id, "t")
    verdicts = await append(functions, "w1", Append(job.id, 1, 1, tokens(0, 7), 1))
    assert verdicts == [(JobStatus.CANCELLED, 0)]
    found = await functions.read(job.id, "t", max_events=10)
    assert found is not None
    assert [type(e.event) for e in found[1]] == [End]


async def test_a_passed_deadline_ends_a_job_in_every_state(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """A queued job is ended by claim or sweep and never runs; a running one is ended by append or
    sweep."""
    by_claim, by_append, by_sweep = make_job(), make_job(), make_job()
    await functions.submit(by_append, make_submission(deadline_s=5))
    await claim(functions)
    await functions.submit(by_claim, make_submission(deadline_s=5))
    await functions.submit(by_sweep, make_submission(deadline_s=7))
    await pass_time(redis_client, keys, 6)

    assert [c.job.id for c in await claim(functions)] == [by_sweep.id]
    late = Append(by_append.id, 1, 1, tokens(0, 7), 1)
    assert await append(functions, "w1", late) == [(JobStatus.EXPIRED, 0)]
    await pass_time(redis_client, keys, 2)
    assert await functions.sweep() == Swept(0, 1, 0, 0)
    for job in (by_claim, by_append, by_sweep):
        found = await functions.read(job.id, "t")
        assert found is not None
        assert found[0].status is JobStatus.EXPIRED


async def test_a_drain_costs_no_attempt_and_an_error_costs_one(
    functions: Functions,
) -> None:
    """Errors end the job at its limit of attempts, with the last error."""
    job = make_job()
    await functions.submit(job, make_submission(max_attempts=2))
    [claimed] = await claim(functions)
    drained = Release(job.id, claimed.epoch, "drain")
    assert await functions.release("w1", [drained]) == [(Verdict.OK, 0)]
    assert await functions.release("w1", [drained]) == [(Verdict.FENCED, 0)]
    for attempt, verdict in ((1, Verdict.OK), (2, JobStatus.FAILED)):
        [claimed] = await claim(functions)
        assert claimed.attempt == attempt
        failed = Release(job.id, claimed.epoch, "error", "engine_error", "it broke")
        assert await functions.release("w1", [failed]) == [(verdict, 0)]
    found = await functions.read(job.id, "t")
    assert found is not None
    assert (found[0].code, found[0].message) == ("engine_error", "it broke")


@pytest.mark.parametrize(
    ("max_crashes", "with_company"),
    [(1, [True]), (2, [True, False]), (4, [True, True, True, False])],
)
async def test_a_job_that_killed_engines_runs_alone_the_last_time(
    functions: Functions, max_crashes: int, with_company: list[bool]
) -> None:
    """No job is poison for the company it had, and one dead engine makes nobody run alone."""
    job = make_job()
    await functions.submit(job, make_submission(deadline_s=900.0))
    had_company = []
    for crash in range(1, max_crashes + 1):
        [claimed] = await claim(functions, is_idle=True)
        had_company.append(not claimed.is_alone)
        [(verdict, _)] = await functions.blame(
            "w1", [Blame(job.id, claimed.epoch, "{}")], max_crashes=max_crashes
        )
        assert verdict == (JobStatus.FAILED if crash == max_crashes else Verdict.OK)
    assert had_company == with_company


async def test_lanes_come_in_order_and_released_jobs_first_in_each(functions: Functions) -> None:
    """interactive before standard; within a lane, released jobs before waiting ones."""
    first, second = make_job(), make_job()
    urgent = make_job(lane="interactive")
    await functions.submit(first, make_submission())
    [claimed] = await claim(functions)
    await functions.submit(second, make_submission())
    await functions.submit(urgent, make_submission())
    await functions.release("w1", [Release(first.id, claimed.epoch, "drain")])
    assert [c.job.id for c in await claim(functions)] == [urgent.id, first.id, second.id]


async def test_tenants_take_turns_by_the_tokens_they_were_given(functions: Functions) -> None:
    """A flood of one tenant does not delay another's only job."""
    flood = [make_job("heavy") for _ in range(5)]
    for job in flood:
        await functions.submit(job, make_submission())
    light = make_job("light")
    await functions.submit(light, make_submission())
    order = [c.job.tenant for c in await claim(functions, max_jobs=3)]
    assert "light" in order[:2]


async def test_a_claim_stays_within_the_worker_s_room(functions: Functions) -> None:
    """No more jobs or tokens than requested. A job that does not fit stays at the head of the
    queue."""
    jobs = [make_job() for _ in range(4)]
    for job in jobs:
        await functions.submit(job, make_submission(max_output_tokens=7))
    assert len(await claim(functions, max_tokens=25)) == 2
    assert len(await claim(functions, max_tokens=9)) == 0
    assert [c.job.id for c in await claim(functions, max_jobs=1)] == [jobs[2].id]


async def test_a_claim_whose_reply_is_lost_is_not_repeated(
    functions: Functions, redis_node: EmbeddedRedis | Node, keys: Keys
) -> None:
    """A repeated claim would take further jobs, and the first would wait until its lease expires.
    The worker asks which jobs it holds instead."""
    jobs = [make_job(), make_job()]
    async with Relay(redis_node).running() as relay:
        client = connect(f"redis://127.0.0.1:{relay.port}", keys)
        async with contextlib.aclosing(client):
            worker = Functions(client, keys)
            assert await claim(worker) == []
            for job in jobs:
                await functions.submit(job, make_submission())
            relay.lose_next_answer()
            with pytest.raises(BrokerUnavailable):
                await claim(worker, max_jobs=1)
            [mine] = await worker.mine("w1", [], lease_s=LEASE_S)
    assert (mine.job.id, mine.attempt) == (jobs[0].id, 1)


async def test_a_move_reaches_the_job_s_worker_and_its_record(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """The worker learns the new lane and deadline; its fencing token stays valid."""
    job = make_job()
    await functions.submit(job, make_submission())
    await claim(functions)
    async with redis_client.pubsub() as pubsub:
        await pubsub.subscribe(keys.of("ctl", "w1"))
        await anext(pubsub.listen())  # from now on it receives messages
        moved = await functions.reprioritise(job.id, "t", lane="interactive", deadline_s=5)
        message = await anext(pubsub.listen())
    assert moved is Verdict.OK
    word, job_id, lane, deadline_ms = message["data"].decode().split()
    assert (word, job_id, lane, int(deadline_ms)) == ("moved", job.id, "interactive", 5000)
    assert await append(functions, "w1", Append(job.id, 1, 1, tokens(0, 7), 1)) == [(Verdict.OK, 2)]
    found = await functions.read(job.id, "t")
    assert found is not None
    assert found[0].lane == "interactive"


async def test_a_full_lane_refuses_jobs(functions: Functions) -> None:
    """The bound counts waiting tokens."""
    await functions.submit(make_job(), make_submission(lane_bound_tokens=20))
    with pytest.raises(JobRefused) as refused:
        await functions.submit(make_job(), make_submission(lane_bound_tokens=20))
    assert refused.value.code is ErrorCode.LANE_FULL


async def test_an_idempotency_key_attaches_or_refuses(functions: Functions) -> None:
    """Same key and body: the first job. Same key, another body: an error. Keys are separate for
    each tenant."""
    first = make_job()
    key = make_submission(idempotency_key="k", body_hash="a")
    other_body = make_submission(idempotency_key="k", body_hash="b")
    await functions.submit(first, key)
    again = await functions.submit(make_job(), key)
    assert (again.job_id, again.is_new) == (first.id, False)
    with pytest.raises(JobRefused) as refused:
        await functions.submit(make_job(), other_body)
    assert refused.value.code is ErrorCode.IDEMPOTENCY_MISMATCH
    assert (await functions.submit(make_job("u"), other_body)).is_new


async def test_a_job_of_another_tenant_is_not_found(functions: Functions) -> None:
    job = make_job()
    await functions.submit(job, make_submission())
    assert await functions.read(job.id, "someone else") is None
    assert await functions.read("job-0-none", "t") is None


async def claimed_by_a_full_worker(
    functions: Functions, held: dict[str, tuple[int, int]]
) -> list[str]:
    """The tenants whose jobs a worker with four places gets, all of which are held as given."""
    rooms = {"standard": LaneRoom(0, 0, fair=FairRoom(4, 1000, held))}
    found = await functions.claim(
        "w1", "m", ["standard"], lease_s=LEASE_S, max_jobs=0, max_tokens=0, rooms=rooms
    )
    return [item.job.tenant for item in found]


async def test_a_full_worker_is_handed_jobs_of_tenants_below_their_share(
    functions: Functions,
) -> None:
    """One tenant holds all four places: another gets two jobs, the first gets none. If a third
    tenant holds one place, each gets one."""
    for tenant in ("heavy", "light", "heavy", "light", "light"):
        await functions.submit(make_job(tenant), make_submission())

    async def claimed(held: dict[str, tuple[int, int]]) -> list[str]:
        return await claimed_by_a_full_worker(functions, held)

    full = {"heavy": (4, 400)}
    assert await claimed(full | {"other": (1, 9), "light": (1, 9)}) == []
    assert await claimed(full | {"light": (0, 495)}) == []  # its part of the tokens is taken
    assert await claimed(full) == ["light", "light"]
    assert await claimed(full | {"light": (2, 26)}) == []


async def test_shares_of_places_are_by_weight(functions: Functions) -> None:
    """A tenant of weight 3 gets three of four places. The weight of its latest job counts."""
    for weight in (0.25, 100.0, 3.0):
        await functions.submit(make_job("light", weight=weight), make_submission())
    await functions.submit(make_job("light", weight=3.0), make_submission())
    assert await claimed_by_a_full_worker(functions, {"heavy": (4, 400)}) == ["light"] * 3


async def test_released_jobs_get_places_of_tenants_above_their_share(
    functions: Functions,
) -> None:
    """Two jobs of the tenant that holds all places are ahead in the queue. They keep their position
    and go first when places become free."""
    for tenant in ("heavy", "heavy", "light"):
        await functions.submit(make_job(tenant), make_submission())
    held = await claim(functions, "w2", max_jobs=3)
    await functions.release("w2", [Release(c.job.id, c.epoch, "drain") for c in held])
    await functions.submit(make_job("new"), make_submission())

    assert await claimed_by_a_full_worker(functions, {"heavy": (4, 400)}) == ["light", "new"]
    assert [c.job.tenant for c in await claim(functions)] == ["heavy", "heavy"]
