"""What a model's card says: its own sampling settings, where a caller gives none, and what its
engine cannot do."""

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
from contract.model_cards import Capabilities, GenerationDefaults, ModelCard
from gateway.prepare.generation import sampling_params
from gateway.prepare.schemas import CompletionBody
from tests.fleet import until
from tests.gateway.conftest import until_listed
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


def test_a_caller_can_switch_off_what_the_model_sets() -> None:
    """Its top_k, and its suppressed tokens by a bias of them."""
    assert [params_of(OWN, top_k=asked).top_k for asked in (0, -1)] == [0, 0]
    assert params_of(OWN).logit_bias == {5: -100.0, 7: -100.0}
    assert params_of(OWN, logit_bias=None).logit_bias == {5: -100.0, 7: -100.0}
    assert params_of(OWN, logit_bias={"7": 3, "9": -1}).logit_bias == {5: -100.0, 7: 3.0, 9: -1.0}
    assert params_of(GenerationDefaults()).logit_bias == {}


@pytest.fixture
async def cool(
    redis_client: redis.asyncio.Redis, functions: Functions, keys: Keys, http: httpx.AsyncClient
) -> AsyncIterator[FakeWorker]:
    """A worker of a model with settings of its own, whose engine has no prompt log probabilities,
    structured output or exact resume."""
    await publish_model(redis_client, keys)  # later tests ask for it, and the gateway remembers
    can = Capabilities(prompt_logprobs=False, resume="distribution")
    await publish_model(redis_client, keys, MODEL, generation=OWN, capabilities=can)

    await until_listed(http, {MODEL})
    worker = FakeWorker(functions, MODEL)
    await worker.beat()
    task = asyncio.create_task(worker.serve())
    yield worker
    await end_tasks(task)


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 40}
TEXT = {"model": MODEL, "prompt": "a", "max_tokens": 40}
RESPONSE = {"model": MODEL, "input": "a"}


_CALLS = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT, "/v1/responses": RESPONSE}


async def test_the_models_settings_hold_at_every_endpoint(
    cool: FakeWorker, http: httpx.AsyncClient
) -> None:
    """Streamed and whole, and in jobs."""
    calls = [("/v1/chat/completions", CHAT | {"stream": True}), *_CALLS.items()]
    calls += [("/v1/jobs", {"endpoint": path, "body": body}) for path, body in _CALLS.items()]
    for number, (path, body) in enumerate(calls):
        answer = await http.post(path, json=body)
        assert answer.status_code in (200, 202), answer.text

        async def is_claimed(number: int = number) -> bool:
            return len(cool.seen) > number

        await until(is_claimed)
    for params in (job.params for job in cool.seen):
        assert [getattr(params, name) for name in NUMBERS] == [getattr(OWN, n) for n in NUMBERS]
        assert params.logit_bias == {5: -100.0, 7: -100.0}


async def test_a_response_shows_the_settings_that_hold(
    cool: FakeWorker, http: httpx.AsyncClient
) -> None:
    tries: list[tuple[dict[str, Any], float, float]] = [
        ({}, 0.6, 0.95),
        ({"temperature": None}, 0.6, 0.95),
        ({"temperature": 1}, 1.0, 0.95),
        ({"top_p": 0.5, "temperature": 0}, 0.0, 0.5),
    ]
    for asked, temperature, top_p in tries:
        shown = (await http.post("/v1/responses", json=RESPONSE | asked)).json()
        assert (shown["temperature"], shown["top_p"]) == (temperature, top_p)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt_logprobs": 2, "echo": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
async def test_unsupported_capabilities_are_refused_by_name(
    cool: FakeWorker, http: httpx.AsyncClient, asked: dict[str, Any], param: str
) -> None:
    """In calls and in jobs."""
    job = {"endpoint": "/v1/completions", "body": TEXT | asked}
    for path, body in (("/v1/completions", TEXT | asked), ("/v1/jobs", job)):
        answer = await http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["code"] == "unsupported_parameter"
        assert error["param"].split(".")[-1] == param


async def test_models_and_jobs_show_their_card(cool: FakeWorker, http: httpx.AsyncClient) -> None:
    """A setting is null where OpenAI's holds. A job has the resume kind that held when it came."""
    shown = {model["id"]: model for model in (await http.get("/v1/models")).json()["data"]}
    settings = {name: getattr(OWN, name) for name in NUMBERS}
    assert shown[MODEL]["generation"] == settings | {"suppress_tokens": [5, 7]}
    assert shown["hash"]["generation"] == dict.fromkeys(NUMBERS) | {"suppress_tokens": []}
    assert (await http.get(f"/v1/models/{MODEL}")).json() == shown[MODEL]
    names = "prompt_logprobs", "structured_output", "tools", "lora", "images"
    lacking = dict.fromkeys(names, False)
    assert shown[MODEL]["capabilities"] == lacking | {"resume": "distribution"}
    accepted = await http.post("/v1/jobs", json={"endpoint": "/v1/completions", "body": TEXT})
    job = (await http.get(f"/v1/jobs/{accepted.json()['id']}")).json()
    assert job["resume"] == "distribution"
