"""A job's way through the Redis functions, and a lost reply. Each transition is in tests/oracle."""

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
from tests.contract.some_calls import LEASE_S, append, claim, make_job, make_submission, tokens

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
