"""Greedy tokens of every proven family against transformers' generate, batched and chunked."""

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from contract.jobs import SamplingParams
from tests.tiny_families import FAMILIES, PAGED, SEQUENTIAL, VOCAB_SIZE
from tests.workers.model.conftest import LoadFamily
from tests.workers.model.driver import (
    generate_greedily,
    make_prompts,
    make_sequence,
    run_to_end,
)
from workers.engine.engine import Engine
from workers.engine.limits import EngineLimits
from workers.engine.request import Request
from workers.model.runner import ModelRunner
from workers.model.sequential import SequentialRunner
from workers.strategies.continuous import ContinuousBatching

PROMPT_LENGTHS = (1, 3, 16, 17, 33, 50)  # around blocks of 16 and windows of 12
NUM_OUTPUT = 20
# Two logits closer than this are a tie that rounding may break either way.
NEAR_TIE = 1e-3

_expected: dict[str, tuple[Any, list[list[int]], list[list[int]]]] = {}


def expected_outputs(family: str, folder: Path) -> tuple[Any, list[list[int]], list[list[int]]]:
    """transformers' own model, the prompts, and what it makes of them."""
    if family not in _expected:
        # Falcon's ALiBi is another one by each of transformers' implementations.
        attention = "eager" if family in PAGED else None
        decoder: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
        prompts = make_prompts(PROMPT_LENGTHS, VOCAB_SIZE)
        outputs = [generate_greedily(decoder, prompt, NUM_OUTPUT) for prompt in prompts]
        _expected[family] = (decoder, prompts, outputs)
    return _expected[family]


@torch.inference_mode()
def assert_same(decoder: Any, prompt: list[int], expected: list[int], found: list[int]) -> None:
    """The same tokens, or a first difference between two logits that are all but equal."""
    if found == expected:
        return
    first = next(i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
    ids = torch.tensor([prompt + expected[:first]])
    logits = decoder(ids, use_cache=False).logits[0, -1]
    gap = float((logits[expected[first]] - logits[found[first]]).abs())
    print(f"differs at output {first}: logits {gap:.2e} apart")
    assert gap < NEAR_TIE, f"differs at output {first} by {gap} in the logits"


@pytest.mark.parametrize(
    ("family", "chunk_tokens"),
    [*product(PAGED, (1, 7, 64, 1000)), *product(SEQUENTIAL, (1, 7, 1000))],
)
def test_greedy_tokens_equal_those_of_generate(
    family: str, chunk_tokens: int, load_family: LoadFamily
) -> None:
    """Prompts of mixed lengths, batched and cut into chunks, yield what each yields alone."""
    loaded, folder = load_family(family)
    decoder, prompts, outputs = expected_outputs(family, folder)
    sequences = [make_sequence(prompt, max_tokens=NUM_OUTPUT) for prompt in prompts]

    found = run_to_end(loaded.model, sequences, chunk_tokens)

    for prompt, expected, ids in zip(prompts, outputs, found, strict=True):
        assert_same(decoder, prompt, expected, ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tiny_models_are_lively(family: str, load_family: LoadFamily) -> None:
    """Outputs vary within a prompt and between prompts; else the parity tests prove nothing."""
    _, folder = load_family(family)

    _, _, outputs = expected_outputs(family, folder)

    assert len({tuple(ids) for ids in outputs}) == len(outputs)
    assert sum(len(set(ids)) for ids in outputs) / len(outputs) >= 6


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("num_budget_tokens", [9, 256])
def test_the_engine_yields_the_tokens_of_generate(
    family: str, num_budget_tokens: int, load_family: LoadFamily
) -> None:
    """Through the real scheduler and its block tables, under a tight and a loose budget."""
    loaded, folder = load_family(family)
    decoder, prompts, outputs = expected_outputs(family, folder)
    limits = EngineLimits(
        max_num_batched_tokens=num_budget_tokens, max_num_seqs=4, vocab_size=VOCAB_SIZE
    )
    engine = Engine(loaded.model, limits, ContinuousBatching())
    params = SamplingParams(max_tokens=NUM_OUTPUT, seed=1, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add(Request(f"job-{number}", 1, "t", "lane", tuple(prompt), params, ((),), (False,)))

    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            found.setdefault(output.sequence.job_id, []).append(output.token_id)

    for number, (prompt, expected) in enumerate(zip(prompts, outputs, strict=True)):
        assert_same(decoder, prompt, expected, found[f"job-{number}"])


@pytest.mark.parametrize(
    ("families", "runner"), [(PAGED, ModelRunner), (SEQUENTIAL, SequentialRunner)]
)
def test_each_family_goes_its_way(
    families: dict[str, Any], runner: type, load_family: LoadFamily
) -> None:
    """The paged way wherever it is open."""
    for family in families:
        assert isinstance(load_family(family)[0].model, runner), family


def test_the_page_on_models_names_the_families_that_these_tests_prove() -> None:
    """docs/models.md, each in the table of its way."""
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    _, proven = page.split("## Families served in one batch")
    batched, proven = proven.split("## Families served one sequence at a time")
    one_by_one, _ = proven.split("## Refused")

    for section, families in ((batched, PAGED), (one_by_one, SEQUENTIAL)):
        assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(families)
