"""vLLM's /tokenize, /detokenize, /version and /ping."""

from importlib.metadata import version
from typing import Any

import httpx
import pytest
import redis.asyncio
from msgspec.structs import replace

from contract.api_keys import Scope
from contract.catalogue import Catalogue
from contract.keys import Keys
from tests.fakes import BOS_ID, EOS_ID, encode_text, hash_tokenizer
from tests.gateway.conftest import Bearer, Gateways, answered, error_of
from tests.gateway.fake_worker import CONTEXT_LENGTH, MODEL, FakeWorker, publish_model

pytestmark = pytest.mark.anyio

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Oh é"},
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "Hé"},
        {"prompt": [104, 105]},
        {"messages": MESSAGES},
        {"messages": MESSAGES, "add_generation_prompt": False},
        {"messages": MESSAGES, "continue_final_message": True},
        {"messages": MESSAGES, "tools": [TOOL]},
        {"messages": MESSAGES, "chat_template": "{{ messages[0].content }}"},
    ],
)
async def test_the_tokens_are_those_that_a_call_gives_the_model(
    worker: FakeWorker, http: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    """Of a prompt and of a chat; and back again."""
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    body = {"model": MODEL, **fields}
    assert (await http.post(path, json=body)).status_code == 200
    expected = list(worker.seen[-1].prompt_ids)
    found = await answered(http, "/tokenize", body)
    assert found == {
        "count": len(expected),
        "max_model_len": CONTEXT_LENGTH,
        "tokens": expected,
        "token_strs": None,
    }
    found = await answered(http, "/detokenize", {"model": MODEL, "tokens": expected})
    assert found == {"prompt": bytes(expected).decode()}
    assert len(worker.seen) == 1, "no job is made of it"


async def test_tokens_are_named_as_the_vocabulary_has_them(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """Also special ones, whose text a detokenized prompt has."""
    body = {"model": MODEL, "prompt": "a é<eos>", "return_token_strs": True}
    found = await answered(http, "/tokenize", body)
    assert found["tokens"] == [*encode_text("a é"), EOS_ID]
    assert found["token_strs"] == ["a", "\u0120", "\u00c3", "\u00a9", "<eos>"]
    body = {"model": MODEL, "tokens": [BOS_ID, 97, EOS_ID]}
    assert await answered(http, "/detokenize", body) == {"prompt": "<bos>a<eos>"}


async def test_prompts_beyond_the_context_are_counted(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """That is what callers want to know."""
    body = {"model": MODEL, "prompt": "x" * (3 * CONTEXT_LENGTH)}
    assert (await answered(http, "/tokenize", body))["count"] == 3 * CONTEXT_LENGTH


@pytest.mark.parametrize(
    ("path", "fields", "error"),
    [
        ("/tokenize", {"prompt": ["a", "b"]}, (400, "prompt", "invalid_value")),
        ("/tokenize", {}, (400, "prompt", "missing_required_parameter")),
        ("/tokenize", {"prompt": "a", "promptt": 1}, (400, "promptt", "unknown_parameter")),
        ("/tokenize", {"messages": []}, (400, "messages", "invalid_value")),
        ("/tokenize", {"model": "none", "prompt": "a"}, (404, "model", "model_not_found")),
        ("/detokenize", {"tokens": [259]}, (400, "tokens", "invalid_value")),
        ("/detokenize", {"tokens": [-1]}, (400, "tokens.0", "invalid_value")),
        ("/detokenize", {"tokens": "a"}, (400, "tokens", "invalid_value")),
    ],
)
async def test_bad_input_is_refused_by_name(
    idle_worker: FakeWorker,
    http: httpx.AsyncClient,
    path: str,
    fields: dict[str, Any],
    error: tuple[int, str, str],
) -> None:
    answer = await http.post(path, json={"model": MODEL, **fields})
    assert error_of(answer) == error


async def test_the_only_model_needs_no_name(
    idle_worker: FakeWorker, gateways: Gateways, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """As in vLLM; of several, one must be named."""
    async with gateways() as http:
        assert (await answered(http, "/tokenize", {"prompt": "a"}))["tokens"] == [97]
    await publish_model(redis_client, keys, "other")
    async with gateways() as http:
        assert error_of(await http.post("/tokenize", json={"prompt": "a"}))[0] == 404


async def test_a_template_of_a_call_needs_its_scope(
    idle_worker: FakeWorker, gateways: Gateways, bearer: Bearer
) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "chat_template": "x"}
    lacking, having = await bearer(), await bearer(scopes=(Scope.INFERENCE, Scope.TEMPLATES))
    async with gateways() as http:
        answer = await http.post("/tokenize", json=body, headers=lacking)
        assert error_of(answer) == (403, None, "missing_scope")
        assert (await http.post("/tokenize", json=body, headers=having)).json()["count"] == 1


async def test_version_and_ping(worker: FakeWorker, http: httpx.AsyncClient) -> None:
    """`/ping` is `/health`, as SageMaker asks for it."""
    assert (await http.get("/version")).json() == {"version": version("batchway")}
    for method in ("GET", "POST"):
        answer = await http.request(method, "/ping")
        assert (answer.status_code, answer.content) == (200, b"")


async def test_a_model_of_the_hub_answers_to_its_whole_and_its_short_name(
    worker: FakeWorker, gateways: Gateways, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Whatever name it is served by, unless another model has that name, or the same id."""
    card = await publish_model(redis_client, keys)
    catalogue = Catalogue(redis_client, keys)
    await catalogue.publish(replace(card, hub_names=("Org/Small-1B", "Small-1B")), hash_tokenizer())
    async with gateways() as http:
        for name in (MODEL, "Org/Small-1B", "Small-1B"):
            body = {"model": name, "messages": MESSAGES}
            assert (await answered(http, "/v1/chat/completions", body))["model"] == MODEL
            assert (await answered(http, "/tokenize", {"model": name, "prompt": "a"}))["count"] == 1
            assert (await http.get(f"/v1/models/{name}")).json()["id"] == MODEL
        for name in ("Other/Small-1B", "Org", "small-1b"):
            assert (await http.get(f"/v1/models/{name}")).status_code == 404
    await catalogue.publish(replace(card, name="b", hub_names=("Org/Small-1B",)), hash_tokenizer())
    async with gateways() as http:
        assert (await http.get("/v1/models/Org/Small-1B")).status_code == 404
