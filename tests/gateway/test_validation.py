"""Validation of bodies: each error names its code and parameter, and none repeats the body."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from infra.embedded_redis import EmbeddedRedis
from tests.fakes import hash_tokenizer
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import CONTEXT_LENGTH, MODEL, FakeWorker, publish_model, says

pytestmark = pytest.mark.anyio

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "Hi"}
VALUE, UNSUPPORTED, UNKNOWN = "invalid_value", "unsupported_parameter", "unknown_parameter"
MISSING = "missing_required_parameter"

BOTH: list[tuple[dict[str, Any], str, str]] = [
    ({"model": 3}, "model", VALUE),
    ({"model": ""}, "model", VALUE),
    ({"temperature": 2.1}, "temperature", VALUE),
    ({"temperature": "1"}, "temperature", VALUE),
    ({"temperature": True}, "temperature", VALUE),
    ({"top_p": 0}, "top_p", VALUE),
    ({"top_p": 1.01}, "top_p", VALUE),
    ({"top_k": -2}, "top_k", VALUE),
    ({"min_p": -0.1}, "min_p", VALUE),
    ({"presence_penalty": 2.5}, "presence_penalty", VALUE),
    ({"frequency_penalty": -2.5}, "frequency_penalty", VALUE),
    ({"repetition_penalty": 0}, "repetition_penalty", VALUE),
    ({"logit_bias": {"1": 101}}, "logit_bias.1", VALUE),
    ({"logit_bias": {"x": 1}}, "logit_bias", VALUE),
    ({"logit_bias": {"259": 1}}, "logit_bias", VALUE),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", VALUE),
    ({"seed": 2**63}, "seed", VALUE),
    ({"seed": 1.5}, "seed", VALUE),
    ({"n": 9}, "n", VALUE),
    ({"n": 0}, "n", VALUE),
    ({"n": True}, "n", VALUE),
    ({"stop": ["a"] * 5}, "stop", VALUE),
    ({"stop": ""}, "stop", VALUE),
    ({"stop": ["é" * 33]}, "stop", VALUE),
    ({"stop": [1]}, "stop", VALUE),
    ({"stop_token_ids": [259]}, "stop_token_ids", VALUE),
    ({"stop_token_ids": [-1]}, "stop_token_ids", VALUE),
    ({"max_tokens": 0}, "max_tokens", VALUE),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens", VALUE),
    ({"stream": "yes"}, "stream", VALUE),
    ({"stream_options": {"include_usage": True}}, "stream_options", VALUE),
    ({"user": 7}, "user", VALUE),
    ({"metadata": {"a": 1}}, "metadata.a", VALUE),
    ({"service_tier": "scale"}, "service_tier", VALUE),
    ({"return_token_ids": 1}, "return_token_ids", VALUE),
    ({"suffix": "a"}, "suffix", UNSUPPORTED),
    ({"prompt_logprobs": 21}, "prompt_logprobs", VALUE),
    ({"prompt_logprobs": -1}, "prompt_logprobs", VALUE),
    ({"prompt_logprobs": True}, "prompt_logprobs", VALUE),
    ({"guided_json": 3}, "guided_json", VALUE),
    ({"guided_json": "{"}, "guided_json", VALUE),
    ({"guided_json": {"x-guidance": {}}}, "guided_json.x-guidance", VALUE),
    ({"guided_regex": "(?=a)"}, "guided_regex", VALUE),
    ({"guided_regex": "a" * 65_537}, "guided_regex", VALUE),
    ({"guided_choice": []}, "guided_choice", VALUE),
    ({"guided_choice": ["a", 1]}, "guided_choice.1", VALUE),
    ({"guided_grammar": "start: ("}, "guided_grammar", VALUE),
    ({"guided_grammar": 'start: "a"\n%llguidance {}'}, "guided_grammar", VALUE),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", VALUE),
    ({"guided_regex": "a", "min_tokens": 1}, "min_tokens", VALUE),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", VALUE),
    ({"structured_outputs": {}}, "structured_outputs", VALUE),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", VALUE),
    ({"structured_outputs": {"whitespace_pattern": "a"}}, "structured_outputs", VALUE),
    (
        {"structured_outputs": {"json": {"properties": {"a": {"type": "strin"}}}}},
        "structured_outputs.json.properties.a",
        VALUE,
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type", VALUE),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", VALUE),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "response_format.json_schema.name",
        VALUE,
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "a",
                    "strict": True,
                    "schema": {"items": {"type": "array", "contains": {"const": 1}}},
                },
            }
        },
        "response_format.json_schema.schema.items",
        VALUE,
    ),
    ({"no_such_thing": 1}, "no_such_thing", UNKNOWN),
]
_TOOL = {"type": "function", "function": {"name": "add"}}
_TOOL_OF_TWO_WORDS = {"type": "function", "function": {"name": "a b"}}
_BAD_TOOL = {
    "type": "function",
    "function": {"name": "add", "strict": True, "parameters": {"type": "object", "if": {}}},
}
_CHOICE = {"type": "function", "function": {"name": "other"}}
_ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [_TOOL, _CHOICE]},
}
_CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
OF_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", VALUE),
    ({"messages": "Hi"}, "messages", VALUE),
    ({"messages": ["Hi"]}, "messages.0", VALUE),
    ({"messages": [{"content": "Hi"}]}, "messages.0.role", MISSING),
    ({"messages": [{"role": "user"}]}, "messages.0.content", MISSING),
    ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", VALUE),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", VALUE),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content", VALUE),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages.0.role", VALUE),
    ({"messages": [{"role": "function", "content": "a"}]}, "messages.0.role", UNSUPPORTED),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.tool_call_id", VALUE),
    (
        {"messages": [{"role": "user", "content": "a", "tool_call_id": "c"}]},
        "messages.0.tool_call_id",
        VALUE,
    ),
    (
        {"messages": [{"role": "user", "content": "a", "reasoning_content": "so"}]},
        "messages.0.reasoning_content",
        VALUE,
    ),
    (
        {"messages": [{"role": "user", "content": "a", "tool_calls": [_CALL]}]},
        "messages.0.tool_calls",
        VALUE,
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content.0.type",
        UNSUPPORTED,
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
        "messages.0.content",
        VALUE,
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "messages.0.tool_calls.0.id",
        MISSING,
    ),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", VALUE),
    ({"logprobs": 1}, "logprobs", VALUE),
    ({"top_logprobs": 2}, "top_logprobs", VALUE),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", VALUE),
    ({"prompt": "Hi"}, "prompt", UNKNOWN),
    ({"echo": True}, "echo", UNKNOWN),
    ({"tools": [{}]}, "tools.0.type", MISSING),
    ({"tools": [_TOOL, _TOOL]}, "tools", VALUE),
    ({"tools": [_TOOL] * 129}, "tools", VALUE),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools.0.function.name",
        VALUE,
    ),
    ({"tools": [_TOOL], "response_format": {"type": "json_object"}}, "response_format", VALUE),
    ({"tools": [_TOOL], "tool_choice": "any"}, "tool_choice", VALUE),
    ({"tools": [_TOOL], "tool_choice": _CHOICE}, "tool_choice.function.name", VALUE),
    (
        {"tools": [_TOOL], "tool_choice": _ALLOWED},
        "tool_choice.allowed_tools.tools.1.function.name",
        VALUE,
    ),
    ({"tool_choice": "required"}, "tool_choice", VALUE),
    ({"tools": [_BAD_TOOL], "tool_choice": "required"}, "tools.0.function.parameters", VALUE),
    ({"tools": [_TOOL], "tool_choice": "required", "min_tokens": 2}, "min_tokens", VALUE),
    ({"functions": [{}]}, "functions", UNSUPPORTED),
    ({"reasoning_effort": "low"}, "reasoning_effort", UNSUPPORTED),
    ({"modalities": ["text", "audio"]}, "modalities", UNSUPPORTED),
    ({"audio": {}}, "audio", UNSUPPORTED),
]
OF_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": 3}, "prompt", VALUE),
    ({"prompt": ""}, "prompt", VALUE),
    ({"prompt": []}, "prompt", VALUE),
    ({"prompt": [1, "b"]}, "prompt", VALUE),
    ({"prompt": [[]]}, "prompt", VALUE),
    ({"prompt": [""]}, "prompt", VALUE),
    ({"prompt": ["a", ""]}, "prompt.1", VALUE),
    ({"prompt": ["a", 1]}, "prompt.1", VALUE),
    ({"prompt": ["a", None]}, "prompt.1", VALUE),
    ({"prompt": [[1], []]}, "prompt.1", VALUE),
    ({"prompt": [[1], [2], [3, "b"]]}, "prompt.2", VALUE),
    ({"prompt": [[1], [2], [3], [259]]}, "prompt.3", VALUE),
    ({"prompt": [[1], [[2]]]}, "prompt.1", VALUE),
    ({"prompt": ["a"] * 65}, "prompt", VALUE),
    ({"prompt": ["a"] * 43, "n": 3}, "n", VALUE),
    ({"prompt": ["a", "b" * 600]}, "prompt.1", "context_length_exceeded"),
    ({"prompt": ["a", "b" * 510], "min_tokens": 4}, "min_tokens", VALUE),
    ({"prompt": [True]}, "prompt", VALUE),
    ({"prompt": [259]}, "prompt", VALUE),
    ({"prompt": [-1]}, "prompt", VALUE),
    ({"logprobs": 21}, "logprobs", VALUE),
    ({"logprobs": True}, "logprobs", VALUE),
    ({"best_of": 2}, "best_of", UNSUPPORTED),
    ({"echo": 1}, "echo", VALUE),
    ({"echo": False, "max_tokens": 0}, "max_tokens", VALUE),
    ({"echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens", VALUE),
    ({"suffix": "x"}, "suffix", UNSUPPORTED),
    ({"messages": []}, "messages", UNKNOWN),
]


def error_of(answer: httpx.Response) -> tuple[int, str | None, str]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["param"], error["code"]


@pytest.mark.parametrize(("fields", "param", "code"), BOTH + OF_CHAT)
async def test_a_wrong_chat_names_its_parameter(
    idle_worker: FakeWorker, http: httpx.AsyncClient, fields: Any, param: str, code: str
) -> None:
    """400, the code and the path as the caller wrote it."""
    answer = await http.post("/v1/chat/completions", json=CHAT | fields)
    assert error_of(answer) == (400, param, code)


@pytest.mark.parametrize(("fields", "param", "code"), BOTH + OF_COMPLETIONS)
async def test_a_wrong_completion_names_its_parameter(
    idle_worker: FakeWorker, http: httpx.AsyncClient, fields: Any, param: str, code: str
) -> None:
    """400, the code and the path as the caller wrote it."""
    answer = await http.post("/v1/completions", json=COMPLETION | fields)
    assert error_of(answer) == (400, param, code)


async def test_nulls_and_defaults_are_accepted(worker: FakeWorker, http: httpx.AsyncClient) -> None:
    """Clients send nulls and defaults, and earlier messages as they were received."""
    nothing = dict.fromkeys(("tools", "stop", "seed", "temperature", "max_tokens", "logit_bias"))
    message = {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None}
    empty: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}
    body = CHAT | nothing | {"messages": [*CHAT["messages"], message, empty], "store": False}
    body |= {"response_format": {"type": "text"}, "modalities": ["text"], "functions": []}
    body |= {"tools": [], "tool_choice": "none", "parallel_tool_calls": False}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert "x-ignored-parameters" not in answer.headers


@pytest.mark.parametrize("headers", [{}, {"prefer": "respond-async"}])
async def test_ignored_parameters_are_named(
    worker: FakeWorker, http: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    """In responses of calls and jobs. A null parameter does not count."""
    ignored = {"user": "a", "safety_identifier": "b", "prompt_cache_key": "c", "metadata": None}
    answer = await http.post("/v1/completions", json=COMPLETION | ignored, headers=headers)
    assert answer.headers["x-ignored-parameters"] == "prompt_cache_key, safety_identifier, user"
    job = {"endpoint": "/v1/completions", "body": COMPLETION | {"metadata": {"a": "b"}}}
    answer = await http.post("/v1/jobs", json=job)
    assert answer.headers["x-ignored-parameters"] == "metadata"


async def test_an_error_names_accepted_values(http: httpx.AsyncClient) -> None:
    """The accepted values, or the similar name."""
    for wrong, hint in (
        ({"functions": [{}]}, "[]"),
        ({"max_token": 1}, "did you mean max_tokens?"),
    ):
        answer = await http.post("/v1/chat/completions", json=CHAT | wrong)
        assert answer.status_code == 400
        assert hint in answer.json()["error"]["message"]


async def test_max_tokens_is_clipped_to_the_context(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """To what the prompt leaves; admission counts the same."""
    answer = await http.post("/v1/completions", json=COMPLETION | {"max_tokens": 10**9})
    assert answer.status_code == 200
    [job] = worker.seen
    assert job.params.max_tokens == CONTEXT_LENGTH - len(job.prompt_ids)


async def test_max_tokens_over_the_context_is_refused_by_a_setting(
    worker: FakeWorker, redis_server: EmbeddedRedis
) -> None:
    """In OpenAI's words, by which clients know the error."""
    settings = make_settings(redis_server.url, clip_max_tokens=False)
    with running_gateway(settings) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            body = COMPLETION | {"max_tokens": CONTEXT_LENGTH}
            answer = await http.post("/v1/completions", json=body)
    assert error_of(answer) == (400, "prompt", "context_length_exceeded")
    words = (
        f"This model's maximum context length is {CONTEXT_LENGTH} tokens. However, you requested"
    )
    assert answer.json()["error"]["message"].startswith(words)


async def test_parameters_reach_the_job(worker: FakeWorker, http: httpx.AsyncClient) -> None:
    """The tier chooses the lane."""
    worker.script = says("abc")
    body = COMPLETION | {
        "max_tokens": 7,
        "min_tokens": 2,
        "expected_output_tokens": 5,
        "temperature": 0,
        "top_k": -1,
        "seed": -1,
        "stop": "x",
        "logit_bias": {"65": -100},
        "service_tier": "priority",
        "ignore_eos": True,
        "logprobs": 2,
    }
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    [job] = worker.seen
    params = job.params
    assert job.lane == "interactive"
    assert (params.max_tokens, params.min_tokens, params.temperature) == (7, 2, 0.0)
    assert params.expected_tokens == 7  # its end is ignored
    assert (params.top_k, params.seed, params.stop) == (0, 2**63 - 1, ("x",))
    assert (params.logit_bias, params.ignore_eos, params.logprobs) == ({65: -100.0}, True, 2)


async def test_defaults_follow_openai(worker: FakeWorker, http: httpx.AsyncClient) -> None:
    """A completion has 16 tokens, a chat the rest of the context."""
    await http.post("/v1/completions", json=COMPLETION)
    await http.post("/v1/chat/completions", json=CHAT)
    completion, chat = worker.seen
    assert completion.params.max_tokens == 16
    assert chat.params.max_tokens == CONTEXT_LENGTH - len(chat.prompt_ids)
    assert (completion.lane, chat.lane) == ("standard", "standard")


async def test_an_error_for_a_long_prompt_names_both_lengths(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """So the caller knows by how much to shorten."""
    answer = await http.post("/v1/completions", json=COMPLETION | {"prompt": "x" * 600})
    assert error_of(answer) == (400, "prompt", "context_length_exceeded")
    message = answer.json()["error"]["message"]
    assert message.startswith(f"This model's maximum context length is {CONTEXT_LENGTH} tokens.")
    assert "600 in the prompt" in message


async def test_a_model_without_a_template_has_no_chat(
    idle_worker: FakeWorker, http: httpx.AsyncClient, redis_client: Any, keys: Any
) -> None:
    """400, not an invented format."""
    files = hash_tokenizer()
    bare = type(files)(tokenizer_json=files.tokenizer_json, chat_template=None)
    await publish_model(redis_client, keys, f"bare-{id(files)}", files=bare)
    for _ in range(40):  # the catalogue may be a second old
        answer = await http.post("/v1/chat/completions", json=CHAT | {"model": f"bare-{id(files)}"})
        if answer.status_code != 404:
            break
        await asyncio.sleep(0.05)
    assert error_of(answer) == (400, "messages", VALUE)


DEEP = json.dumps(COMPLETION)[:-1] + ', "metadata": ' + "[" * 40 + "]" * 40 + "}"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "hash", "prompt": "a", "temperature": NaN}',
        b'{"model": "hash", "prompt": "a", "temperature": -Infinity}',
        b'{"model": "hash", "prompt": "a", "temperature": 1e999}',
        b'{"model": "hash", "prompt": "a", "prompt": "b"}',
        b'{"model": "hash", "prompt": "\\ud800"}',
        b'{"model": "hash", "prompt": ' + b"1" * 5000 + b"}",
        DEEP.encode(),
        b"[" * 100_000,
    ],
)
async def test_bodies_that_are_no_json_object_are_refused(
    http: httpx.AsyncClient, raw: bytes
) -> None:
    """One code for all of them."""
    headers = {"content-type": "application/json"}
    answer = await http.post("/v1/completions", content=raw, headers=headers)
    assert error_of(answer) == (400, None, "invalid_json")


async def test_a_form_is_refused(http: httpx.AsyncClient) -> None:
    """Other sites' pages can post text/plain without a CORS preflight, but not JSON."""
    headers = {"content-type": "text/plain"}
    answer = await http.post("/v1/completions", content=b"{}", headers=headers)
    assert error_of(answer) == (415, None, "unsupported_media_type")


async def test_an_unknown_model_is_not_found(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """404 with OpenAI's code."""
    answer = await http.post("/v1/completions", json=COMPLETION | {"model": "none"})
    assert error_of(answer) == (404, "model", "model_not_found")


async def test_unknown_routes_and_methods_have_the_same_shape(http: httpx.AsyncClient) -> None:
    """404 and 405 in OpenAI's format."""
    assert error_of(await http.get("/v1/nothing")) == (404, None, "not_found")
    assert error_of(await http.get("/v1/completions")) == (405, None, "method_not_allowed")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/conversations", "no conversations; a response goes on"),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/completions", "did you mean /v1/completions?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/" + "x" * 4_000, "GET /openapi.json"),
    ],
)
async def test_an_error_for_an_unknown_path_lists_paths(
    http: httpx.AsyncClient, path: str, hint: str
) -> None:
    """The alternatives, or the similar path. A long path is not repeated in full."""
    answer = await http.post(path, json=CHAT)
    assert error_of(answer) == (404, None, "not_found")
    message = answer.json()["error"]["message"]
    assert hint in message
    assert path[:100] in message
    assert len(message) < 300


async def test_an_error_for_an_unknown_model_lists_the_models(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """In calls and at the model's own path."""
    call = await http.post("/v1/chat/completions", json=CHAT | {"model": MODEL + "x"})
    for answer in (call, await http.get(f"/v1/models/{MODEL}x")):
        assert error_of(answer) == (404, "model", "model_not_found")
        assert f"did you mean {MODEL!r}" in answer.json()["error"]["message"]
