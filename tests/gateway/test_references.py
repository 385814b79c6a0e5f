"""What a body refers to counts as if it were written out."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.gateway.conftest import make_settings, running_gateway
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
    with running_gateway(make_settings(redis_server.url, max_body_bytes=MAX_BYTES)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            yield client


def reasoning(num_bytes: int) -> dict[str, Any]:
    """An item that no template shows, so that the context does not bound it."""
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * num_bytes}]}


async def respond(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post("/v1/responses", json={"model": MODEL, "input": "Hi"} | fields)


async def stored(
    http: httpx.AsyncClient, *items: dict[str, Any], **fields: Any
) -> tuple[str, list[str]]:
    """A response with these items: its id and the items' ids."""
    hi = {"role": "user", "content": "Hi"}
    answer = await respond(http, input=[*items, hi], **fields)
    assert answer.status_code == 200, answer.text
    id_ = answer.json()["id"]
    page = (await http.get(f"/v1/responses/{id_}/input_items?order=asc&limit=100")).json()
    return id_, [item["id"] for item in page["data"]]


def assert_too_large(answer: httpx.Response) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (413, "body_too_large"), answer.text
    assert (error["param"], error["type"]) == ("input", "invalid_request_error")


@pytest.mark.parametrize("times", [1, 2, 9, 30, 800])
@pytest.mark.parametrize("size", [10, 3_000, 40_000, 90_000])
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
        answer = await small.post("/v1/responses/input_tokens", json={"model": MODEL} | fields)
        assert answer.status_code == 200, answer.text
        return int((await redis_client.info("commandstats"))["cmdstat_fcall_ro"]["calls"])

    once = await num_reads(input=[{"id": ids[0]}, {"id": ids[-1]}])
    assert await num_reads(input=[{"id": i} for i in ids] * 40) == once
    assert await num_reads(input=[{"id": i} for i in ids] * 40, previous_response_id=id_) == once
