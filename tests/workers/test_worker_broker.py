"""The calls of a worker that renew its leases, and how often they do."""

import asyncio
import tempfile

import pytest
import redis.asyncio

from contract.catalogue import Catalogue
from contract.function_types import Append, LaneRoom
from contract.functions import Functions
from contract.keys import Keys
from contract.partitions import made_number
from infra.embedded_redis import EmbeddedRedis
from tests.contract.some_calls import make_job, make_submission, tokens
from tests.fakes import HashModelOptions
from tests.fleet import WorkerProcess, until
from tests.hash_worker import hash_worker_settings
from workers.supervisor.supervisor import EXIT_LOAD_FAILED
from workers.supervisor.worker_broker import WorkerBroker

pytestmark = pytest.mark.anyio

LEASE_S = 100.0


class Clock:
    """Returns the time that a test sets."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def test_appends_renew_leases_once_in_a_twentieth_of_one(
    functions: Functions,
    redis_client: redis.asyncio.Redis,
    redis_server: EmbeddedRedis,
    keys: Keys,
) -> None:
    """The first append does, those that follow at once do not, and one after a while does again.
    Only a renewal counts as contact with Redis, since the worker drops its jobs by that."""
    job = make_job()
    await functions.submit(job, make_submission())
    await functions.claim("w1", "m", ["standard"], lease_s=LEASE_S, max_jobs=1, max_tokens=100)
    clock = Clock()
    lane = WorkerBroker(hash_worker_settings(redis_server.url, lease_s=LEASE_S), "w1", clock)
    contacts_s, were_renewed = [], []
    for number, after_s in enumerate((0.0, 4.9, 0.1, 4.9), start=1):
        clock.now_s += after_s
        await redis_client.zadd(keys.of("leases"), {job.id: 1})
        await lane.append([Append(job.id, 1, number, tokens(number - 1, 7), 1)])
        contacts_s.append(lane.last_contact_s)
        were_renewed.append(await redis_client.zscore(keys.of("leases"), job.id) != 1)
    await lane.aclose()
    assert were_renewed == [True, False, True, False]
    assert contacts_s == [1000.0, 1000.0, 1005.0, 1005.0]


@pytest.mark.parametrize("is_reply_lost", [False, True])
async def test_a_claim_counts_as_contact_only_if_the_worker_holds_no_other_job(
    functions: Functions, redis_server: EmbeddedRedis, is_reply_lost: bool
) -> None:
    """An engine may take longer to load than a lease lasts, and no heartbeat is sent meanwhile: the
    worker must not drop the first jobs that it claims then. A claim beside held jobs does not renew
    their leases.
    """
    clock = Clock()
    lane = WorkerBroker(hash_worker_settings(redis_server.url, lease_s=LEASE_S), "w1", clock)
    room = {"standard": LaneRoom(1, 10_000)}

    async def claim(held: list[str]) -> str:
        job = make_job()
        await functions.submit(job, make_submission())
        if is_reply_lost:
            await functions.claim(
                "w1", "m", ["standard"], lease_s=LEASE_S, max_jobs=1, max_tokens=100
            )
            claimed = await lane.mine(held)
        else:
            claimed = await lane.claim(
                lanes={"standard": 0.0}, rooms=room, is_idle=not held, config_version=""
            )
        assert [found.job.id for found in claimed] == [job.id]
        return job.id

    clock.now_s += 5 * LEASE_S
    first = await claim([])
    assert lane.last_contact_s == clock.now_s
    claimed_s = clock.now_s
    clock.now_s += LEASE_S / 2
    await claim([first])
    assert lane.last_contact_s == claimed_s
    await lane.aclose()


@pytest.mark.e2e
async def test_a_worker_of_a_partition_that_is_not_there_ends(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    """With a sentence. One of a partition that is there publishes its model in partition 0."""
    await made_number(redis_client, Keys("test"), 2)
    with tempfile.TemporaryFile() as output:
        worker = WorkerProcess(redis_server.url, HashModelOptions(), output=output, partition=2)
        assert await asyncio.to_thread(worker.wait, 60) == EXIT_LOAD_FAILED
        output.seek(0)
        assert b"there is no partition 2: the namespace 'test' has 2, from 0 on" in output.read()
    catalogue = Catalogue(redis_client, Keys("test"))
    assert await catalogue.models() == []
    worker = WorkerProcess(redis_server.url, HashModelOptions(), partition=1)
    try:
        own = Catalogue(redis_client, Keys("test", 1))

        async def is_live() -> bool:
            return await own.num_live_workers("m") == 1

        await until(is_live)
        assert [card.name for card in await catalogue.models()] == ["m"]
        assert await catalogue.num_live_workers("m") == 0
    finally:
        await worker.close()
