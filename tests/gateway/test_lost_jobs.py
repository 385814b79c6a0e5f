"""What Redis loses in a power cut, as callers see it: the end of a log, or a whole job."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.function_types import Verdict
from contract.keys import Keys
from tests.gateway.fake_worker import MODEL, FakeWorker, says

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab"}


async def lose_event(
    client: redis.asyncio.Redis, keys: Keys, worker: FakeWorker, job_id: str, number: int
) -> None:
    """Restores the log's end and its records to an earlier state, as a power cut does."""
    log = keys.of("log", job_id)
    kept: Any = await client.xrange(log, "-", f"{number - 1}-0")
    async with client.pipeline(transaction=True) as transaction:
        transaction.delete(log)
        for entry_id, fields in kept:
            transaction.xadd(log, fields, id=entry_id)
        transaction.hdel(keys.of("run", worker.incarnation), job_id)
        last_hash = kept[-1][1][b"s"].split(b" ")[1]
        transaction.hset(keys.of("job", job_id), mapping={"next": number, "hash": last_hash})
        await transaction.execute()


@pytest.mark.parametrize("again", ["b", "B"])
async def test_events_of_two_logs_are_never_joined(
    idle_worker: FakeWorker,
    http: httpx.AsyncClient,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    again: str,
) -> None:
    """If a log lost its end and the same event is written again, readers notice nothing. If
    another is, the stream resets and starts again; a synchronous stream ends in an error."""
    call = asyncio.create_task(http.post("/v1/completions", json=BODY | {"stream": True}))
    claimed = await idle_worker.claim()
    job_id = claimed.job.id
    first, second, third = says("a", "b", "c")(claimed.job)
    rewritten = says("a", again, "c")(claimed.job)[1]
    async with http.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        lines = answer.aiter_lines()
        await idle_worker.say(claimed, 1, first)
        await idle_worker.say(claimed, 2, second)
        while '"text":"b"' not in await anext(lines):
            pass
        await lose_event(redis_client, keys, idle_worker, job_id, 2)
        assert await idle_worker.say(claimed, 2, rewritten) == (Verdict.OK, 3)
        assert await idle_worker.say(claimed, 3, third) == (Verdict.OK, 4)
        await idle_worker.finish(claimed, 4)
        rest = [line async for line in lines if line.startswith(("data: {", "event: st"))]
    texts = [match for line in rest for match in re.findall(r'"text":"(\w)"', line)]
    assert texts == (["c"] if again == "b" else ["a", "B", "c"])
    assert ("event: stream_reset" in rest) == (again == "B")
    assert ('"code":"stream_reset"' in (await call).text) == (again == "B")


async def lose_job(client: redis.asyncio.Redis, keys: Keys, job_id: str) -> None:
    await client.delete(keys.of("job", job_id), keys.of("log", job_id))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_whose_job_is_lost_is_told_to_retry(
    idle_worker: FakeWorker,
    http: httpx.AsyncClient,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    stream: bool,
) -> None:
    """ "This job does not exist" would tell it nothing, because it asked for no job."""
    call = asyncio.create_task(http.post("/v1/completions", json=BODY | {"stream": stream}))
    claimed = await idle_worker.claim()
    await lose_job(redis_client, keys, claimed.job.id)
    answer = await call
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "job_lost")
    assert answer.headers["x-dropped-reason"] == "broker_unavailable"
    assert 1 <= int(answer.headers["retry-after"]) <= 2
    again = asyncio.create_task(http.post("/v1/completions", json=BODY | {"stream": stream}))
    await idle_worker.run(await idle_worker.claim(), says("a"))
    assert (await again).status_code == 200


async def test_a_stream_whose_job_is_lost_midway_ends_in_an_error(
    idle_worker: FakeWorker,
    http: httpx.AsyncClient,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
) -> None:
    """The status line has been sent, so the last event is the error."""
    async with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
        lines = answer.aiter_lines()
        claimed = await idle_worker.claim()
        await idle_worker.say(claimed, 1, says("a")(claimed.job)[0])
        while '"text":"a"' not in await anext(lines):
            pass
        await lose_job(redis_client, keys, claimed.job.id)
        rest = [line async for line in lines if line.startswith("data: ")]
    assert [json.loads(line[6:])["error"]["code"] for line in rest[:-1]] == ["job_lost"]
    assert rest[-1] == "data: [DONE]"
