"""Families of decoders through a gateway and workers: callers get the tokens of `generate`."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.embedded_redis import EmbeddedRedis
from tests.gateway.conftest import gateway_url
from tests.tiny_models import save_tiny_model

__all__ = ["gateway_url"]

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]

# The loader replaces only some of their modules, or special ones: a dense model and mixtures of
# experts. The engine's tests compare all families with generate, test_tiny_model.py one over HTTP.
FAMILIES = [
    "exaone4",
    "qwen2_moe",
    *(pytest.param(f, marks=pytest.mark.long) for f in ("phimoe", "minimax_m2")),
]


async def complete(
    http: httpx.AsyncClient, family: str, prompt: list[int], num_output: int
) -> list[int]:
    """The tokens of a greedy completion."""
    body: dict[str, Any] = {
        "model": family,
        "prompt": prompt,
        "max_tokens": num_output,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = await http.post("/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    token_ids: list[int] = response.json()["choices"][0]["token_ids"]
    return token_ids


async def wait_for_model(url: str, family: str) -> None:
    """Returns once a worker serves the model."""
    async with httpx.AsyncClient(base_url=url) as http, asyncio.timeout(120):
        while (await http.get(f"/v1/models/{family}")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def check(url: str, family: str, folder: Path) -> None:
    """Compares concurrent prompts of mixed lengths with `generate`, on the replaced modules."""
    from tests.workers.model.parity import NUM_OUTPUT, expected_of

    expected = expected_of(family, folder)
    async with httpx.AsyncClient(base_url=url) as http:
        answers = await asyncio.gather(
            *(complete(http, family, prompt, NUM_OUTPUT) for prompt in expected.prompts)
        )
    for number, found in enumerate(answers):
        expected.check(number, found)


@contextlib.contextmanager
def running_worker(redis_url: str, folder: Path) -> Iterator[None]:
    """Runs `batchway worker` on a model."""
    arguments = ("--namespace=test", f"--model={folder}", "--kv-cache-gib=0.25", "--drain-s=0")
    process = subprocess.Popen(
        [sys.executable, "-m", "infra", "worker", *arguments],
        env={**os.environ, "REDIS_URL": redis_url},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.campaign
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("redis_client")  # an empty Redis: others leave their object store
async def test_answers_of_each_family_are_those_of_generate(
    family: str, gateway_url: str, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    """Through a gateway, with a worker for each family."""
    folder = save_tiny_model(family, tmp_path / family)
    with running_worker(redis_server.url, folder):
        await wait_for_model(gateway_url, family)
        await check(gateway_url, family, folder)
