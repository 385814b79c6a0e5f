"""Batches of other calls than those for text, and what is told of a batch's end."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import redis.asyncio
from openai import AsyncOpenAI
from openai.types import Batch

from contract.connection import end_tasks
from contract.functions import Functions
from contract.keys import Keys
from contract.model_cards import GenerationDefaults
from infra.embedded_redis import EmbeddedRedis
from tests.batches.test_batches import DAY_S, Url, ended, ids, jsonl, line, results, start
from tests.callbacks.receiver import SECRET, Answer, Receiver, always
from tests.callbacks.test_delivery import service
from tests.clock import TEST_CLOCK
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import FakeWorker, publish_model
from tests.gateway.vector_worker import (
    NUM_OUTPUTS,
    PLAIN,
    publish_vector_model,
    vector_of,
    vector_worker,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
async def calling(
    store_setting: str, redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis
) -> AsyncIterator[AsyncOpenAI]:
    """A client of a gateway that permits callbacks to this machine."""
    settings = make_settings(
        redis_server.url, object_store=store_setting, callback_allow=["127.0.0.1"]
    )
    with running_gateway(settings) as url:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield client


async def test_the_models_own_settings_hold_in_a_batch(
    client: AsyncOpenAI, redis_client: redis.asyncio.Redis, functions: Functions, keys: Keys
) -> None:
    """Where a line gives none."""
    own = GenerationDefaults(temperature=0.6, top_k=20)
    await publish_model(redis_client, keys, generation=own)
    worker = FakeWorker(functions)
    await worker.beat()
    serving = asyncio.create_task(worker.serve())

    lines = [line("own"), line("given", temperature=0.1, top_k=0)]
    batch = await ended(client, await start(client, jsonl(lines)))
    await end_tasks(serving)

    assert batch.status == "completed"
    found = {(job.params.temperature, job.params.top_k) for job in worker.seen}
    assert found == {(0.6, 20), (0.1, 0)}


async def test_a_batch_embeds(
    client: AsyncOpenAI, redis_client: redis.asyncio.Redis, functions: Functions, keys: Keys
) -> None:
    """Each line's response has the vectors of its texts."""
    await publish_vector_model(redis_client, keys, PLAIN)
    worker = vector_worker(functions, PLAIN)
    await worker.beat()
    serving = asyncio.create_task(worker.serve())
    url: Url = "/v1/embeddings"
    asked = [
        {
            "custom_id": f"id-{number}",
            "method": "POST",
            "url": url,
            "body": {"model": PLAIN, "input": [f"text {number}", "other"]},
        }
        for number in range(70)
    ]
    batch = await ended(client, await start(client, jsonl(asked), url))
    await end_tasks(serving)
    assert (batch.status, batch.error_file_id) == ("completed", None)
    found = await results(client, batch.output_file_id)
    assert ids(found) == ids(asked)
    assert batch.usage is not None
    used = sum(each["response"]["body"]["usage"]["prompt_tokens"] for each in found)
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (used, 0)
    of_text = {job.id: job.prompts for job in worker.seen}
    for each in found:
        body = each["response"]["body"]
        prompts = of_text[each["response"]["request_id"]]
        vectors = [vector_of(prompt, NUM_OUTPUTS) for prompt in prompts]
        assert [entry["embedding"] for entry in body["data"]] == vectors


async def start_told(client: AsyncOpenAI, receiver: Receiver, content: bytes) -> Batch:
    """A batch whose end the receiver is told."""
    callback = {"url": receiver.url("/"), "secret": SECRET}
    return await start(client, content, extra_body={"callback": callback})


async def check_told(receiver: Receiver, batch: Batch, kind: str, at: int | None) -> None:
    """One message, signed, in the form of OpenAI's webhooks, without results. `at`: Unix time."""
    await receiver.until(lambda: len(receiver.messages) == 1)
    [message] = receiver.messages
    assert receiver.forged == []
    assert message.id == f"{batch.id}-1"
    assert message.body == {
        "id": f"evt_{batch.id}-1",
        "object": "event",
        "type": kind,
        "created_at": at,
        "data": {"id": batch.id},
    }


@pytest.mark.parametrize(
    ("content", "kind"),
    [(jsonl([line("1")]), "batch.completed"), (b"no JSON", "batch.failed")],
    ids=["completed", "failed"],
)
async def test_the_end_of_a_batch_is_told(
    calling: AsyncOpenAI, worker: FakeWorker, redis_server: EmbeddedRedis, content: bytes, kind: str
) -> None:
    async with Receiver({"/": always(Answer())}) as receiver, service(redis_server):
        batch = await ended(calling, await start_told(calling, receiver, content))
        await check_told(receiver, batch, kind, batch.completed_at or batch.failed_at)


async def test_a_cancelled_batch_is_told(
    calling: AsyncOpenAI, idle_worker: FakeWorker, redis_server: EmbeddedRedis
) -> None:
    async with Receiver({"/": always(Answer())}) as receiver, service(redis_server):
        batch = await start_told(calling, receiver, jsonl([line("1")]))
        batch = await ended(calling, await calling.batches.cancel(batch.id))
        await check_told(receiver, batch, "batch.cancelled", batch.cancelled_at)


async def test_an_expired_batch_is_told(
    calling: AsyncOpenAI,
    idle_worker: FakeWorker,
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
) -> None:
    """After 24 hours of the clock of Redis, one of its two lines has been answered."""
    async with Receiver({"/": always(Answer())}) as receiver, service(redis_server):
        batch = await start_told(calling, receiver, jsonl([line("1"), line("2")]))
        await idle_worker.run(await idle_worker.claim())
        await redis_client.set(TEST_CLOCK, (DAY_S + 1) * 1000)
        batch = await ended(calling, batch)
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        await check_told(receiver, batch, "batch.expired", batch.expired_at)


@pytest.mark.parametrize("more", [{"payload": "full"}, {"events": ["job.started"]}])
async def test_a_callback_of_a_batch_has_one_event(
    calling: AsyncOpenAI, more: dict[str, Any]
) -> None:
    callback = {"url": "http://127.0.0.1:1/", "secret": SECRET, **more}
    with pytest.raises(openai.BadRequestError) as refused:
        await start(calling, jsonl([line("1")]), extra_body={"callback": callback})
    assert refused.value.param == "callback"
