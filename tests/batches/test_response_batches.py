"""Batches of responses: what their lines may ask for, and what is stored beside the output."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import redis.asyncio
from openai import AsyncOpenAI
from openai.types.responses import Response

from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.batches.conftest import gateway_client, serving
from tests.batches.test_batches import Url, ended, ids, jsonl, results, start
from tests.clock import TEST_CLOCK
from tests.fleet import until
from tests.gateway.conftest import make_settings
from tests.gateway.fake_worker import MODEL, FakeWorker, finds, publish_model
from tests.gateway.test_responses_api import TOOL, thinks_and_calls

pytestmark = pytest.mark.anyio

RESPONSES: Url = "/v1/responses"
DAY_MS = 86_400_000


def line(custom_id: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "input": f"I am {custom_id}"} | fields
    return {"custom_id": custom_id, "method": "POST", "url": RESPONSES, "body": body}


async def run(client: AsyncOpenAI, *lines: dict[str, Any]) -> Any:
    """The batch of these lines, once it has ended."""
    return await ended(client, await start(client, jsonl(lines), RESPONSES))


async def bodies(client: AsyncOpenAI, batch: Any) -> list[Response]:
    """The responses in a batch's output."""
    found = await results(client, batch.output_file_id)
    return [Response.model_validate(each["response"]["body"]) for each in found]


@pytest.fixture
async def http(base_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=base_url) as client:
        yield client


async def test_a_batch_responds_to_every_line(
    client: AsyncOpenAI, worker: FakeWorker, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """With whole responses, in the order of its file; unless they are to be stored, nothing of them
    is left."""
    worker.script = finds(1, worker.script)
    asked = [line(f"id-{number}", metadata={"number": str(number)}) for number in range(70)]
    batch = await run(client, *asked)
    assert (batch.endpoint, batch.status, batch.error_file_id) == (RESPONSES, "completed", None)
    assert ids(await results(client, batch.output_file_id)) == ids(asked)
    used = [each.usage for each in await bodies(client, batch)]
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert getattr(batch.usage, name) == sum(getattr(each, name) for each in used) > 70
    assert batch.usage is not None
    assert batch.usage.input_tokens_details.cached_tokens == 70
    found = await bodies(client, batch)
    for number, response in enumerate(found):
        assert (response.status, response.output_text) == ("completed", "Hello wörld!")
        assert response.metadata == {"number": str(number)}
        assert (response.model_extra or {})["store"] is False
        assert response.usage is not None
        assert response.usage.output_tokens == len("Hello wörld!".encode())
    assert {job.lane for job in worker.seen} == {"batch"}

    async def are_forgotten() -> bool:
        return await redis_client.zcard(keys.of("jobs", "default")) == 0

    await until(are_forgotten)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(found[0].id)


@pytest.mark.parametrize("store_setting", ["directory", "s3"], indirect=True)
async def test_a_stored_response_is_that_of_its_line(
    client: AsyncOpenAI, http: httpx.AsyncClient, worker: FakeWorker
) -> None:
    """The same bytes from GET, from its job, and in the output file; also of reasoning and calls.
    Long ones are in the object store."""
    worker.script = thinks_and_calls
    asked = [line("tools", store=True, tools=[TOOL]), line("long", store=True, input="x" * 400)]
    batch = await run(client, *asked)
    lines = (await client.files.content(str(batch.output_file_id))).content.splitlines()
    for raw, response in zip(lines, await bodies(client, batch), strict=True):
        got = await http.get(f"/v1/responses/{response.id}")
        assert b'"body":' + got.content + b"}" in raw
        job = await http.get(f"/v1/jobs/{response.id.replace('resp_', 'job-')}")
        assert b'"result":' + got.content in job.content
        assert got.json()["store"] is True
    assert [item.type for item in (await bodies(client, batch))[0].output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]


async def test_a_stored_response_outlives_its_batch(
    client: AsyncOpenAI, worker: FakeWorker, redis_client: redis.asyncio.Redis
) -> None:
    """For as long as the responses of calls, from its end on."""
    [response] = await bodies(client, await run(client, line("1", store=True)))
    await redis_client.set(TEST_CLOCK, DAY_MS - 60_000)
    assert (await client.responses.retrieve(response.id)).status == "completed"


async def test_chains_go_through_batches(client: AsyncOpenAI, idle_worker: FakeWorker) -> None:
    """A line goes on from a stored response, and a call from a stored line."""
    async with serving(idle_worker):
        first = await client.responses.create(model=MODEL, input="One")
        asked = line("two", previous_response_id=first.id, store=True)
        [second] = await bodies(client, await run(client, asked))
        third = await client.responses.create(
            model=MODEL, input="Three", previous_response_id=second.id
        )
    assert second.previous_response_id == first.id
    listed = [item async for item in await client.responses.input_items.list(third.id, order="asc")]
    texts = [item.model_dump()["content"][0]["text"] for item in listed]
    assert texts == ["One", first.output_text, "I am two", second.output_text, "Three"]


@pytest.mark.parametrize("field", ["background", "stream"])
async def test_what_a_file_of_responses_may_not_ask(
    client: AsyncOpenAI, worker: FakeWorker, field: str
) -> None:
    """The field that contradicts a batch fails it before a line is run; false is accepted."""
    asked = [line("1", **{field: False}), line("2", **{field: True})]
    batch = await run(client, *asked)
    assert (batch.status, worker.seen) == ("failed", [])
    [error] = batch.errors.data
    assert (error.line, error.param, error.code) == (2, f"body.{field}", "unsupported_parameter")
    assert (await run(client, asked[0])).status == "completed"


async def test_a_line_that_cannot_respond_is_in_the_error_file(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    """With the error of a call, which names the field."""
    unknown = f"resp_0-{'0' * 32}"
    bad: dict[str, tuple[dict[str, Any], int]] = {
        "previous_response_id": ({"previous_response_id": unknown}, 404),
        "store": ({"store": "yes"}, 400),
        "conversation": ({"conversation": "c"}, 400),
        "input": ({"input": "x" * 600}, 400),
        "input.0.content.0.type": (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            400,
        ),
        "text.format.schema": (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}},
            400,
        ),
    }
    asked = [line(param, **fields) for param, (fields, _) in bad.items()]
    batch = await run(client, line("good"), *asked)
    assert (batch.status, batch.request_counts.failed) == ("completed", len(bad))
    for each, (_, status) in zip(
        await results(client, batch.error_file_id), bad.values(), strict=True
    ):
        error = each["response"]["body"]["error"]
        assert (each["response"]["status_code"], error["param"]) == (status, each["custom_id"])


async def test_another_gateway_goes_on_with_responses(
    store_setting: str,
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    idle_worker: FakeWorker,
) -> None:
    """A gateway that ends gives its lease back; the next finds the parts and the jobs: no line
    responds twice, and all are stored."""
    settings = make_settings(redis_server.url, object_store=store_setting)
    asked = [line(f"{number}", store=True) for number in range(100)]
    async with gateway_client(settings) as client:
        batch = await start(client, jsonl(asked), RESPONSES)
        for _ in range(80):
            await idle_worker.run(await idle_worker.claim())
    async with gateway_client(settings) as client, serving(idle_worker):
        batch = await ended(client, batch)
        output, found = await results(client, batch.output_file_id), await bodies(client, batch)
        stored = [await client.responses.retrieve(response.id) for response in found]
    assert (batch.status, ids(output)) == ("completed", ids(asked))
    assert len({job.id for job in idle_worker.seen}) == len(idle_worker.seen) == 100
    assert stored == found
    assert [response.output_text for response in found] == ["Hello wörld!"] * 100


async def test_lines_that_refer_to_one_response_count_each(
    client: AsyncOpenAI,
    http: httpx.AsyncClient,
    worker: FakeWorker,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
) -> None:
    """A line with more than a body may have is refused, and leaves the others alone."""
    await publish_model(redis_client, keys, context_length=400_000)
    text = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 100_000}]}
    body = {"model": MODEL, "input": [text, {"role": "user", "content": "Hi"}]}
    answer = await http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    page = await http.get(f"/v1/responses/{answer.json()['id']}/input_items?order=asc")
    item = {"id": page.json()["data"][0]["id"]}
    asked = [
        line(f"id-{n}", input=[*[item] * n, {"role": "user", "content": "?"}]) for n in range(6)
    ]

    batch = await run(client, *asked)

    assert ids(await results(client, batch.output_file_id)) == ["id-0", "id-1", "id-2"]
    refused = await results(client, batch.error_file_id)
    assert ids(refused) == ["id-3", "id-4", "id-5"]
    assert {each["response"]["status_code"] for each in refused} == {413}
    assert max(len(job.response) for job in worker.seen) < 262_144


async def test_a_chat_of_a_line_is_stored_if_it_asks_for_it(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    """With the line's answer and metadata; of other lines nothing is left to be listed."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "metadata": {"a": "b"}}
    url: Url = "/v1/chat/completions"
    asked = [
        {"custom_id": str(kept), "method": "POST", "url": url, "body": body | {"store": kept}}
        for kept in (True, False)
    ]
    batch = await ended(client, await start(client, jsonl(asked), url))
    answer = (await results(client, batch.output_file_id))[0]["response"]["body"]
    [found] = [each async for each in client.chat.completions.list(metadata={"a": "b"})]
    assert (found.id, found.choices[0].message.content) == (answer["id"], "Hello wörld!")
    assert (await client.chat.completions.retrieve(answer["id"])).id == answer["id"]
