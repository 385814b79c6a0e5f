"""A tiny model behind a gateway and a worker: its tokens, their log probabilities, and calls of
tools, which it does not know."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from contract.connection import connect
from contract.functions import Functions
from contract.keys import Keys
from contract.library import ensure_library
from infra.embedded_redis import EmbeddedRedis
from tests.fleet import Caller, fleet
from tests.gateway.conftest import make_settings, running_gateway
from tests.tiny_models import make_model, save_tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.campaign]

FAMILY = "qwen2_moe"
TEMPLATE = """
{%- for message in messages %}{{- '<|start|>' + message.role + '\\n' }}{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '</s>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{% endif %}"""

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 99},
                "b": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
SPELL: Any = {"type": "function", "function": {"name": "spell", "strict": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts with a shared expert."""
    folder = save_tiny_model(FAMILY, tmp_path_factory.mktemp(FAMILY), max_position_embeddings=4096)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
async def url(redis_server: EmbeddedRedis, folder: Path) -> AsyncIterator[str]:
    """The address of a gateway whose worker serves the model, in steps of few tokens."""
    engine = {"model_path": str(folder), "device": "cpu", "max_num_batched_tokens": 8}
    settings: dict[str, Any] = {
        "engine": engine,
        "engine_module": "workers.engine_process.engine_loop",
    }
    keys = Keys("test")
    async with connect(redis_server.url, Keys("test")) as client:
        await client.flushall()
        await ensure_library(client)
        async with fleet(redis_server.url, 1, None, **settings):
            await Caller(Functions(client, keys), client, keys).num_workers(1)
            with running_gateway(make_settings(redis_server.url)) as url:
                yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        yield client


async def test_answers_are_those_of_generate(client: openai.AsyncOpenAI, folder: Path) -> None:
    """Concurrent prompts of mixed lengths, on the replaced modules."""
    from tests.workers.model.parity import NUM_OUTPUT, expected_of

    expected = expected_of(FAMILY, folder)
    more = {"ignore_eos": True, "return_token_ids": True}
    answers = await asyncio.gather(
        *(
            client.completions.create(
                model="m", prompt=prompt, max_tokens=NUM_OUTPUT, temperature=0, extra_body=more
            )
            for prompt in expected.prompts
        )
    )
    for number, answer in enumerate(answers):
        found: Any = answer.choices[0]
        expected.check(number, found.token_ids)


async def test_an_echo_is_scored_as_teacher_forced(url: str) -> None:
    """The prompt and output, in chunks, against log_softmax over the whole text."""
    import torch

    prompt = [7 + 13 * i % 200 for i in range(30)]
    body = {"model": "m", "prompt": prompt, "max_tokens": 4, "n": 2, "ignore_eos": True}
    body |= {"echo": True, "logprobs": 2, "return_token_ids": True}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        answer = (await http.post("/v1/completions", json=body)).json()
    model = make_model(FAMILY)
    for choice in answer["choices"]:
        ids = torch.tensor([prompt + choice["token_ids"]])
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(ids).logits[0].float(), -1)
        expected = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]
        first, *found = choice["logprobs"]["token_logprobs"]
        assert first is None
        torch.testing.assert_close(torch.tensor(found), expected, atol=2e-3, rtol=0)


async def test_a_required_call_its_result_and_the_next_answer(client: openai.AsyncOpenAI) -> None:
    """Whole and streamed are the same call; the result is taken back into the conversation."""
    messages: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
    options: dict[str, Any] = {
        "model": "m",
        "tools": [ADD, SPELL],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "seed": 5,
    }
    whole = await client.chat.completions.create(messages=messages, **options)

    [choice] = whole.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "add"
    assert json.loads(call.function.arguments).keys() == {"a", "b"}

    async with client.chat.completions.stream(messages=messages, **options) as stream:
        parts = [
            event.arguments_delta
            async for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        ]
        streamed = await stream.get_final_completion()
    [again] = streamed.choices[0].message.tool_calls or []
    assert (again.id != call.id, again.function.name) == (True, "add")
    assert again.function.arguments == call.function.arguments
    assert "".join(parts) == call.function.arguments

    messages.append(choice.message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
    answer = await client.chat.completions.create(
        model="m", messages=messages, tools=[ADD], tool_choice="none", max_tokens=4
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason in ("stop", "length")
