"""`batchway up` on the demo model, through the official client."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.questions import LONG_COUNT, MODEL, count
from tests.infra.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]

JSON = {"content-type": "application/json"}


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, question: str, **options: Any) -> str:
    """The greedy answer to one question."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        **options,
    )
    content = answer.choices[0].message.content
    assert isinstance(content, str)
    return content


def test_the_demo_model_answers_correctly(client: openai.OpenAI) -> None:
    assert ask(client, "Count from 17 to 23.") == count(17, 23)
    assert ask(client, "Spell the word lantern.") == "l-a-n-t-e-r-n"


def test_the_pieces_of_a_stream_join_to_the_answer(client: openai.OpenAI) -> None:
    """One finish reason, and the usage at the end, as requested."""
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Count from 5 to 30."}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == count(5, 30)
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 26
    assert sum(len(c.choices[0].delta.content or "") > 0 for c in chunks if c.choices) > 1


def test_completions_take_text_and_token_ids(client: openai.OpenAI) -> None:
    """Both forms of a prompt have the same answer. Token ids are returned on request."""
    by_text = client.completions.create(
        model=MODEL,
        prompt="1, 2, 3,",
        max_tokens=12,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    token_ids = by_text.choices[0].model_extra["token_ids"]  # type: ignore[index]
    prompt_ids = by_text.model_extra["prompt_token_ids"]  # type: ignore[index]
    by_ids = client.completions.create(model=MODEL, prompt=prompt_ids, max_tokens=12, temperature=0)
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert len(token_ids) == 12


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 3, "n": 2}])
def test_prompts_in_a_list_have_the_answers_of_single_calls(
    client: openai.OpenAI, sampling: dict[str, Any]
) -> None:
    """Choice by choice, greedy and with a seed."""
    prompts = [", ".join(map(str, range(i, i + 2 + i % 4))) + "," for i in range(2, 26)]
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 16, **sampling}
    listed = client.completions.create(prompt=prompts, **fields)
    assert [choice.index for choice in listed.choices] == list(range(len(listed.choices)))
    alone = [client.completions.create(prompt=prompt, **fields) for prompt in prompts]
    texts = [choice.text for answer in alone for choice in answer.choices]
    assert [choice.text for choice in listed.choices] == texts
    assert len(set(texts)) > 8
    assert listed.usage is not None
    usages = [answer.usage for answer in alone if answer.usage is not None]
    assert listed.usage.prompt_tokens == sum(usage.prompt_tokens for usage in usages)
    assert listed.usage.completion_tokens == sum(usage.completion_tokens for usage in usages)


def test_min_tokens_and_ignore_eos_delay_the_end(client: openai.OpenAI) -> None:
    for options in ({"ignore_eos": True}, {"min_tokens": 40}):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is 2 + 3?"}],
            max_tokens=40,
            temperature=0,
            extra_body=options,
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 40


async def test_the_async_client_streams_too(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Count from 3 to 12."}],
            temperature=0,
            stream=True,
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        whole = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Count from 3 to 12."}],
            temperature=0,
        )
    assert "".join(pieces) == whole.choices[0].message.content == count(3, 12)


ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
SPELL: Any = {
    "type": "function",
    "function": {
        "name": "spell",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}


@pytest.mark.parametrize(
    ("question", "name", "arguments", "result"),
    [
        ("What is 1234 + 5678?", "add", {"a": 1234, "b": 5678}, "6912"),
        ("Spell the word lantern.", "spell", {"word": "lantern"}, "l-a-n-t-e-r-n"),
    ],
)
def test_the_model_calls_a_tool_and_answers_with_its_result(
    client: openai.OpenAI, question: str, name: str, arguments: dict[str, Any], result: str
) -> None:
    """Of its own accord; whole and streamed are the same call."""
    messages: list[Any] = [{"role": "user", "content": question}]
    options: dict[str, Any] = {"model": MODEL, "tools": [ADD, SPELL], "temperature": 0}

    [whole] = client.chat.completions.create(messages=messages, **options).choices
    with client.chat.completions.stream(messages=messages, **options) as stream:
        [streamed] = stream.get_final_completion().choices

    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    assert whole.message.tool_calls
    assert streamed.message.tool_calls
    [call], [streamed_call] = whole.message.tool_calls, streamed.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)
    assert streamed_call.function.arguments == call.function.arguments
    messages += [whole.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    [answer] = client.chat.completions.create(messages=messages, **options).choices
    assert (answer.finish_reason, answer.message.content) == ("stop", result)


def test_the_model_answers_without_a_tool_where_none_helps(client: openai.OpenAI) -> None:
    assert ask(client, "Count from 17 to 23.", tools=[ADD, SPELL]) == count(17, 23)


class Sum(BaseModel):
    """A sum."""

    value: int = Field(ge=0, le=198)


def test_an_answer_within_a_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "What is 27 + 58?"}],
        temperature=0,
        response_format=Sum,
    )
    assert answer.choices[0].message.parsed == Sum(value=85)


@dataclass
class Stream:
    """The content of one raw SSE stream."""

    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    num_done: int = 0
    num_after_done: int = 0


async def read_stream(http: httpx.AsyncClient, question: str) -> Stream:
    stream = Stream()
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "stream": True,
    }
    async with http.stream("POST", "/v1/chat/completions", json=body, timeout=100) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            stream.num_after_done += stream.num_done
            if line == "data: [DONE]":
                stream.num_done += 1
                continue
            [choice] = json.loads(line[6:])["choices"]
            stream.text += choice["delta"].get("content") or ""
            if choice["finish_reason"]:
                stream.finish_reasons.append(choice["finish_reason"])
    return stream


async def test_64_concurrent_streams_have_the_answers_of_single_calls(
    stack: Stack, client: openai.OpenAI
) -> None:
    """Each has exactly one end, and the text of its greedy call alone."""
    questions = [f"Count from {7 * i} to {7 * i + 3 + i % 13}." for i in range(64)]
    async with httpx.AsyncClient(
        base_url=stack.url, limits=httpx.Limits(max_connections=None)
    ) as http:
        streams = await asyncio.gather(*(read_stream(http, q) for q in questions))
        for question, stream in zip(questions, streams, strict=True):
            assert (stream.num_done, stream.num_after_done) == (1, 0)
            assert stream.finish_reasons == ["stop"]
            alone = await asyncio.to_thread(ask, client, question)
            assert stream.text == alone


async def test_bad_requests_do_not_disturb_a_stream(stack: Stack) -> None:
    """Each error names the wrong parameter."""
    nonsense: list[tuple[dict[str, Any], int, str | None]] = [
        ({"model": "nobody"}, 404, "model"),
        ({"max_tokens": -2}, 400, "max_tokens"),
        ({"tools": [{"type": "function"}]}, 400, "tools.0.function"),
        ({"messages": "hello"}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "messages"),
        ({"wrong": 1}, 400, "wrong"),
    ]
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        stream = asyncio.create_task(read_stream(http, "Count from 100 to 130."))
        for change, status, param in nonsense:
            answer = await http.post("/v1/chat/completions", json=LONG_COUNT | change)
            assert answer.status_code == status
            assert answer.json()["error"]["param"] == param
        broken = await http.post("/v1/chat/completions", content=b'{"model": ', headers=JSON)
        assert broken.status_code == 400
        assert (await stream).text == count(100, 130)
