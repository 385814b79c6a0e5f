"""Batches of other calls than those for text, and what is told of a batch's end."""

from typing import Any

import openai
import pytest
import redis.asyncio
from openai import AsyncOpenAI
from openai.types import Batch

from contract.functions import Functions
from contract.keys import Keys
from contract.model_cards import GenerationDefaults
from infra.embedded_redis import EmbeddedRedis
from tests.batches.conftest import serving
from tests.batches.test_batches import (
    DAY_S,
    Url,
    ended,
    ids,
    job_text,
    jsonl,
    line,
    results,
    start,
)
from tests.callbacks.receiver import SECRET, Answer, Receiver, always
from tests.callbacks.test_delivery import service
from tests.clock import TEST_CLOCK
from tests.gateway.fake_worker import FakeWorker, publish_model
from tests.gateway.vector_worker import (
    NUM_OUTPUTS,
    PLAIN,
    publish_vector_model,
    vector_of,
    vector_worker,
)

pytestmark = pytest.mark.anyio


async def test_the_models_own_settings_hold_in_a_batch(
    client: AsyncOpenAI, redis_client: redis.asyncio.Redis, functions: Functions, keys: Keys
) -> None:
    """Where a line gives none."""
    own = GenerationDefaults(temperature=0.6, top_k=20)
    await publish_model(redis_client, keys, generation=own)
    worker = FakeWorker(functions)
    await worker.beat()
    lines = [line("own"), line("given", temperature=0.1, top_k=0)]
    async with serving(worker):
        batch = await ended(client, await start(client, jsonl(lines)))
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
    url: Url = "/v1/embeddings"
    asked = [
        line(f"id-{number}") | {"url": url, "body": {"model": PLAIN, "input": [str(number), "b"]}}
        for number in range(70)
    ]
    async with serving(worker):
        batch = await ended(client, await start(client, jsonl(asked), url))
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
    client: AsyncOpenAI, worker: FakeWorker, redis_server: EmbeddedRedis, content: bytes, kind: str
) -> None:
    async with Receiver({"/": always(Answer())}) as receiver, service(redis_server):
        batch = await ended(client, await start_told(client, receiver, content))
        await check_told(receiver, batch, kind, batch.completed_at or batch.failed_at)


async def test_a_cancel_keeps_what_is_finished(
    client: AsyncOpenAI, idle_worker: FakeWorker, redis_server: EmbeddedRedis
) -> None:
    """The rest is in the error file as batch_cancelled; the worker is told to stop, and the
    receiver of the end."""
    asked = [line(f"{number}") for number in range(400)]
    async with Receiver({"/": always(Answer())}) as receiver, service(redis_server):
        batch = await start_told(client, receiver, jsonl(asked))
        for _ in range(100):
            await idle_worker.run(await idle_worker.claim())
        running = await idle_worker.claim()
        cancelled = await client.batches.cancel(batch.id)
        assert cancelled.status == "cancelling"
        await idle_worker.wait_until_ended(running)
        batch = await ended(client, batch)
        await check_told(receiver, batch, "batch.cancelled", batch.cancelled_at)
    assert batch.status == "cancelled"
    assert None not in (batch.cancelling_at, batch.cancelled_at)
    output = await results(client, batch.output_file_id)
    errors = await results(client, batch.error_file_id)
    assert sorted(ids(output)) == sorted(job_text(job) for job in idle_worker.seen[:100])
    assert {error["error"]["code"] for error in errors} == {"batch_cancelled"}
    cut_off = [each["custom_id"] for each in errors if "cut off" in each["error"]["message"]]
    assert cut_off == [job_text(running.job)], "only this one had begun"
    assert sorted(ids(output) + ids(errors)) == sorted(ids(asked))
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"completed": 100, "failed": 300, "total": 400}
    assert (await client.batches.cancel(batch.id)).status == "cancelled"


async def test_a_batch_that_is_cancelled_at_once_is_told(
    client: AsyncOpenAI, idle_worker: FakeWorker, redis_server: EmbeddedRedis
) -> None:
    async with Receiver({"/": always(Answer())}) as receiver, service(redis_server):
        batch = await start_told(client, receiver, jsonl([line("1")]))
        batch = await ended(client, await client.batches.cancel(batch.id))
        await check_told(receiver, batch, "batch.cancelled", batch.cancelled_at)


async def test_a_window_that_ends_keeps_what_is_finished(
    client: AsyncOpenAI,
    idle_worker: FakeWorker,
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
) -> None:
    """After 24 hours of the clock of Redis the rest is in the error file as batch_expired, and the
    receiver is told."""
    asked = [line(f"{number}") for number in range(300)]
    async with Receiver({"/": always(Answer())}) as receiver, service(redis_server):
        batch = await start_told(client, receiver, jsonl(asked))
        for _ in range(50):
            await idle_worker.run(await idle_worker.claim())
        await redis_client.set(TEST_CLOCK, (DAY_S + 1) * 1000)
        batch = await ended(client, batch)
        await check_told(receiver, batch, "batch.expired", batch.expired_at)
    assert batch.status == "expired"
    assert batch.expired_at is not None
    output = await results(client, batch.output_file_id)
    errors = await results(client, batch.error_file_id)
    assert (len(output), len(errors)) == (50, 250)
    assert {error["error"]["code"] for error in errors} == {"batch_expired"}
    assert sorted(ids(output) + ids(errors)) == sorted(ids(asked))


@pytest.mark.parametrize("more", [{"payload": "full"}, {"events": ["job.started"]}])
async def test_a_callback_of_a_batch_has_one_event(
    client: AsyncOpenAI, more: dict[str, Any]
) -> None:
    callback = {"url": "http://127.0.0.1:1/", "secret": SECRET, **more}
    with pytest.raises(openai.BadRequestError) as refused:
        await start(client, jsonl([line("1")]), extra_body={"callback": callback})
    assert refused.value.param == "callback"
