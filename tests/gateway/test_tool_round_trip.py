"""Tools through the `openai` client, a gateway, a worker and a tiny model that knows no tool."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from contract.functions import Functions
from infra.embedded_redis import EmbeddedRedis
from tests.fleet import Caller, fleet
from tests.gateway.conftest import make_settings, running_gateway
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.anyio

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
    folder = save_tiny_model(
        "llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=4096
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
async def client(
    functions: Functions,
    redis_client: Any,
    keys: Any,
    redis_server: EmbeddedRedis,
    folder: Path,
) -> AsyncIterator[openai.AsyncOpenAI]:
    settings: dict[str, Any] = {
        "engine": {"model_path": str(folder), "device": "cpu"},
        "engine_module": "workers.engine_process.engine_loop",
    }
    async with fleet(redis_server.url, 1, None, **settings):
        await Caller(functions, redis_client, keys).num_workers(1)
        with running_gateway(make_settings(redis_server.url)) as url:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
                yield client


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
