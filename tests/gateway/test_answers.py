"""Answers of both endpoints, whole and streaming, as OpenAI's own client reads them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.fakes import encode_text
from tests.gateway.fake_worker import MODEL, FakeWorker

pytestmark = pytest.mark.anyio

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT = {"model": MODEL, "messages": MESSAGES}
PROMPT_IDS = encode_text("user: Hi\nassistant: ")


@pytest.fixture
async def client(gateway_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    base_url = f"{gateway_url}/v1"
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key="none", max_retries=0, timeout=20
    ) as client:
        yield client


async def test_a_chat_is_answered_whole(worker: FakeWorker, client: openai.AsyncOpenAI) -> None:
    """The messages pass through the model's template; text, usage and ids come back."""
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Hello wörld!", "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(PROMPT_IDS)
    assert answer.usage.completion_tokens == len("Hello wörld!".encode())
    [job] = worker.seen
    assert job.prompt_ids == PROMPT_IDS
    assert answer.id == "chatcmpl-" + job.id.removeprefix("job-")


async def test_a_chat_is_streamed(worker: FakeWorker, client: openai.AsyncOpenAI) -> None:
    """Role first, a chunk for each event, usage last where asked."""
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    contents = [chunk.choices[0].delta.content for chunk in chunks[1:-1]]
    assert contents == ["Hello", " wörld", "!"]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == len(PROMPT_IDS) + 13


async def test_a_completion_is_answered_whole_and_streamed(
    worker: FakeWorker, client: openai.AsyncOpenAI
) -> None:
    """Text, a list of one text and token ids are the same prompt."""
    for prompt in ("ab", ["ab"], [97, 98], [[97, 98]]):
        answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=20)
        assert answer.choices[0].text == "Hello wörld!"
    assert {job.prompt_ids for job in worker.seen} == {(97, 98)}
    stream = await client.completions.create(model=MODEL, prompt="ab", stream=True)
    texts = [chunk.choices[0].text async for chunk in stream]
    assert texts == ["Hello", " wörld", "!"]


async def test_the_synchronous_client_works_as_well(worker: FakeWorker, gateway_url: str) -> None:
    """One client, both endpoints, streaming and not."""

    def talk() -> list[str | None]:
        with openai.OpenAI(
            base_url=f"{gateway_url}/v1", api_key="none", max_retries=0, timeout=20
        ) as client:
            whole = client.chat.completions.create(model=MODEL, messages=MESSAGES)
            stream = client.completions.create(model=MODEL, prompt="ab", stream=True)
            text = "".join(chunk.choices[0].text for chunk in stream)
            return [whole.choices[0].message.content, text]

    assert await asyncio.to_thread(talk) == ["Hello wörld!", "Hello wörld!"]
