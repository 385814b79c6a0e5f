"""A gateway that is killed while it feeds a batch: no line is lost, none is answered twice."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis.asyncio
from openai import AsyncOpenAI
from openai.types import Batch

from contract.batches import PART_LINES
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.batches.test_batches import ended, ids, jsonl, line, results, start
from tests.fakes import HashModelOptions
from tests.fleet import WorkerProcess, until

pytestmark = [pytest.mark.anyio, pytest.mark.campaign]

NUM_LINES = 300


@contextmanager
def gateway_process(redis_url: str, store: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A gateway that can be killed, and its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "infra", "gateway", "--port=0", "--namespace=test"],
        env=os.environ | {"REDIS_URL": redis_url, "BATCHWAY_OBJECT_STORE": store},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process, process.stderr:
        said = next(line for line in process.stderr if "listening on" in line)
        try:
            yield process, f"http://127.0.0.1:{said.split()[-1]}"
        finally:
            process.kill()


def asked() -> list[dict[str, Any]]:
    """Greedy lines, and one that cannot run."""
    lines = [
        line(f"id-{number}", model="m", prompt=f"prompt {number}", temperature=0)
        for number in range(NUM_LINES - 1)
    ]
    return [*lines, line("bad", model="m", temperature=9)]


def texts(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(each["custom_id"], each["response"]["body"]["choices"][0]["text"]) for each in found]


async def files_of(client: AsyncOpenAI, batch: Batch) -> tuple[Any, Any]:
    assert batch.status == "completed"
    output = await results(client, batch.output_file_id)
    return output, await results(client, batch.error_file_id)


@pytest.mark.e2e
async def test_a_batch_outlives_the_gateway_that_feeds_it(
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    store_setting: str,
) -> None:
    """After a kill -9 another gateway goes on: each line is once in the results, with the output
    of an undisturbed run."""
    url, content = redis_server.url, jsonl(asked())
    worker = WorkerProcess(url, HashModelOptions(step_s=0.005))
    try:

        async def is_served() -> bool:
            return bool(await redis_client.exists(keys.of("model", "m")))

        await until(is_served)
        with gateway_process(url, store_setting) as (process, base_url):
            async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none") as client:
                whole = await files_of(client, await ended(client, await start(client, content)))
                batch = await start(client, content)

                async def is_under_way() -> bool:  # one part is recorded
                    seen = await client.batches.retrieve(batch.id)
                    assert seen.request_counts is not None
                    return seen.request_counts.completed >= PART_LINES

                await until(is_under_way)
                process.kill()
                process.wait()
        status = await redis_client.hget(keys.of("batch", batch.id), "status")
        assert status == b"in_progress"
        with gateway_process(url, store_setting) as (_, base_url):
            async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none") as client:
                again = await files_of(client, await ended(client, batch))
    finally:
        await asyncio.shield(worker.close())
    assert ids(again[0]) + ids(again[1]) == ids(asked())
    assert texts(again[0]) == texts(whole[0])
    assert [error["response"]["status_code"] for error in again[1]] == [400]
