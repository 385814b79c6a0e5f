"""Greedy tokens of every supported family, compared with transformers' generate, batched and in
chunks."""

import pytest

from tests.tiny_families import FAMILIES, OF_EACH_KIND, PAGED, SEQUENTIAL
from tests.workers.model.conftest import LoadFamily
from tests.workers.model.driver import make_sequence, run_to_end
from tests.workers.model.parity import NUM_OUTPUT, expected_of
from workers.model.runner import ModelRunner
from workers.model.sequential import SequentialRunner

every_family = pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=() if f not in PAGED or f in OF_EACH_KIND else pytest.mark.campaign)
        for f in FAMILIES
    ],
)


@pytest.mark.parametrize("chunk_tokens", [7, 1000])
@every_family
@pytest.mark.each_value
def test_greedy_tokens_equal_those_of_generate(
    family: str, chunk_tokens: int, load_family: LoadFamily
) -> None:
    """Prompts of mixed lengths, batched and in chunks, yield what each yields alone. Each family
    is served paged wherever possible."""
    loaded, folder = load_family(family)
    assert isinstance(loaded.model, SequentialRunner if family in SEQUENTIAL else ModelRunner)
    expected = expected_of(family, folder)
    sequences = [make_sequence(prompt, max_tokens=NUM_OUTPUT) for prompt in expected.prompts]

    found = run_to_end(loaded.model, sequences, chunk_tokens)

    for number, ids in enumerate(found):
        expected.check(number, ids)


@every_family
def test_the_tiny_models_are_lively(family: str, load_family: LoadFamily) -> None:
    """Outputs vary within a prompt and between prompts; otherwise the parity tests would prove
    nothing."""
    _, folder = load_family(family)

    outputs = expected_of(family, folder).outputs

    assert len({tuple(ids) for ids in outputs}) == len(outputs)
    assert sum(len(set(ids)) for ids in outputs) / len(outputs) >= 6
