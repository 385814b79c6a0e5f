"""bfloat16 and float16, compared with transformers in the same type, teacher-forced and greedy.

The two round in a different order, so their logits differ by some units in the last place. The
bounds are fractions of the logits' spread; a tie within the bound may be decided either way.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_families import SEQUENTIAL, VOCAB_SIZE
from tests.tiny_models import save_tiny_model
from tests.workers.model.driver import allot_blocks, make_prompts, make_sequence, run_to_end
from tests.workers.model.loading import load
from workers.engine.interface import Chunk
from workers.model.runner import ModelRunner
from workers.model.sequential import SequentialRunner

FAMILIES = [
    "llama",
    "qwen3",
    "gemma2",
    "gemma3",
    "gpt2",
    "phi3",
    "gpt_oss",
    "qwen3_moe",
    "bloom",
    # Not Qwen3.5 and Granite 4: the gated norms of tiny random ones amplify rounding, in
    # transformers too (Qwen3-Next by up to 0.9 of the standard deviation).
    "falcon_h1",
    "lfm2",
]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# Largest difference of a logit, as a share of the standard deviation of the row's logits.
TOLERANCES = {"bfloat16": 0.15, "float16": 0.02}
NUM_OUTPUT = 16


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.each_value
def test_half_precision_agrees_with_transformers(family: str, dtype: str, tmp_path: Path) -> None:
    """Greedy outputs in a batch and in chunks; both score each token, given those before it."""
    folder = save_tiny_model(family, tmp_path)
    model: Any = load(folder, dtype=dtype).model
    assert isinstance(model, SequentialRunner if family in SEQUENTIAL else ModelRunner)
    own: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
    prompts = make_prompts([5, 17, 40], VOCAB_SIZE)

    outputs = run_to_end(model, [make_sequence(p, max_tokens=NUM_OUTPUT) for p in prompts], 13)

    worst, num_same, num_ties = 0.0, 0, 0
    for prompt, output_ids in zip(prompts, outputs, strict=True):
        known = torch.tensor([prompt + output_ids[:-1]])
        expected = own(known, use_cache=False).logits[0, len(prompt) - 1 :].float()
        for row, token_id in zip(expected, output_ids, strict=True):
            behind = float((row.max() - row[token_id]) / row.std())
            assert behind <= 2 * TOLERANCES[dtype], "a token that is no tie for the best one"
            num_same += behind == 0.0
            num_ties += behind > 0.0
        sequence = make_sequence(known[0].tolist())
        allot_blocks([sequence], model)
        found = model.logits([Chunk(sequence, 0, known.shape[1], samples=True)])[0].float()
        worst = max(worst, float((found - expected[-1]).abs().max() / expected[-1].std()))
    print(f"{family} {dtype}: {num_same} best, {num_ties} near-ties, worst {worst:.4f}")
    assert worst <= TOLERANCES[dtype]
    assert num_same >= 0.9 * len(prompts) * NUM_OUTPUT
