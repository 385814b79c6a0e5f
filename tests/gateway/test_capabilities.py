"""A model's capabilities, as callers see them."""

import asyncio
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.keys import Keys
from contract.model_cards import Capabilities
from tests.gateway.fake_worker import publish_model

pytestmark = pytest.mark.anyio

MODEL = "limited"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab", "max_tokens": 4}


@pytest.fixture
async def limited(redis_client: redis.asyncio.Redis, keys: Keys, http: httpx.AsyncClient) -> None:
    """A model whose engine has no prompt log probabilities, structured output or exact resume."""
    can = Capabilities(prompt_logprobs=False, resume="distribution")
    await publish_model(redis_client, keys)  # later tests ask for it, and the gateway remembers
    await publish_model(redis_client, keys, MODEL, capabilities=can)
    async with asyncio.timeout(10):
        while True:  # until the gateway has read the cards again
            if (await http.get(f"/v1/models/{MODEL}")).status_code == 200:
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt_logprobs": 2, "echo": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
@pytest.mark.parametrize("is_job", [False, True])
async def test_unsupported_capabilities_are_refused_by_name(
    limited: None, http: httpx.AsyncClient, asked: dict[str, Any], param: str, is_job: bool
) -> None:
    body = BODY | asked
    if is_job:
        body, path = {"endpoint": "/v1/completions", "body": body}, "/v1/jobs"
    else:
        path = "/v1/completions"
    answer = await http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == "unsupported_parameter"
    assert error["param"].split(".")[-1] == param


async def test_jobs_show_their_resume_kind_and_models_their_capabilities(
    limited: None, http: httpx.AsyncClient
) -> None:
    """As on the model card when the job was submitted."""
    accepted = await http.post("/v1/jobs", json={"endpoint": "/v1/completions", "body": BODY})
    assert accepted.status_code == 202, accepted.text
    job = (await http.get(f"/v1/jobs/{accepted.json()['id']}")).json()
    assert job["resume"] == "distribution"
    model = (await http.get(f"/v1/models/{MODEL}")).json()
    assert model["capabilities"] == {
        "prompt_logprobs": False,
        "structured_output": False,
        "tools": False,
        "lora": False,
        "resume": "distribution",
    }
