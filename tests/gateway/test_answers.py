"""Answers of both endpoints, whole and streaming, as OpenAI's own client reads them."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.fakes import encode_text
from tests.gateway.fake_worker import MODEL, FakeWorker, finds, says
from tests.streams import whole_stream

pytestmark = pytest.mark.anyio

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
PROMPT_IDS = encode_text("user: Hi\nassistant: ")


@pytest.fixture
async def client(gateway_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    base_url = f"{gateway_url}/v1"
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key="none", max_retries=0, timeout=20
    ) as client:
        yield client


async def test_a_chat_is_answered_whole_and_streamed(
    worker: FakeWorker, client: openai.AsyncOpenAI
) -> None:
    """The messages pass through the model's template. Of a stream the role is first, then a chunk
    for each event, usage last if requested."""
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Hello wörld!", "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(PROMPT_IDS)
    assert answer.usage.completion_tokens == len("Hello wörld!".encode())
    [job] = worker.seen
    assert job.prompt_ids == PROMPT_IDS
    assert answer.id == "chatcmpl-" + job.id.removeprefix("job-")
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    first, *chunks, last, usage = [chunk async for chunk in stream]
    assert first.choices[0].delta.role == "assistant"
    contents = [chunk.choices[0].delta.content for chunk in (*chunks, last)]
    assert contents == ["Hello", " wörld", "!"]
    assert last.choices[0].finish_reason == "stop"
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.total_tokens == len(PROMPT_IDS) + 13


async def test_a_completion_is_answered_whole_and_streamed(
    worker: FakeWorker, client: openai.AsyncOpenAI
) -> None:
    """Text, a list of one text and token ids are the same prompt."""
    for prompt in ("ab", ["ab"], [97, 98], [[97, 98]]):
        answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=20)
        assert answer.choices[0].text == "Hello wörld!"
    assert {job.prompt_ids for job in worker.seen} == {(97, 98)}
    stream = await client.completions.create(model=MODEL, prompt="ab", stream=True)
    assert [chunk.choices[0].text async for chunk in stream] == ["Hello", " wörld", "!"]


@pytest.mark.parametrize("key", ["", "plain"])
async def test_a_stream_without_an_idempotency_key_is_plain(
    idle_worker: FakeWorker, http: httpx.AsyncClient, key: str
) -> None:
    """It has no ids and no comments, because load generators parse each chunk as `data:`. With a
    key both are sent, the id after the data."""
    body = {"model": MODEL, "prompt": "ab", "stream": True}
    headers = {"idempotency-key": key} if key else {}
    async with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        claimed = await idle_worker.claim()
        parts = answer.aiter_raw()
        first = await anext(parts)  # a heartbeat: nothing else has happened
        assert first.strip() == (b": waiting" if key else b"")
        await idle_worker.run(claimed, says("a", "b"))
        rest = b"".join([part async for part in parts])
    *events, done = [event.strip() for event in rest.split(b"\n\n") if event.strip()]
    lines = [[line for line in event.split(b"\n") if line[:1] != b":"] for event in events]
    assert done == b"data: [DONE]"
    assert [line[0][:6] for line in lines] == [b"data: "] * 2
    assert [line[1][:4] for line in lines if line[1:]] == [b"id: "] * (2 if key else 0)


async def test_usage_can_be_in_every_chunk(worker: FakeWorker, http: httpx.AsyncClient) -> None:
    """`continuous_usage_stats`, also after a stream is resumed."""
    worker.script = finds(1, says("a", "b", "c"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": MODEL, "prompt": "ab", "n": 2, "stream": True, "stream_options": options}
    headers = {"idempotency-key": "continuous"}
    whole = (await http.post("/v1/completions", json=body, headers=headers)).text
    chunks = whole_stream(whole)
    counts = [chunk.data["usage"]["completion_tokens"] for chunk in chunks]
    details = [chunk.data["usage"]["prompt_tokens_details"] for chunk in chunks]
    assert details == [{"cached_tokens": 1}] * len(chunks)
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == counts[-2]
    headers["last-event-id"] = next(chunk.id for chunk in chunks if chunk.id)
    rest = (await http.post("/v1/completions", json=body, headers=headers)).text
    assert whole.endswith(rest)
    assert len(rest) < len(whole)
