"""A job whose log is longer than one read of it is resumed from the complete log."""

import pytest
import redis.asyncio

from contract.codec import encode
from contract.events import ChoiceDelta, Tokens
from contract.function_types import Append
from contract.functions import Functions
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.fleet import TENANT, Caller
from tests.hash_worker import hash_worker_settings
from workers.supervisor import worker_broker
from workers.supervisor.worker_broker import WorkerBroker

pytestmark = pytest.mark.anyio

PAGE = 20


@pytest.mark.parametrize(
    ("num_events", "num_bytes"),
    [(PAGE - 1, 1), (PAGE, 1), (3 * PAGE, 1), (3 * PAGE + 7, 1), (3, 2**20), (PAGE, 2**17)],
)
async def test_a_long_log_is_read_whole(
    num_events: int,
    num_bytes: int,
    redis_client: redis.asyncio.Redis,
    redis_server: EmbeddedRedis,
    functions: Functions,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In order, without a gap, also if it ends with a page; pages are bounded by events and by
    bytes."""
    monkeypatch.setattr(worker_broker, "_READ_EVENTS", PAGE)
    job = await Caller(functions, redis_client, keys).submit("a story", max_tokens=100)
    [claimed] = await functions.claim(
        "w1", "m", ["standard"], lease_s=10, max_jobs=1, max_tokens=1000
    )
    events = [
        Tokens((ChoiceDelta(0, k, (65 + k % 26,), num_bytes * "x"),)) for k in range(num_events)
    ]
    for number, event in enumerate(events, start=1):
        await functions.append("w1", [Append(job.id, claimed.epoch, number, event, 1)], lease_s=10)
    reader = WorkerBroker(hash_worker_settings(redis_server.url), "w2")

    log = await reader.read_log(job.id, TENANT)
    found = await functions.read(job.id, TENANT, max_events=PAGE)

    await reader.aclose()
    assert found is not None
    view, page = found
    assert view.ends_with(page) == (num_events <= PAGE and num_events * num_bytes < 2**17)
    assert min(2, num_events) <= len(page) <= PAGE  # a reader asks also for the last that it has
    assert sum(len(encode(entry.event)) for entry in page) < 2**22
    assert [entry.number for entry in log] == list(range(1, num_events + 1))
    assert [entry.event for entry in log] == events
