"""The folder of SmolLM2's package is what transformers reads in its GGUF file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.real.parts import FOLDER
from workers.model.gguf_cache import SMOLLM2, _fetch, smollm2_folder

_CHAT = [{"role": "user", "content": "What is the capital of France?"}]


_FETCHED = [*(FOLDER.parent / "models").glob(f"{SMOLLM2}-*/config.json")]


@pytest.mark.campaign
@pytest.mark.long
@pytest.mark.skipif(not _FETCHED, reason="SmolLM2 is not fetched: batchway up --model smollm2")
def test_smollm2_answers_as_transformers_does_with_its_file(tmp_path: Path) -> None:
    """The same weights, bit by bit, the same prompt, and the right end."""
    file = _fetch(tmp_path)
    from_file: dict[str, Any] = {
        "pretrained_model_name_or_path": file.parent,
        "gguf_file": file.name,
    }
    models: list[Any] = [
        AutoModelForCausalLM.from_pretrained(smollm2_folder()),
        AutoModelForCausalLM.from_pretrained(dtype=torch.float32, **from_file),
    ]
    tokenizers: list[Any] = [
        AutoTokenizer.from_pretrained(smollm2_folder()),
        AutoTokenizer.from_pretrained(**from_file),
    ]

    first, second = (model.state_dict() for model in models)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    prompts = [
        tokenizer.apply_chat_template(
            _CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        for tokenizer in tokenizers
    ]
    assert torch.equal(prompts[0].input_ids, prompts[1].input_ids)
    output = models[0].generate(**prompts[0], do_sample=False, max_new_tokens=20)
    answer = tokenizers[0].decode(output[0, prompts[0].input_ids.shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
