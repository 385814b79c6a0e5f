"""Validation of bodies: each error names its code and parameter, and none repeats the body."""

import json
from typing import Any

import httpx
import pytest

from tests.fakes import hash_tokenizer
from tests.gateway.conftest import Gateways, error_of, until_listed
from tests.gateway.fake_worker import CONTEXT_LENGTH, MODEL, FakeWorker, publish_model, says

pytestmark = pytest.mark.anyio

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "Hi"}
VALUE, UNSUPPORTED, UNKNOWN = "invalid_value", "unsupported_parameter", "unknown_parameter"
MISSING = "missing_required_parameter"
TOO_LONG = f"This model's maximum context length is {CONTEXT_LENGTH} tokens."

Case = tuple[dict[str, Any], str, str]


def wrong(**values: list[Any]) -> list[Case]:
    """Values that a field may not have, where its own name is told."""
    return [({name: value}, name, VALUE) for name, given in values.items() for value in given]


def schema(name: str = "a", **fields: Any) -> dict[str, Any]:
    """A response format with a JSON schema."""
    return {"type": "json_schema", "json_schema": {"name": name, **fields}}


BOTH: list[Case] = [
    *wrong(
        model=[3, ""],
        temperature=[2.1, "1", True],
        top_p=[0, 1.01],
        top_k=[-2],
        min_p=[-0.1],
        presence_penalty=[2.5],
        frequency_penalty=[-2.5],
        repetition_penalty=[0],
        logit_bias=[{"x": 1}, {"259": 1}, {str(i): 1 for i in range(301)}],
        seed=[2**63, 1.5],
        n=[9, 0, True],
        stop=[["a"] * 16_385, "", ["a", ""], ["é" * 8_193], [1]],
        stop_token_ids=[[259], [-1]],
        max_tokens=[0],
        stream=["yes"],
        stream_options=[{"include_usage": True}],
        user=[7],
        service_tier=["scale"],
        return_token_ids=[1],
        prompt_logprobs=[21, -1, True],
        guided_json=[3, "{"],
        guided_regex=["(?=a)", "a" * 65_537],
        guided_choice=[[]],
        guided_grammar=["start: (", 'start: "a"\n%llguidance {}'],
        structured_outputs=[
            {},
            {"regex": "a", "choice": ["a"]},
            {"json": None},
        ],
    ),
    ({"logit_bias": {"1": 101}}, "logit_bias.1", VALUE),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens", VALUE),
    ({"metadata": {"a": 1}}, "metadata.a", VALUE),
    ({"suffix": "a"}, "suffix", UNSUPPORTED),
    ({"guided_json": {"x-guidance": {}}}, "guided_json.x-guidance", VALUE),
    ({"guided_choice": ["a", 1]}, "guided_choice.1", VALUE),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", VALUE),
    ({"guided_regex": "a", "min_tokens": 1}, "min_tokens", VALUE),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", VALUE),
    (
        {"structured_outputs": {"json": {"properties": {"a": {"type": "strin"}}}}},
        "structured_outputs.json.properties.a",
        VALUE,
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type", VALUE),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", VALUE),
    ({"response_format": schema()}, "response_format.json_schema.schema", MISSING),
    ({"response_format": schema("a b", schema={})}, "response_format.json_schema.name", VALUE),
    (
        {
            "response_format": schema(
                strict=True, schema={"items": {"type": "array", "contains": {"const": 1}}}
            )
        },
        "response_format.json_schema.schema.items",
        VALUE,
    ),
    ({"no_such_thing": 1}, "no_such_thing", UNKNOWN),
]
_TOOL = {"type": "function", "function": {"name": "add"}}
_NAMELESS = {"type": "function", "function": {"name": "a b"}}
_STRICT = {"name": "add", "strict": True, "parameters": {"type": "object", "if": {}}}
_BAD_TOOL = {"type": "function", "function": _STRICT}
_CHOICE = {"type": "function", "function": {"name": "other"}}
_ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [_TOOL, _CHOICE]},
}
_CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
# One message, and the place in it.
MESSAGES: list[tuple[Any, str, str]] = [
    ("Hi", "", VALUE),
    ({"content": "Hi"}, ".role", MISSING),
    ({"role": "user"}, ".content", MISSING),
    ({"role": "user", "content": 3}, ".content", VALUE),
    ({"role": "user", "content": None}, ".content", VALUE),
    ({"role": "user", "content": []}, ".content", VALUE),
    ({"role": "king", "content": "a"}, ".role", VALUE),
    ({"role": "function", "content": "a"}, ".role", UNSUPPORTED),
    ({"role": "tool", "content": "a"}, ".tool_call_id", VALUE),
    ({"role": "user", "content": "a", "tool_call_id": "c"}, ".tool_call_id", VALUE),
    ({"role": "user", "content": "a", "reasoning_content": "so"}, ".reasoning_content", VALUE),
    ({"role": "user", "content": "a", "tool_calls": [_CALL]}, ".tool_calls", VALUE),
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        ".content.0.image_url",
        VALUE,
    ),
    (
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
        ".content.0.type",
        UNSUPPORTED,
    ),
    ({"role": "user", "content": [{"type": "text", "text": 1}]}, ".content", VALUE),
    ({"role": "assistant", "content": "", "tool_calls": [{}]}, ".tool_calls.0.id", MISSING),
]
OF_CHAT: list[Case] = [
    *(({"messages": [each]}, f"messages.0{place}", code) for each, place, code in MESSAGES),
    *wrong(messages=[[], "Hi"], logprobs=[1], top_logprobs=[2], tool_choice=["required"]),
    *wrong(tools=[[_TOOL, _TOOL], [_TOOL] * 129]),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", VALUE),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", VALUE),
    ({"prompt": "Hi"}, "prompt", UNKNOWN),
    ({"echo": True}, "echo", UNSUPPORTED),
    ({"tools": [{}]}, "tools.0.type", MISSING),
    ({"tools": [_NAMELESS]}, "tools.0.function.name", VALUE),
    ({"tools": [_TOOL], "response_format": {"type": "json_object"}}, "response_format", VALUE),
    ({"tools": [_TOOL], "tool_choice": "any"}, "tool_choice", VALUE),
    ({"tools": [_TOOL], "tool_choice": _CHOICE}, "tool_choice.function.name", VALUE),
    (
        {"tools": [_TOOL], "tool_choice": _ALLOWED},
        "tool_choice.allowed_tools.tools.1.function.name",
        VALUE,
    ),
    ({"tools": [_BAD_TOOL], "tool_choice": "required"}, "tools.0.function.parameters", VALUE),
    ({"tools": [_TOOL], "tool_choice": "required", "min_tokens": 2}, "min_tokens", VALUE),
    ({"functions": [{}]}, "functions", UNSUPPORTED),
    ({"reasoning_effort": "low"}, "reasoning_effort", UNSUPPORTED),
    ({"modalities": ["text", "audio"]}, "modalities", UNSUPPORTED),
    ({"audio": {}}, "audio", UNSUPPORTED),
]
OF_COMPLETIONS: list[Case] = [
    *wrong(
        prompt=[
            *(3, "", [], [1, "b"], [[]], [""], ["a"] * 65, [True], [259], [-1]),
        ],
        logprobs=[21, True],
        echo=[1],
    ),
    ({"prompt": ["a", ""]}, "prompt.1", VALUE),
    ({"prompt": ["a", 1]}, "prompt.1", VALUE),
    ({"prompt": ["a", None]}, "prompt.1", VALUE),
    ({"prompt": [[1], []]}, "prompt.1", VALUE),
    ({"prompt": [[1], [[2]]]}, "prompt.1", VALUE),
    ({"prompt": [[1], [2], [3, "b"]]}, "prompt.2", VALUE),
    ({"prompt": [[1], [2], [3], [259]]}, "prompt.3", VALUE),
    ({"prompt": ["a"] * 43, "n": 3}, "n", VALUE),
    ({"prompt": ["a", "b" * 600]}, "prompt.1", "context_length_exceeded"),
    ({"prompt": ["a", "b" * 510], "min_tokens": 4}, "min_tokens", VALUE),
    ({"best_of": 2}, "best_of", UNSUPPORTED),
    ({"echo": False, "max_tokens": 0}, "max_tokens", VALUE),
    ({"echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens", VALUE),
    ({"messages": []}, "messages", UNKNOWN),
]
CASES = [
    *(("/v1/chat/completions", CHAT, *case) for case in BOTH + OF_CHAT),
    *(("/v1/completions", COMPLETION, *case) for case in BOTH + OF_COMPLETIONS),
]


@pytest.mark.parametrize("case", CASES)
async def test_a_wrong_body_names_its_parameter(
    idle_worker: FakeWorker, http: httpx.AsyncClient, case: tuple[str, Any, Any, str, str]
) -> None:
    """400, the code and the path as the caller wrote it."""
    path, body, fields, param, code = case
    assert error_of(await http.post(path, json=body | fields)) == (400, param, code)


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


@pytest.mark.parametrize("given", [{}, {"seed": None}, {"seed": -1}])
async def test_without_a_seed_equal_prompts_are_drawn_by_chance(
    worker: FakeWorker, http: httpx.AsyncClient, given: dict[str, Any]
) -> None:
    """-1 is no seed, as in vLLM and llama.cpp: each call and each prompt has another."""
    for _ in range(2):
        await http.post("/v1/completions", json=COMPLETION | given | {"prompt": ["a", "a"]})
    seeds = [job.params.of_prompt(number).seed for job in worker.seen for number in (0, 1)]
    assert len(set(seeds)) == 4


async def test_an_error_names_accepted_values(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json=CHAT | {"functions": [{}]})
    assert "[]" in answer.json()["error"]["message"]


async def test_max_tokens_is_clipped_to_the_context(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """To what the prompt leaves; admission counts the same."""
    answer = await http.post("/v1/completions", json=COMPLETION | {"max_tokens": 10**9})
    assert answer.status_code == 200
    [job] = worker.seen
    assert job.params.max_tokens == CONTEXT_LENGTH - len(job.prompt_ids)


async def test_max_tokens_over_the_context_is_refused_by_a_setting(
    worker: FakeWorker, gateways: Gateways
) -> None:
    """In OpenAI's words, by which clients know the error."""
    async with gateways(clip_max_tokens=False) as http:
        body = COMPLETION | {"max_tokens": CONTEXT_LENGTH}
        answer = await http.post("/v1/completions", json=body)
    assert error_of(answer) == (400, "prompt", "context_length_exceeded")
    assert answer.json()["error"]["message"].startswith(f"{TOO_LONG} However, you requested")


async def test_parameters_reach_the_job(worker: FakeWorker, http: httpx.AsyncClient) -> None:
    """The tier chooses the lane."""
    worker.script = says("abc")
    body = COMPLETION | {
        "max_tokens": 7,
        "min_tokens": 2,
        "expected_output_tokens": 5,
        "temperature": 0,
        "top_k": -1,
        "seed": -2,
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
    assert (params.top_k, params.seed, params.stop) == (0, 2**63 - 2, ("x",))
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
    assert message.startswith(TOO_LONG)
    assert "600 in the prompt" in message


async def test_a_model_without_a_template_has_no_chat(
    idle_worker: FakeWorker, http: httpx.AsyncClient, redis_client: Any, keys: Any
) -> None:
    """400, not an invented format."""
    files = hash_tokenizer()
    bare = type(files)(tokenizer_json=files.tokenizer_json, chat_template=None)
    await publish_model(redis_client, keys, "bare", files=bare)
    await until_listed(http, {"bare"})
    answer = await http.post("/v1/chat/completions", json=CHAT | {"model": "bare"})
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
    """One code for all of them. A form, which other sites' pages can post without a CORS preflight,
    is refused for its type."""
    for kind, expected in (
        ("application/json", (400, None, "invalid_json")),
        ("text/plain", (415, None, "unsupported_media_type")),
    ):
        headers = {"content-type": kind}
        answer = await http.post("/v1/completions", content=raw, headers=headers)
        assert error_of(answer) == expected


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
    """404 in calls and at the model's own path."""
    call = await http.post("/v1/chat/completions", json=CHAT | {"model": MODEL + "x"})
    for answer in (call, await http.get(f"/v1/models/{MODEL}x")):
        assert error_of(answer) == (404, "model", "model_not_found")
        assert f"did you mean {MODEL!r}" in answer.json()["error"]["message"]
