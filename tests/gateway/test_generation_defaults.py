"""The model's own sampling settings, where a caller gives none."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.connection import end_tasks
from contract.functions import Functions
from contract.jobs import SamplingParams
from contract.keys import Keys
from contract.model_cards import GenerationDefaults, ModelCard
from gateway.prepare.generation import sampling_params
from gateway.prepare.schemas import CompletionBody
from tests.fleet import until
from tests.gateway.fake_worker import FakeWorker, publish_model

pytestmark = pytest.mark.anyio

MODEL = "cool"
OWN = GenerationDefaults(
    temperature=0.6,
    top_k=20,
    top_p=0.95,
    min_p=0.05,
    repetition_penalty=1.05,
    presence_penalty=1.5,
    frequency_penalty=-0.5,
    suppress_tokens=(5, 7),
)
NUMBERS = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
# What OpenAI's API has where neither the caller nor the model says anything.
PLAIN = SamplingParams(max_tokens=4, seed=0)


def params_of(own: GenerationDefaults, **asked: Any) -> SamplingParams:
    card = ModelCard(
        name=MODEL,
        context_length=100,
        vocab_size=50,
        eos_token_ids=(),
        tokenizer_sha256="0" * 64,
        created_s=0,
        generation=own,
    )
    body = CompletionBody.model_validate({"model": MODEL, "prompt": "a", **asked})
    return sampling_params(card, body, [4], "job")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("own", [OWN, GenerationDefaults()])
def test_each_setting_is_the_callers_else_the_models_else_openais(
    name: str, own: GenerationDefaults
) -> None:
    """The caller's null is nothing given; its 0 or 1 is."""
    given = getattr(own, name)
    expected = getattr(PLAIN, name) if given is None else given
    assert getattr(params_of(own), name) == expected
    assert getattr(params_of(own, **{name: None}), name) == expected
    for asked in (1, 2) if name == "top_k" else (1, 0.5):
        assert getattr(params_of(own, **{name: asked}), name) == asked
        for other in set(NUMBERS) - {name}:
            assert getattr(params_of(own, **{name: asked}), other) == getattr(params_of(own), other)


@pytest.mark.parametrize("asked", [0, -1])
def test_a_caller_can_switch_the_models_top_k_off(asked: int) -> None:
    assert params_of(OWN, top_k=asked).top_k == 0


def test_suppressed_tokens_are_never_given_unless_the_caller_biases_them() -> None:
    assert params_of(OWN).logit_bias == {5: -100.0, 7: -100.0}
    assert params_of(OWN, logit_bias=None).logit_bias == {5: -100.0, 7: -100.0}
    assert params_of(OWN, logit_bias={"7": 3, "9": -1}).logit_bias == {5: -100.0, 7: 3.0, 9: -1.0}
    assert params_of(GenerationDefaults()).logit_bias == {}


@pytest.fixture
async def cool(
    redis_client: redis.asyncio.Redis, functions: Functions, keys: Keys, http: httpx.AsyncClient
) -> AsyncIterator[FakeWorker]:
    """A worker of a model with settings of its own."""
    await publish_model(redis_client, keys)  # later tests ask for it, and the gateway remembers
    await publish_model(redis_client, keys, MODEL, generation=OWN)

    async def is_known() -> bool:
        return (await http.get(f"/v1/models/{MODEL}")).status_code == 200

    await until(is_known)
    worker = FakeWorker(functions, MODEL)
    await worker.beat()
    task = asyncio.create_task(worker.serve())
    yield worker
    await end_tasks(task)


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 40}
TEXT = {"model": MODEL, "prompt": "a", "max_tokens": 40}
RESPONSE = {"model": MODEL, "input": "a"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/completions", TEXT),
        ("/v1/responses", RESPONSE),
        ("/v1/jobs", {"endpoint": "/v1/chat/completions", "body": CHAT}),
        ("/v1/jobs", {"endpoint": "/v1/completions", "body": TEXT}),
        ("/v1/jobs", {"endpoint": "/v1/responses", "body": RESPONSE}),
    ],
)
async def test_the_models_settings_hold_at_every_endpoint(
    cool: FakeWorker, http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    """Streamed and whole, and in jobs."""
    answer = await http.post(path, json=body)

    assert answer.status_code in (200, 202), answer.text

    async def is_claimed() -> bool:
        return bool(cool.seen)

    await until(is_claimed)
    params = cool.seen[0].params
    assert {name: getattr(params, name) for name in NUMBERS} == {
        name: getattr(OWN, name) for name in NUMBERS
    }
    assert params.logit_bias == {5: -100.0, 7: -100.0}


@pytest.mark.parametrize(
    ("asked", "temperature", "top_p"),
    [({}, 0.6, 0.95), ({"temperature": None}, 0.6, 0.95), ({"temperature": 1}, 1.0, 0.95),
     ({"top_p": 0.5, "temperature": 0}, 0.0, 0.5)],
)  # fmt: skip
async def test_a_response_shows_the_settings_that_hold(
    cool: FakeWorker,
    http: httpx.AsyncClient,
    asked: dict[str, Any],
    temperature: float,
    top_p: float,
) -> None:
    shown = (await http.post("/v1/responses", json=RESPONSE | asked)).json()

    assert (shown["temperature"], shown["top_p"]) == (temperature, top_p)


async def test_models_show_their_settings(cool: FakeWorker, http: httpx.AsyncClient) -> None:
    """Null where OpenAI's hold."""
    shown = (await http.get("/v1/models")).json()["data"]

    by_name = {model["id"]: model["generation"] for model in shown}
    assert by_name[MODEL] == {name: getattr(OWN, name) for name in NUMBERS} | {
        "suppress_tokens": [5, 7]
    }
    assert by_name["hash"] == dict.fromkeys(NUMBERS) | {"suppress_tokens": []}
