"""The limits of a tenant: for the lines of a batch, and for batches themselves."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import redis.asyncio
from openai import AsyncOpenAI

from contract.api_keys import ApiKeys, KeyTerms
from contract.batches import MAX_OPEN, line_job_id
from contract.keys import Keys
from gateway.runners.batches.feeder import MAX_BATCHES
from infra.embedded_redis import EmbeddedRedis
from tests.batches.conftest import client_of, gateway_client
from tests.batches.test_batches import (
    COMPLETIONS,
    ended,
    ids,
    job_text,
    jsonl,
    line,
    reached,
    results,
    start,
)
from tests.fleet import until
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import MODEL, FakeWorker

pytestmark = pytest.mark.anyio


@pytest.fixture
async def narrow(
    base_url: str, redis_client: redis.asyncio.Redis, keys: Keys
) -> AsyncIterator[AsyncOpenAI]:
    """A client whose unfinished jobs may have 100 tokens in all."""
    terms = KeyTerms(tenant="narrow", concurrent_tokens=100)
    key, _ = await ApiKeys(redis_client, keys).create(terms)
    async with client_of(base_url, key) as client:
        yield client


async def test_a_line_that_no_limit_will_ever_admit_is_in_the_error_file(
    narrow: AsyncOpenAI, worker: FakeWorker
) -> None:
    """With the refusal that a call would get. The lines after it run."""
    asked = [line("never", max_tokens=200), line("1"), line("2")]
    batch = await ended(narrow, await start(narrow, jsonl(asked)))
    assert batch.status == "completed"
    assert ids(await results(narrow, batch.output_file_id)) == ["1", "2"]
    [error] = await results(narrow, batch.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("never", 429)
    assert error["response"]["body"]["error"]["code"] == "tenant_quota"


async def test_a_line_without_room_lets_smaller_ones_pass(
    narrow: AsyncOpenAI, base_url: str, idle_worker: FakeWorker
) -> None:
    """It runs once there is room, though no rate is measured that would tell when."""
    body = {"model": MODEL, "prompt": "job", "max_tokens": 40}
    async with httpx.AsyncClient(base_url=base_url) as http:
        headers = {"authorization": f"Bearer {narrow.api_key}"}
        job = {"endpoint": COMPLETIONS, "body": body}
        assert (await http.post("/v1/jobs", json=job, headers=headers)).status_code == 202
    first = await idle_worker.claim()
    batch = await start(narrow, jsonl([line("large", max_tokens=80), line("small")]))
    small = await idle_worker.claim()
    assert job_text(small.job) == "small"
    await idle_worker.run(first)
    await idle_worker.run(small)
    large = await idle_worker.claim()
    assert job_text(large.job) == "large"
    await idle_worker.run(large)
    batch = await ended(narrow, batch)
    assert ids(await results(narrow, batch.output_file_id)) == ["large", "small"]


async def test_the_batches_of_one_tenant_do_not_keep_that_of_another_waiting(
    tenants: tuple[AsyncOpenAI, AsyncOpenAI], idle_worker: FakeWorker
) -> None:
    """One of them makes way, and goes on later: no line is run twice."""
    one, two = tenants
    batches = [await start(one, jsonl([line(f"{number}")])) for number in range(MAX_BATCHES)]
    held = [await idle_worker.claim() for _ in batches]
    other = await start(two, jsonl([line("other")]))
    held.append(await idle_worker.claim())
    assert held[-1].job.tenant == "two"
    for claimed in held:
        await idle_worker.run(claimed)
    for client, batch in ((two, other), *((one, batch) for batch in batches)):
        assert (await ended(client, batch)).status == "completed"
    assert len(idle_worker.seen) == MAX_BATCHES + 1


@pytest.mark.parametrize("order", ["4312765", "7654321", "1234567", "2467153"])
async def test_of_a_tenant_those_batches_run_whose_windows_end_first(
    client: AsyncOpenAI,
    idle_worker: FakeWorker,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    order: str,
) -> None:
    """However they come: a later one makes way for them, and goes on when there is room. No line
    runs twice."""
    batches = {}
    for hours in order:
        batch = await start(client, jsonl([line(hours)]), window=f"{hours}h")
        batches[hours] = await reached(client, batch, "in_progress")
        first = sorted(batches)[:MAX_BATCHES]

        async def run() -> bool:
            """The first are held, and their lines are fed."""
            now_s, _ = await redis_client.time()
            held = set[str]()
            for name, each in batches.items():
                lease_ms: Any = await redis_client.hget(keys.of("batch", each.id), "lease")
                is_fed = await redis_client.exists(keys.of("job", line_job_id(each.id, 1)))
                held |= {name} if is_fed and int(lease_ms or 0) > now_s * 1000 else set()
            return held == set(first)  # noqa: B023

        await until(run)
    seen = list[str]()
    while len(seen) < len(batches):
        claimed = await idle_worker.claim()
        seen.append(job_text(claimed.job))
        await idle_worker.run(claimed)
    assert seen[:MAX_BATCHES] == first
    assert sorted(seen) == sorted(order)
    for batch in batches.values():
        assert (await ended(client, batch)).status == "completed"
    assert len(idle_worker.seen) == len(batches)


async def test_a_batch_is_validated_and_cancelled_while_others_run(
    client: AsyncOpenAI, idle_worker: FakeWorker, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """It waits for no place among those that run. Other gateways know that a feeder without room is
    alive, and go on taking batches."""
    for number in range(MAX_BATCHES):
        await start(client, jsonl([line(f"{number}")]))
        await idle_worker.claim()
    await redis_client.delete(keys.of("batches_fed"))

    async def is_fed() -> bool:
        return await redis_client.exists(keys.of("batches_fed")) == 1

    await until(is_fed)
    waiting = await start(client, jsonl([line("waiting")]))
    bad = await start(client, b"no JSON")
    assert (await ended(client, bad)).status == "failed"
    await reached(client, waiting, "in_progress")
    await client.batches.cancel(waiting.id)
    assert (await ended(client, waiting)).status == "cancelled"
    assert len(idle_worker.seen) == MAX_BATCHES


async def test_a_tenant_may_have_so_many_open_batches(
    store_setting: str, redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """The next is refused with 429, until one has ended."""
    settings = make_settings(redis_server.url, object_store=store_setting)
    await redis_client.set(keys.of("batches_fed"), 1)
    not_feeding = settings.model_copy(update={"feeds_batches": False})
    async with gateway_client(not_feeding) as client:
        batches = [await start(client, b"no JSON") for _ in range(MAX_OPEN)]
        with pytest.raises(openai.RateLimitError) as refused:
            await start(client, b"no JSON")
        assert refused.value.code == "tenant_quota"
        assert str(MAX_OPEN) in refused.value.message
        with running_gateway(settings):
            await ended(client, batches[0])
            await start(client, b"no JSON")


async def test_a_tenant_whose_files_are_full_starts_no_batch(
    client: AsyncOpenAI, redis_client: redis.asyncio.Redis
) -> None:
    """Its results would be further files."""
    for num_bytes in (2_500_000, 1_500_000):
        file = await client.files.create(file=("a", b"x" * num_bytes), purpose="batch")
    with pytest.raises(openai.RateLimitError) as refused:
        await client.batches.create(
            input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
        )
    assert refused.value.code == "tenant_quota"
    await client.files.delete(file.id)
    await start(client, jsonl([line("1")]))
