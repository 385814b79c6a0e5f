"""A worker's door to Redis: how often what it says renews its leases."""

import pytest
import redis.asyncio

from contract.function_types import Append
from contract.functions import Functions
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.contract.some_calls import make_job, make_submission, tokens
from tests.hash_worker import hash_worker_settings
from workers.supervisor.worker_broker import WorkerBroker

pytestmark = pytest.mark.anyio

LEASE_S = 100.0


class Clock:
    """Shows the time that it is given."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def test_appends_renew_leases_once_in_a_twentieth_of_one(
    functions: Functions,
    redis_client: redis.asyncio.Redis,
    redis_server: EmbeddedRedis,
    keys: Keys,
) -> None:
    """The first does, those that follow at once do not, and the next one after a while does again;
    only what renewed counts as contact, since the worker drops its jobs by that.
    """
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
