"""Prompts of 32k tokens in chunks: bounded memory, and the tokens of transformers' forward."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_families import VOCAB_SIZE
from tests.tiny_models import save_tiny_model
from tests.workers.model.driver import make_prompts

NUM_TOKENS = 32 * 1024
# One layer of 32k tokens keeps 4 MiB of KV here. A mask of 32k by 32k would take 1024 MiB.
BOUND_MIB = 256


@pytest.mark.campaign
def test_a_prompt_of_32k_tokens_runs_in_bounded_memory(tmp_path: Path) -> None:
    """In chunks of 2048, up to the last rotary position; measured in its own process."""
    folder = save_tiny_model(
        "llama",
        tmp_path,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=NUM_TOKENS + 2,
    )
    own: Any = AutoModelForCausalLM.from_pretrained(folder)
    [prompt] = make_prompts([NUM_TOKENS], VOCAB_SIZE)
    with torch.inference_mode():
        logits = own(torch.tensor([prompt]), use_cache=False, logits_to_keep=1).logits[0, -1]

    command = [sys.executable, "-m", "tests.workers.model.long_prompt"]
    ran = subprocess.run(
        [*command, str(folder), str(NUM_TOKENS), "2048"], capture_output=True, text=True, check=True
    )
    found = json.loads(ran.stdout.splitlines()[-1])

    print(f"peak memory grew by {found['grown_mib']:.0f} MiB")
    assert found["grown_mib"] < BOUND_MIB
    assert found["output_ids"][0] == int(logits.argmax())
