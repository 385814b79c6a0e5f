"""The Redis functions on a real Redis: each transition of the state table."""

import contextlib

import pytest
import redis.asyncio

from contract.connection import connect
from contract.errors import BrokerUnavailable
from contract.events import End
from contract.function_types import Append, Verdict
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
