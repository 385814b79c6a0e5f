"""JSON inside of strings that callers send: it has the bounds of bodies, or is refused by name."""

from typing import Any

import httpx
import pytest

from infra.embedded_redis import EmbeddedRedis
from tests.gateway.fake_worker import MODEL, FakeWorker
from tests.gateway.strings_in_strings import fuzz

pytestmark = pytest.mark.anyio

DEEP = [*range(1, 40), *range(190, 210), 500, *range(930, 970), 1_000, 3_000]
DAMAGED = [
    *('{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"\\udfff": 1}', '{"a": -Infinity}'),
    *('{"a": 1, "a": 2}', "{", "\\", "\x00", f'{{"a": {"9" * 4_301}}}'),
]
LARGE = f'{{"a": {"9" * 4_300}}}'  # the most digits that Python reads


def chat(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "a"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 2} | more


def with_arguments(text: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "1"}
    return chat(messages=[{"role": "user", "content": "a"}, called, result])


async def quote(http: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    """Prepares the call as each way into the queue does."""
    return await http.post("/v1/quote", json={"endpoint": "/v1/chat/completions", "body": body})


async def test_past_arguments_of_any_depth_are_taken(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """A model may have written them, and its answer is a part of the conversation."""
    texts = ['{"a": ' + "[" * depth + "]" * depth + "}" for depth in DEEP]
    for text in [*texts, *DAMAGED, LARGE]:
        answer = await quote(http, with_arguments(text))
        if len(text) < 400:
            assert answer.status_code == 200, (text, answer.text)
        elif answer.status_code != 200:  # it is too long for the context of 512 tokens
            assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("name", ["guided_json", "structured_outputs"])
async def test_a_schema_as_text_has_the_bounds_of_bodies(
    worker: FakeWorker, http: httpx.AsyncClient, name: str
) -> None:
    """Its depth is that of a body at most, and all else that a body must not have is refused."""
    for depth in DEEP:
        text = '{"type": "array", "items": ' * depth + "true" + "}" * depth
        given = text if name == "guided_json" else {"json": text}
        answer = await quote(http, chat(**{name: given}))
        if depth > 32:
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].endswith("it is not JSON")
        else:
            assert answer.status_code == 200, (depth, answer.text)
    for text in DAMAGED:
        given = text if name == "guided_json" else {"json": text}
        answer = await quote(http, chat(**{name: given}))
        assert answer.status_code == 400, text


async def test_a_schema_with_a_large_integer_is_refused_in_a_response(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """A response keeps its tools, in a form with integers of 64 bits."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 2**70}}}
    tools = [{"type": "function", "name": "f", "parameters": parameters, "strict": False}]
    body = {"model": MODEL, "input": "a", "tools": tools, "max_output_tokens": 16}
    answer = await http.post("/v1/responses", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"


@pytest.mark.campaign
async def test_no_string_is_an_error_of_the_servers(redis_server: EmbeddedRedis) -> None:
    """3,000 bodies of one seed; `python -m tests.gateway.strings_in_strings` does more."""
    statuses = await fuzz(redis_server.url, 3_000, seed=1)
    assert statuses[200] > 500
    assert statuses[400] > 300
