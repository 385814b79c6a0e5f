"""Families of decoders through `batchway up`: the tokens that callers get are generate's."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.infra.stack import running_demo_stack
from tests.tiny_models import save_tiny_model
from tests.workers.model.parity import NUM_OUTPUT, expected_of

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]

# Those whose modules the CPU's surgeon exchanges only in part, or in shapes of their own.
FAMILIES = [
    "qwen2_moe",
    *(
        pytest.param(family, marks=pytest.mark.campaign)
        for family in (
            "olmoe",
            "granitemoe",
            "glm4",
            "glm4_moe",
            "ernie4_5",
            "hunyuan_v1_dense",
            "exaone4",
            "dots1",
            "phimoe",
            "minimax_m2",
        )
    ),
]


async def complete(http: httpx.AsyncClient, family: str, prompt: list[int]) -> list[int]:
    """The tokens of a greedy answer."""
    body: dict[str, Any] = {
        "model": family,
        "prompt": prompt,
        "max_tokens": NUM_OUTPUT,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = await http.post("/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    token_ids: list[int] = response.json()["choices"][0]["token_ids"]
    return token_ids


@pytest.mark.parametrize("family", FAMILIES)
async def test_answers_are_those_of_generate(family: str, tmp_path: Path) -> None:
    """Prompts of mixed lengths at once, on the modules that the loader has exchanged."""
    folder = save_tiny_model(family, tmp_path / family)
    expected = expected_of(family, folder)
    with running_demo_stack(f"--model={folder}") as stack:
        async with httpx.AsyncClient(base_url=stack.url) as http:
            answers = await asyncio.gather(
                *(complete(http, family, prompt) for prompt in expected.prompts)
            )

    for number, found in enumerate(answers):
        expected.check(number, found)
