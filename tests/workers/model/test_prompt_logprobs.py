"""Log probabilities of prompts: the same with any chunks and any neighbours."""

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_families import VOCAB_SIZE
from tests.workers.model.conftest import LoadFamily
from tests.workers.model.driver import allot_blocks, make_prompts, make_sequence
from workers.engine.interface import Chunk, Drawn, Model, RowFailed, Sample, Vector
from workers.engine.sequence import Sequence

# A paged model, and one for each way to continue a state.
FAMILIES = ["llama", "stablelm", "bloom", "mamba", "recurrent_gemma"]


def run_prompts(model: Model, sequences: list[Sequence], chunk_tokens: int) -> dict[int, Sample]:
    """Log probabilities of the first sequence's prompt, by position."""
    found: dict[int, Sample] = {}
    allot_blocks(sequences, model)
    while pending := [s for s in sequences if s.num_output == 0]:
        chunks = []
        for sequence in pending:
            num_tokens = min(chunk_tokens, sequence.num_pending)
            samples = num_tokens == sequence.num_pending
            chunks.append(Chunk(sequence, sequence.num_computed, num_tokens, samples))
        for chunk, row in zip(chunks, model.run(chunks), strict=True):
            chunk.sequence.num_computed += chunk.num_tokens
            assert not isinstance(row, RowFailed | Vector | Drawn)
            part = row.prompt_logprobs if isinstance(row, Sample) else row
            if isinstance(row, Sample):
                chunk.sequence.token_ids.append(row.token_id)
            assert part is None or chunk.sequence is sequences[0]
            if part is not None:
                found |= dict(enumerate(part.tokens, part.start))
    return found


@pytest.mark.parametrize("chunk_tokens", [1, 7, 1000])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_logprobs_are_those_of_the_whole_prompt(
    family: str, chunk_tokens: int, load_family: LoadFamily
) -> None:
    """Compared with log_softmax of transformers' logits; neighbours that request none get none."""
    loaded, folder = load_family(family)
    prompts = make_prompts([23, 9, 30], VOCAB_SIZE)
    own: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        logits = own(torch.tensor([prompts[0]]), use_cache=False).logits[0]
    expected = torch.log_softmax(logits, -1)
    sequences = [make_sequence(prompts[0], prompt_logprobs=3), *map(make_sequence, prompts[1:])]

    found = run_prompts(loaded.model, sequences, chunk_tokens)

    assert sorted(found) == list(range(1, 23))
    for position, score in found.items():
        row = expected[position - 1]
        assert score.token_id == prompts[0][position]
        assert math.isclose(score.logprob, float(row[score.token_id]), abs_tol=2e-3)
        assert [i for i, _ in score.top_logprobs] == row.topk(3).indices.tolist()
        values = torch.tensor([value for _, value in score.top_logprobs])
        torch.testing.assert_close(values, row.topk(3).values, atol=2e-3, rtol=0)


def test_only_the_first_choice_reports_prompt_logprobs(load_family: LoadFamily) -> None:
    """All choices have the same prompt. 0 requests only the prompt's own tokens."""
    model = load_family("llama")[0].model
    [prompt] = make_prompts([9], VOCAB_SIZE)
    sequences = [make_sequence(prompt, choice=i, n=2, prompt_logprobs=0) for i in (0, 1)]

    found = run_prompts(model, sequences, 1000)

    assert sorted(found) == list(range(1, 9))
    assert all(score.top_logprobs == () for score in found.values())
