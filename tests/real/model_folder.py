"""A model's folder with a real tokenizer and chat template, and a stand-in for its weights."""

import hashlib
import json
import secrets
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer

from tests.real.families import Family
from tests.real.parts import template, tokenizer_folder
from tests.real.scripted import SAYS


def write_model_folder(family: Family, folder: Path) -> None:
    source = tokenizer_folder(family.tokenizer)
    folder.mkdir()
    tokenizer = folder / "tokenizer.json"
    if family.added_tokens:
        fast = Tokenizer.from_file(str(source / "tokenizer.json"))
        fast.add_tokens([AddedToken(each, normalized=False) for each in family.added_tokens])
        fast.save(str(tokenizer))
    else:
        tokenizer.symlink_to(source / "tokenizer.json")
    configuration = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    if family.template:
        configuration["chat_template"] = template(family.template)
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration))
    (folder / "config.json").write_text(json.dumps(family.config))
    if family.generation:
        (folder / "generation_config.json").write_text(json.dumps(family.generation))
    # The loader looks for the head, to tell decoders from embedding models, and at its rows.
    text = family.config.get("text_config", family.config)
    head = np.zeros((text.get("vocab_size", 2**18), 1), np.float16)
    save_file({"lm_head.weight": head}, folder / "model.safetensors")
    (folder / SAYS).mkdir()


def say(folder: Path, text: str) -> str:
    """What a prompt must contain so that the model says a text."""
    name = hashlib.sha256(text.encode()).hexdigest()[:8]
    file = folder / SAYS / name
    if not file.exists():  # a model may read it at any time
        new = file.with_name(f"{name}-{secrets.token_hex(8)}")
        new.write_text(text, encoding="utf-8")
        new.rename(file)
    return f"say:{name}"
