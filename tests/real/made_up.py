"""Made-up tokenizers for real chat templates: bytes, and the marks that a template names as added
tokens."""

import json
import re
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from tests.fakes import hash_tokenizer
from tests.real.conversations import SPECIAL_TOKENS
from tests.real.parts import template
from tests.real.scripted import SAYS

MARK = re.compile(r"""</?[|｜]?[\w▁.:-]+[|｜]?> | <\|"\|> | \[/?[A-Z_]{3,}\]""", re.VERBOSE)
_NUM_BYTES = 256


class Marks(StrEnum):
    """What the tokenizer makes of the template's marks."""

    SPECIAL = "special"  # added tokens that are special
    ADDED = "added"  # added tokens that are not
    TEXT = "text"  # no tokens of their own


@cache
def marks_of(name: str) -> tuple[str, ...]:
    """The marks in one of llama.cpp's templates."""
    found = dict.fromkeys(MARK.findall(template(name)))
    return tuple(mark for mark in found if mark not in SPECIAL_TOKENS.values())


def write_made_up_folder(name: str, folder: Path, marks: Marks) -> None:
    """Tokenizer and template, without the rest of a model."""
    tokenizer: dict[str, Any] = json.loads(hash_tokenizer().tokenizer_json)
    [entry, *_] = tokenizer["added_tokens"]
    contents = [*SPECIAL_TOKENS.values(), *(() if marks is Marks.TEXT else marks_of(name))]
    tokenizer["added_tokens"] = [
        {
            **entry,
            "id": _NUM_BYTES + number,
            "content": content,
            "special": marks is Marks.SPECIAL or content in SPECIAL_TOKENS.values(),
        }
        for number, content in enumerate(contents)
    ]
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {k: v for k, v in vocabulary.items() if v < _NUM_BYTES}
    configuration = {
        **SPECIAL_TOKENS,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template(name),
    }
    (folder / SAYS).mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration))
