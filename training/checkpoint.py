"""Writes and reads the model's folder in transformers' format."""

import copy
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from training.tokenizer import BOS_ID, END_ID, PAD_ID, save_tokenizer


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Writes weights in bfloat16, configuration and tokenizer; each file atomically."""
    half = copy.deepcopy(model).to(torch.bfloat16)  # type: ignore[arg-type]
    half.set_attn_implementation("sdpa")
    half.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=BOS_ID, eos_token_id=END_ID, pad_token_id=PAD_ID, do_sample=False
    )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        half.save_pretrained(scratch)
        save_tokenizer(Path(scratch))
        for path in Path(scratch).iterdir():
            path.chmod(0o644)
            shutil.move(path, folder / path.name)


def load(folder: Path) -> LlamaForCausalLM:
    """The saved model in float32, the precision of the evaluation."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    model.train(False)
    return model
