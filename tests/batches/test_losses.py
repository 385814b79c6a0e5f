"""Batches whose input, parts, records or jobs' objects are lost while they run: no line is lost."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from openai import AsyncOpenAI
from openai.types import Batch

from contract.batches import PART_LINES
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.batches.conftest import gateway_client, serving
from tests.batches.test_batches import ended, ids, jsonl, line, results, start
from tests.fleet import until
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio

NUM_LINES = 2 * PART_LINES


@pytest.fixture(params=[1])
async def client(
    request: pytest.FixtureRequest,
    store_setting: str,
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
) -> AsyncIterator[AsyncOpenAI]:
    """Of a gateway that runs this many parts at a time, and puts prompts into the object store."""
    settings = make_settings(
        redis_server.url,
        object_store=store_setting,
        max_batch_jobs=request.param * PART_LINES,
        object_min_bytes=64,
    )
    async with gateway_client(settings) as client:
        yield client


async def run_first_part(client: AsyncOpenAI, worker: FakeWorker) -> Batch:
    """A batch of two parts, of which one is recorded."""
    batch = await start(client, jsonl([line(f"{number}") for number in range(NUM_LINES)]))
    for _ in range(PART_LINES):
        await worker.run(await worker.claim())

    async def is_recorded() -> bool:
        counts = (await client.batches.retrieve(batch.id)).request_counts
        return counts is not None and counts.completed == PART_LINES

    await until(is_recorded)
    return batch


def unfinished(store: str) -> list[Path]:
    """The objects that were not written to their end."""
    return list(Path(store).rglob("*.part"))


@pytest.mark.parametrize("left", [None, b"", b"{"], ids=["missing", "empty", "cut off"])
async def test_the_lines_of_a_lost_part_run_again(
    client: AsyncOpenAI, idle_worker: FakeWorker, store_setting: str, left: bytes | None
) -> None:
    """The batch is complete, in the order of its file; the failed join leaves nothing behind."""
    batch = await run_first_part(client, idle_worker)
    [part] = (Path(store_setting) / batch.id).glob("output-0-*")
    part.unlink()
    if left is not None:
        part.write_bytes(left)
    async with serving(idle_worker):
        batch = await ended(client, batch)
    assert (batch.status, batch.error_file_id) == ("completed", None)
    output = await results(client, batch.output_file_id)
    assert ids(output) == [f"{number}" for number in range(NUM_LINES)]
    assert unfinished(store_setting) == []


async def test_batches_that_cannot_go_on_leave_their_places_to_others(
    store_setting: str,
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    worker: FakeWorker,
) -> None:
    """The parts of four batches are unreadable; a younger one is complete."""
    settings = make_settings(redis_server.url, object_store=store_setting)
    await redis_client.set(keys.of("batches_fed"), 1)
    async with gateway_client(settings.model_copy(update={"feeds_batches": False})) as client:
        for _ in range(4):
            broken = await start(client, jsonl([line("1")]))
            await redis_client.hset(keys.of("batch_parts", broken.id), "0", "?")
        batch = await start(client, jsonl([line("1")]))
        with running_gateway(settings):
            assert (await ended(client, batch)).status == "completed"


async def test_a_cancelled_batch_lists_the_lines_of_a_part_that_redis_has_lost(
    client: AsyncOpenAI, idle_worker: FakeWorker, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Each line is in one of its files."""
    batch = await run_first_part(client, idle_worker)
    await redis_client.hdel(keys.of("batch_parts", batch.id), "0")
    await client.batches.cancel(batch.id)
    batch = await ended(client, batch)
    assert batch.status == "cancelled"
    found = [await results(client, each) for each in (batch.output_file_id, batch.error_file_id)]
    assert sorted(ids(found[0]) + ids(found[1])) == sorted(map(str, range(NUM_LINES)))


async def lose_prompt(worker: FakeWorker, store: str) -> None:
    """Ends a job whose object is gone: Redis has lost that the job was deleted."""
    claimed = await worker.claim()
    (Path(store) / claimed.job.id / "prompt").unlink()
    await worker.run(claimed)


async def test_a_line_whose_job_has_lost_its_object_runs_again_once(
    client: AsyncOpenAI, idle_worker: FakeWorker, store_setting: str
) -> None:
    """It succeeds then; where its job loses its object again, it has failed."""
    asked = jsonl([line("1", prompt="x" * 100, echo=True)])
    for loses_again in (False, True):
        batch = await start(client, asked)
        await lose_prompt(idle_worker, store_setting)
        if loses_again:
            await lose_prompt(idle_worker, store_setting)
        else:
            await idle_worker.run(await idle_worker.claim())
        batch = await ended(client, batch)
        assert batch.status == "completed"
        assert ids(await results(client, batch.output_file_id)) == ["1"] * (not loses_again)
        codes = [
            error["response"]["body"]["error"]["code"]
            for error in await results(client, batch.error_file_id)
        ]
        assert codes == ["payload_lost"] * loses_again


def long_lines() -> list[dict[str, Any]]:
    """More than are read of a file at once."""
    return [line(f"{number} {'x' * 400}", prompt="y" * 400) for number in range(600)]


@pytest.mark.campaign
@pytest.mark.parametrize("client", [2], indirect=True)
async def test_a_batch_whose_file_is_deleted_fails_with_the_results_of_what_runs(
    client: AsyncOpenAI, idle_worker: FakeWorker, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Its error says so. All lines that were read have results, and none of their jobs is left."""
    asked = long_lines()
    batch = await start(client, jsonl(asked))
    running = await idle_worker.claim()
    await client.files.delete(batch.input_file_id)

    async def is_lost() -> bool:  # all other parts that were read have ended
        nonlocal batch
        await idle_worker.beat(running)
        batch = await client.batches.retrieve(batch.id)
        counts = batch.request_counts
        return counts is not None and counts.completed == 3 * PART_LINES

    async with serving(idle_worker):
        await until(is_lost)
        assert batch.status == "in_progress"
        await idle_worker.run(running)
        batch = await ended(client, batch)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [error.code for error in batch.errors.data or []] == ["file_not_found"]
    output = await results(client, batch.output_file_id)
    assert ids(output) == ids(asked)[: 4 * PART_LINES]
    assert len(idle_worker.seen) == len(output)
    assert await redis_client.zcard(keys.of("jobs", "default")) == 0


async def test_a_batch_is_cancelled_though_its_file_is_deleted(
    client: AsyncOpenAI, idle_worker: FakeWorker
) -> None:
    """What is finished is kept; the lines that were read are in the error file; none runs on."""
    asked = long_lines()
    batch = await start(client, jsonl(asked))
    for _ in range(10):
        await idle_worker.run(await idle_worker.claim())
    running = await idle_worker.claim()
    await client.batches.cancel(batch.id)
    await client.files.delete(batch.input_file_id)
    await idle_worker.wait_until_ended(running)
    batch = await ended(client, batch)
    assert (batch.status, batch.errors) == ("cancelled", None)
    output = await results(client, batch.output_file_id)
    errors = await results(client, batch.error_file_id)
    assert len(output) == 10
    assert len(errors) >= PART_LINES - 10
    assert {error["error"]["code"] for error in errors} == {"batch_cancelled"}
