"""The limits of a tenant: for the lines of a batch, and for batches themselves."""

from collections.abc import AsyncIterator

import httpx
import pytest
import redis.asyncio
from openai import AsyncOpenAI

from contract.api_keys import ApiKeys, KeyTerms
from contract.keys import Keys
from tests.batches.test_batches import (
    COMPLETIONS,
    ended,
    ids,
    job_text,
    jsonl,
    line,
    results,
    start,
)
from tests.gateway.fake_worker import MODEL, FakeWorker

pytestmark = pytest.mark.anyio


@pytest.fixture
async def narrow(
    base_url: str, redis_client: redis.asyncio.Redis, keys: Keys
) -> AsyncIterator[AsyncOpenAI]:
    """A client whose unfinished jobs may have 100 tokens in all."""
    terms = KeyTerms(tenant="narrow", concurrent_tokens=100)
    key, _ = await ApiKeys(redis_client, keys).create(terms)
    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key, max_retries=0) as client:
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
