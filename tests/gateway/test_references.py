"""What a body refers to counts as if it were written out."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.jobs import MAX_GRAMMAR_BYTES
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.gateway.conftest import answered, error_of, gateway_client
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model

pytestmark = pytest.mark.anyio

MAX_BYTES = 100_000  # of a body
_HEAD = 200  # bytes of an item beside its text, at most


@pytest.fixture
async def small(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis, keys: Keys, worker: FakeWorker
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway whose bodies have at most MAX_BYTES, with a model of a long context."""
    await publish_model(redis_client, keys, context_length=100_000)
    async with gateway_client(redis_server.url, max_body_bytes=MAX_BYTES) as client:
        client.timeout = httpx.Timeout(60)
        yield client


def reasoning(num_bytes: int) -> dict[str, Any]:
    """An item that few templates show, so that the context seldom bounds it."""
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * num_bytes}]}


async def respond(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post("/v1/responses", json={"model": MODEL, "input": "Hi"} | fields)


async def stored(
    http: httpx.AsyncClient, *items: dict[str, Any], **fields: Any
) -> tuple[str, list[str]]:
    """A response with these items: its id and the items' ids."""
    body = {"model": MODEL, "input": [*items, {"role": "user", "content": "Hi"}]}
    id_ = (await answered(http, "/v1/responses", body, **fields))["id"]
    page = (await http.get(f"/v1/responses/{id_}/input_items?order=asc&limit=100")).json()
    return id_, [item["id"] for item in page["data"]]


def assert_too_large(answer: httpx.Response) -> None:
    assert error_of(answer) == (413, "input", "body_too_large")
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("times", [1, 2, 9, 30, 800])
@pytest.mark.parametrize("size", [10, 3_000, 40_000, 90_000])
@pytest.mark.each_value
async def test_items_count_as_often_as_they_are_referred_to(
    small: httpx.AsyncClient, worker: FakeWorker, size: int, times: int
) -> None:
    """By one item or by several of one response; the job has no more than a body may."""
    _, (one, hi) = await stored(small, reasoning(size))
    num_seen = len(worker.seen)

    answer = await respond(small, input=[*[{"id": one}] * times, {"id": hi}])

    if size * times > MAX_BYTES:
        assert_too_large(answer)
        assert len(worker.seen) == num_seen
    elif (size + _HEAD) * times < MAX_BYTES:
        assert answer.status_code == 200, answer.text
        assert size * times < len(worker.seen[-1].response) < MAX_BYTES + 2_000


async def test_items_of_many_responses_count_together(small: httpx.AsyncClient) -> None:
    """No response by itself has too many."""
    items = [(await stored(small, reasoning(MAX_BYTES // 10)))[1][0] for _ in range(12)]
    ends = {
        n: await respond(
            small, input=[*[{"id": i} for i in items[:n]], {"role": "user", "content": "x"}]
        )
        for n in (9, 11, 12)
    }
    assert ends[9].status_code == 200, ends[9].text
    assert_too_large(ends[11])
    assert_too_large(ends[12])


async def test_a_chain_ends_where_a_body_would(small: httpx.AsyncClient) -> None:
    """Each response has all items of the one before it."""
    size, id_, num = MAX_BYTES // 5, None, 0
    while num < 8:
        answer = await respond(
            small,
            input=[reasoning(size), {"role": "user", "content": "x"}],
            previous_response_id=id_,
        )
        if answer.status_code != 200:
            break
        id_, num = answer.json()["id"], num + 1
    assert_too_large(answer)
    assert num == 4
    both = await respond(small, input="y", previous_response_id=id_)
    assert both.status_code == 200, both.text


async def test_a_response_is_read_once(
    small: httpx.AsyncClient, redis_client: redis.asyncio.Redis
) -> None:
    """However often it is referred to, also where it is continued."""
    id_, ids = await stored(small, reasoning(10), reasoning(20))

    async def num_reads(**fields: Any) -> int:
        await redis_client.config_resetstat()
        await answered(small, "/v1/responses/input_tokens", {"model": MODEL}, **fields)
        return int((await redis_client.info("commandstats"))["cmdstat_fcall_ro"]["calls"])

    once = await num_reads(input=[{"id": ids[0]}, {"id": ids[-1]}])
    assert await num_reads(input=[{"id": i} for i in ids] * 40) == once
    assert await num_reads(input=[{"id": i} for i in ids] * 40, previous_response_id=id_) == once


@pytest.mark.parametrize("times", [1, 2])
async def test_what_is_stored_counts_as_stored(
    small: httpx.AsyncClient, redis_client: redis.asyncio.Redis, keys: Keys, times: int
) -> None:
    """An item counts against its tenant's bytes in each response that has it: as an item, and as
    prompt of a byte a token here."""
    _, (one, _) = await stored(small, reasoning(40_000))
    rest = [{"role": "user", "content": "x"}]

    async def num_stored(items: list[dict[str, Any]]) -> int:
        key = keys.of("stored", "tenants")
        before = int(await redis_client.hget(key, "default") or 0)
        answer = await respond(small, input=[*items, *rest])
        assert answer.status_code == 200, answer.text
        return int(await redis_client.hget(key, "default") or 0) - before

    without = await num_stored([])
    more = await num_stored([{"id": one}] * times) - without
    assert 2 * times * 40_000 < more < 2 * times * (40_000 + _HEAD) + 1_000


@pytest.mark.parametrize("num_each", [1, 2, 8])
@pytest.mark.parametrize("num_prompts", [1, 3])
@pytest.mark.parametrize("length", [100, 6_000, 15_000])
@pytest.mark.each_pair
async def test_an_echo_counts_in_every_choice(
    small: httpx.AsyncClient, num_each: int, num_prompts: int, length: int
) -> None:
    """Token ids as well as text, alone and in lists."""
    num_bytes = length * num_prompts * num_each
    for prompt in ([[97] * length] * num_prompts, ["a" * length] * num_prompts):
        if len(str(prompt)) > MAX_BYTES:
            continue
        body = {"model": MODEL, "prompt": prompt, "n": num_each, "echo": True, "max_tokens": 30}
        answer = await small.post("/v1/completions", json=body)
        if num_bytes > MAX_BYTES:
            assert error_of(answer)[:2] == (400, "echo")
        else:
            assert answer.status_code == 200, answer.text
            assert sum(c["text"].count("a") for c in answer.json()["choices"]) == num_bytes


def _doubling(keyword: str) -> dict[str, Any]:
    """Each schema refers twice to the next: written out they would be 2 ** 40."""

    def twice(number: int) -> dict[str, Any]:
        refs = [{"$ref": f"#/$defs/d{number}"}] * 2
        if keyword == "properties":
            return {"type": "object", "properties": dict(zip("ab", refs, strict=True))}
        return {keyword: refs} | ({"type": "array"} if keyword == "prefixItems" else {})

    definitions = {f"d{number}": twice(number + 1) for number in range(40)}
    return twice(0) | {"$defs": definitions | {"d40": {"type": "string"}}}


@pytest.mark.parametrize("keyword", ["properties", "anyOf", "allOf", "oneOf", "prefixItems"])
@pytest.mark.parametrize("is_tool", [False, True])
async def test_references_that_double_cost_no_more_than_one_schema_may(
    http: httpx.AsyncClient, idle_worker: FakeWorker, keyword: str, is_tool: bool
) -> None:
    """They become a small grammar, or are refused; the gateway answers the next call."""
    schema = _doubling(keyword)
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    if is_tool:
        function = {"name": "f", "parameters": schema, "strict": True}
        body["tools"] = [{"type": "function", "function": function}]
    else:
        named = {"name": "a", "schema": schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    job = {"endpoint": "/v1/chat/completions", "body": body}
    answer = await http.post("/v1/jobs", json=job)
    assert answer.status_code in (202, 400), answer.text
    if answer.status_code == 202:
        assert len((await idle_worker.claim()).job.params.grammar) < MAX_GRAMMAR_BYTES
    assert (await http.get("/livez")).status_code == 200
