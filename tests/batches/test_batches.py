"""Batches over HTTP, with OpenAI's client: run, refused, cancelled, expired, taken over."""

import asyncio
import itertools
import json
import secrets
from collections.abc import Sequence
from typing import Any, Literal, cast

import httpx
import openai
import pytest
import redis.asyncio
from openai import AsyncOpenAI
from openai.types import Batch

from contract.functions import Functions
from contract.keys import Keys
from contract.starts import ANY_LANE, Starts
from infra.embedded_redis import EmbeddedRedis
from tests.batches.conftest import gateway_client, serving
from tests.clock import TEST_CLOCK
from tests.fleet import until
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import MODEL, FakeWorker, finds, publish_model

pytestmark = pytest.mark.anyio

Url = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
CHAT: Url = "/v1/chat/completions"
COMPLETIONS: Url = "/v1/completions"
DAY_S = 86_400


def line(custom_id: str, url: Url = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 20}
    if url == CHAT:
        body["messages"] = [{"role": "user", "content": custom_id}]
    else:
        body["prompt"] = custom_id
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body | fields}


def jsonl(lines: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in lines).encode()


async def start(
    client: AsyncOpenAI, content: bytes, url: Url = COMPLETIONS, *, window: str = "24h", **more: Any
) -> Batch:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id,
        endpoint=url,
        completion_window=cast(Any, window),  # OpenAI has one alone
        **more,
    )


async def reached(client: AsyncOpenAI, batch: Batch, *statuses: str) -> Batch:
    """The batch, once it has one of these states."""
    while batch.status not in statuses:
        await asyncio.sleep(0.02)
        batch = await client.batches.retrieve(batch.id)
    return batch


async def ended(client: AsyncOpenAI, batch: Batch) -> Batch:
    async with asyncio.timeout(60):
        return await reached(client, batch, "completed", "failed", "expired", "cancelled")


async def results(client: AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(each) for each in content.text.splitlines()]


def ids(found: Sequence[dict[str, Any]]) -> list[str]:
    return [each["custom_id"] for each in found]


@pytest.mark.parametrize(
    ("store_setting", "url"),
    [("directory", CHAT), ("s3", COMPLETIONS)],
    indirect=["store_setting"],
)
async def test_a_batch_answers_every_line(
    client: AsyncOpenAI, worker: FakeWorker, redis_client: redis.asyncio.Redis, url: Url, keys: Keys
) -> None:
    """In the order of its file, with the answers of calls; the jobs leave nothing in Redis. Blank
    lines, byte order marks and other names of a line are ignored, over several parts."""
    worker.script = finds(1, worker.script)
    asked = [line(f"id-{number}", url) | {"more": number} for number in range(150)]
    blank = itertools.cycle([b"\n", b"", b"  \t\r\n", b"\xef\xbb\xbf", b"\r\n\n"])
    content = b"".join(next(blank) + jsonl([each]) for each in asked) + b"\n\n"
    batch = await start(client, content, url, metadata={"run": "7"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"run": "7"})
    assert (batch.endpoint, batch.completion_window) == (url, "24h")
    assert batch.expires_at == batch.created_at + DAY_S
    batch = await ended(client, batch)
    assert (batch.status, batch.errors, batch.error_file_id) == ("completed", None, None)
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"completed": 150, "failed": 0, "total": 150}
    assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    found = await results(client, batch.output_file_id)
    assert ids(found) == ids(asked)
    used = [each["response"]["body"]["usage"] for each in found]
    assert batch.usage is not None
    assert batch.usage.input_tokens == sum(each["prompt_tokens"] for each in used) > 150
    assert batch.usage.output_tokens == sum(each["completion_tokens"] for each in used) > 150
    assert batch.usage.input_tokens_details.cached_tokens == 150
    assert {each["prompt_tokens_details"]["cached_tokens"] for each in used} == {1}
    for each in found:
        assert (each["error"], each["response"]["status_code"]) == (None, 200)
        choice = each["response"]["body"]["choices"][0]
        text = choice["message"]["content"] if url == CHAT else choice["text"]
        assert text == "Hello wörld!"
    output = await client.files.retrieve(str(batch.output_file_id))
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert {job.lane for job in worker.seen} == {"batch"}
    assert len({job.id for job in worker.seen}) == len(worker.seen) == 150

    async def are_forgotten() -> bool:
        return await redis_client.zcard(keys.of("jobs", "default")) == 0

    await until(are_forgotten)


async def test_a_line_that_cannot_run_is_in_the_error_file(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    """With the response that a call would get; the other lines are answered."""
    asked = [
        line("good"),
        line("parameter", temperature=9),
        line("unknown", temprature=1),
        line("long", prompt="x" * 600),
    ]
    batch = await ended(client, await start(client, jsonl(asked)))
    assert batch.request_counts is not None
    assert (batch.status, batch.request_counts.failed) == ("completed", 3)
    assert ids(await results(client, batch.output_file_id)) == ["good"]
    errors = await results(client, batch.error_file_id)
    assert ids(errors) == ["parameter", "unknown", "long"]
    for each, param in zip(errors, ("temperature", "temprature", "prompt"), strict=True):
        assert each["response"]["status_code"] == 400
        assert each["response"]["body"]["error"]["param"] == param


async def test_a_failed_job_is_in_the_error_file(
    client: AsyncOpenAI, idle_worker: FakeWorker
) -> None:
    batch = await start(client, jsonl([line("1")]))
    await idle_worker.finish(await idle_worker.claim(), 1, "engine_error", "broken")
    batch = await ended(client, batch)
    [error] = await results(client, batch.error_file_id)
    assert error["response"]["status_code"] == 500
    assert error["response"]["body"]["error"]["code"] == "engine_error"


GOOD = json.dumps(line("1")).encode()
BAD: list[tuple[bytes, list[tuple[int | None, str]]]] = [
    (b"", [(None, "empty_file")]),
    (b"\xef\xbb\xbf\n \n\r\n", [(None, "empty_file")]),
    (GOOD + b"\n\n" + GOOD, [(3, "duplicate_custom_id")]),
    (b'{"a": NaN}\n[]\n\xff\n', [(1, "invalid_json_line"), (2, "invalid_json_line")]),
    (jsonl([line("1"), line("2", CHAT)]), [(2, "mismatched_url")]),
    (jsonl([line("1"), line("2", model="other")]), [(2, "mismatched_model")]),
    (jsonl([line("1", stream=True)]), [(1, "unsupported_parameter")]),
    (jsonl([line("1") | {"method": "GET"}]), [(1, "invalid_method")]),
    (jsonl([line("1") | {"custom_id": 1}]), [(1, "invalid_custom_id")]),
    (jsonl([line("")]), [(1, "invalid_custom_id")]),
    (jsonl([line("1") | {"body": []}]), [(1, "invalid_body")]),
    (jsonl([line("1", model=None)]), [(1, "missing_required_parameter")]),
    (b"\n" + jsonl([line("1", model="none")]), [(2, "model_not_found")]),
    (jsonl([line("1", prompt="x" * 300_000)]), [(1, "line_too_long")]),
    (b"x\n" * 1200, [(number, "invalid_json_line") for number in range(1, 1001)]),
]


async def test_a_batch_waits_for_the_first_worker_of_its_model(
    client: AsyncOpenAI, functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Of a declared model, which nobody has announced: the batch asks for that worker, and does not
    fail meanwhile."""
    batch = await start(client, jsonl([line("1", model="late")]))
    starts = Starts(redis_client, keys)
    await until(lambda: starts.is_wanted("late", ANY_LANE))
    assert (await client.batches.retrieve(batch.id)).status == "validating"
    await publish_model(redis_client, keys, "late")
    late = FakeWorker(functions, "late")
    await late.beat()
    async with serving(late):
        done = await ended(client, batch)
    assert done.status == "completed"
    assert ids(await results(client, done.output_file_id)) == ["1"]


@pytest.mark.parametrize(("content", "expected"), BAD, ids=range(len(BAD)))
async def test_a_bad_file_fails_as_a_whole(
    client: AsyncOpenAI,
    worker: FakeWorker,
    content: bytes,
    expected: list[tuple[int | None, str]],
) -> None:
    """Each bad line is listed with its number, up to 1,000; no job is run."""
    batch = await ended(client, await start(client, content))
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    found = [(error.line, error.code) for error in batch.errors.data or []]
    assert found[: len(expected)] == expected
    assert len(found) <= 1000
    assert worker.seen == []


def job_text(job: Any) -> str:
    return bytes(job.prompt_ids).decode()


async def test_batches_are_listed_and_other_tenants_have_none(
    tenants: tuple[AsyncOpenAI, AsyncOpenAI], worker: FakeWorker
) -> None:
    """A batch or file of another tenant is the same 404 as an unknown one."""
    one, two = tenants
    started = [await start(one, jsonl([line("1")])) for _ in range(3)]
    listed = [batch.id async for batch in await one.batches.list(limit=2)]
    assert listed == [batch.id for batch in started][::-1]
    errors = []
    for asked in (started[0].id, "batch_" + secrets.token_hex(16), "x"):
        for ask in (two.batches.retrieve, two.batches.cancel):
            with pytest.raises(openai.NotFoundError) as refused:
                await ask(asked)
            errors.append(refused.value.body)
    assert all(error == errors[0] for error in errors)
    assert (await two.batches.list()).data == []
    with pytest.raises(openai.NotFoundError):
        await two.batches.create(
            input_file_id=started[0].input_file_id,
            endpoint=COMPLETIONS,
            completion_window="24h",
        )


async def test_a_batch_starts_at_its_time(
    client: AsyncOpenAI, base_url: str, worker: FakeWorker, redis_client: redis.asyncio.Redis
) -> None:
    """Its file is validated at once, no line runs before; its window, of any length, counts from
    the start, which may be moved until then, and lies before the end of the file."""
    await redis_client.set(TEST_CLOCK, "=1700000000000")
    file = await client.files.create(file=("in.jsonl", jsonl([line("a")])), purpose="batch")
    asked = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "90m"}
    async with httpx.AsyncClient(base_url=base_url) as http:
        late = await http.post("/v1/batches", json=asked | {"start_at": file.expires_at})
        assert (late.status_code, late.json()["error"]["param"]) == (400, "start_at")
        told = (await http.post("/v1/batches", json=asked | {"start_at": 1_700_000_600})).json()
        assert (told["start_at"], told["expires_at"]) == (1_700_000_600, 1_700_006_000)
        change = {"start_at": 1_700_000_300}
        moved = (await http.patch(f"/v1/batches/{told['id']}", json=change)).json()
        assert (moved["start_at"], moved["expires_at"]) == (1_700_000_300, 1_700_005_700)
        batch = await reached(client, await client.batches.retrieve(told["id"]), "in_progress")
        assert not worker.seen
        await redis_client.set(TEST_CLOCK, "=1700000300000")
        assert (await ended(client, batch)).status == "completed"
        again = await http.patch(f"/v1/batches/{told['id']}", json={"start_at": 1_700_000_900})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "already_started")
        none = await http.patch("/v1/batches/x", json={"start_at": 1_700_000_900})
        assert none.status_code == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        *[
            ({"completion_window": w}, "completion_window")
            for w in ("", "0h", "1", "1w", "31d", 60)
        ],
        ({"start_at": -1}, "start_at"),
        ({"start_at": 9e9}, "start_at"),
        ({"input_file_id": None}, "input_file_id"),
        ({"window": "24h"}, "window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, None),
    ],
)
async def test_a_bad_batch_is_refused_by_its_field(
    base_url: str, redis_client: redis.asyncio.Redis, fields: dict[str, Any], param: str | None
) -> None:
    body = {"input_file_id": "file-x", "endpoint": COMPLETIONS, "completion_window": "24h"}
    async with httpx.AsyncClient(base_url=base_url) as http:
        answer = await http.post("/v1/batches", json=body | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == (param or "output_expires_after.seconds")


async def test_a_batch_that_nobody_would_run_is_refused(
    store_setting: str, redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """By a gateway that runs none, until another one does; that is known for an hour."""
    settings = make_settings(redis_server.url, object_store=store_setting)
    other = settings.model_copy(update={"feeds_batches": False})
    async with gateway_client(other) as client:
        with pytest.raises(openai.InternalServerError) as refused:
            await start(client, jsonl([line("1")]))
        assert (refused.value.status_code, refused.value.code) == (503, "no_feeder")
        with running_gateway(settings):

            async def is_fed() -> bool:
                return await redis_client.exists(keys.of("batches_fed")) == 1

            await until(is_fed)
        assert (await start(client, jsonl([line("1")]))).status == "validating"
    assert 3_500_000 < await redis_client.pttl(keys.of("batches_fed")) <= 3_600_000
