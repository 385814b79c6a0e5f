"""Made-up tokenizers for real chat templates: bytes, and the marks that a template names as added
tokens."""

import json
import re
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from tests.fakes import BOS_ID, EOS_ID, PAD_ID, hash_tokenizer
from tests.real.conversations import SPECIAL_TOKENS
from tests.real.parts import template

_MARK = re.compile(r"""</?[|｜]?[\w▁.:-]+[|｜]?> | <\|"\|> | \[/?[A-Z_]{3,}\]""", re.VERBOSE)
_FIRST_ID = max(BOS_ID, EOS_ID, PAD_ID) + 1


class Marks(StrEnum):
    """What the tokenizer makes of the template's marks."""

    SPECIAL = "special"  # added tokens that are special
    ADDED = "added"  # added tokens that are not
    TEXT = "text"  # no tokens of their own


@cache
def marks_of(name: str) -> tuple[str, ...]:
    """The marks in one of llama.cpp's templates."""
    found = dict.fromkeys(_MARK.findall(template(name)))
    return tuple(mark for mark in found if mark not in SPECIAL_TOKENS.values())


def write_made_up_folder(name: str, folder: Path, marks: Marks, eos_token: str) -> None:
    """Tokenizer and template. `eos_token`: what ends the model's turn."""
    tokenizer: dict[str, Any] = json.loads(hash_tokenizer().tokenizer_json)
    [entry, *_] = tokenizer["added_tokens"]
    contents = ["<s>", "</s>", "<pad>", "<unk>"]
    contents += [] if marks is Marks.TEXT else marks_of(name)
    if eos_token not in contents:
        contents.append(eos_token)
    always = {*SPECIAL_TOKENS.values(), eos_token}
    tokenizer["added_tokens"] = [
        {
            **entry,
            "id": 256 + number,
            "content": content,
            "special": marks is Marks.SPECIAL or content in always,
        }
        for number, content in enumerate(contents)
    ]
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {k: v for k, v in vocabulary.items() if v < 256}
    configuration = {
        **SPECIAL_TOKENS,
        "eos_token": eos_token,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template(name),
    }
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration))
