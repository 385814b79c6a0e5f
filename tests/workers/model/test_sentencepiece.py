"""Folders whose tokenizer is a tokenizer.model alone, SentencePiece's own format."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer

from tests.tiny_models import edit_json, save_tiny_model
from tests.workers.model.loading import load
from workers.model.tokenizer import read_tokenizer

VOCAB_SIZE = 400
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "hello", "world")
# A configuration's class, and whether it is one for unigrams, too.
CLASSES = {"LlamaTokenizer": False, "LlamaTokenizerFast": False, "PreTrainedTokenizerFast": True}
TEXTS = (
    "hello world 7",
    "  two  spaces ",
    "Grüße ☃ 日本語 🙂",
    "tabs\tand\n\nnewlines\n",
    "def f(x):\n    return x ** 2",
    "",
    " ",
    "a" * 200,
)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def model_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with Llama's settings: bytes for what it does not know, spaces as they are."""
    folder = tmp_path_factory.mktemp(request.param)
    words = random.Random(1).choices(WORDS, k=9000)
    (folder / "text").write_text("\n".join(" ".join(words[i : i + 9]) for i in range(0, 9000, 9)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tokenizer"),
        model_type=request.param,
        vocab_size=VOCAB_SIZE,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


@pytest.fixture(scope="module")
def saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"), vocab_size=VOCAB_SIZE)


@pytest.fixture
def llama(saved_llama: Path, model_file: Path, tmp_path: Path) -> Path:
    """A model with that file alone, and no configuration of its tokenizer."""
    folder = tmp_path / "llama"
    shutil.copytree(saved_llama, folder)
    for file in (*folder.glob("*token*"), folder / "chat_template.jinja"):
        file.unlink()
    shutil.copy(model_file, folder / "tokenizer.model")
    return folder


def configure(folder: Path, name: str | None, **settings: Any) -> None:
    """Writes a tokenizer_config.json that names a class."""
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    named = {} if name is None else {"tokenizer_class": name}
    text = json.dumps(special | named | settings)
    (folder / "tokenizer_config.json").write_text(text)


@pytest.mark.parametrize("name", [*CLASSES, None])
def test_texts_have_the_tokens_of_sentencepiece(
    llama: Path, model_file: Path, name: str | None
) -> None:
    """Whatever class the configuration names; each text comes back as it was. Llama's own, for BPE,
    reads a first space otherwise."""
    if not CLASSES.get(name or "", True) and "unigram" in str(model_file):
        pytest.skip("no model has both")
    texts = [text for text in TEXTS if CLASSES.get(name or "", True) or not text.startswith(" ")]
    configure(llama, name)
    own = sentencepiece.SentencePieceProcessor(model_file=str(model_file))

    fast = Tokenizer.from_str(read_tokenizer(str(llama)).tokenizer_json)

    for text in texts:
        ids = fast.encode(text, add_special_tokens=False).ids
        assert ids == own.encode(text)
        assert fast.decode(ids) == text


def test_a_folder_with_the_file_alone_loads(llama: Path) -> None:
    """Without a tokenizer_config.json, too; its end token is the configuration's."""
    edit_json(llama / "config.json", eos_token_id=2)
    edit_json(llama / "generation_config.json", eos_token_id=2)

    loaded = load(llama)

    assert loaded.eos_token_ids == (2,)
    assert loaded.tokenizer.chat_template is None


def test_an_end_token_of_the_configuration_is_found_in_the_file(llama: Path) -> None:
    """And a chat template beside it is used."""
    configure(llama, "LlamaTokenizer", chat_template="{{ messages[0].content }}")
    edit_json(llama / "config.json", eos_token_id=5)
    edit_json(llama / "generation_config.json", eos_token_id=5)

    loaded = load(llama)

    assert loaded.eos_token_ids == (2, 5)
    assert loaded.tokenizer.chat_template == "{{ messages[0].content }}"
