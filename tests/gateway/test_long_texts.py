"""Long texts are counted and cut in pieces, with the tokens that they have as a whole."""

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from gateway.models import tokens
from gateway.models.tokens import Cut, ModelTokenizer, Over
from tests.fakes import hash_tokenizer

ROOT = Path(__file__).resolve().parents[2]
CORPUS = [path.read_text() for path in sorted(ROOT.glob("docs/*.md"))]
WORDS = " ".join(CORPUS).split(" ")
PIECE_CHARS = 2_048
NUM_TEXTS = 6
SCRIPTS = ("aAx.-=#_漢あ😀é\n\t", "abcdefghij", "👩‍👩‍👧🏳️‍🌈e\u0301ก็한", "\r\n  <eos>[CLS]")


def _trained(
    model: models.Model, trainer: trainers.Trainer, texts: Iterable[str] = CORPUS, **parts: Any
) -> Tokenizer:
    found = Tokenizer(model)
    for name, part in parts.items():
        setattr(found, name, part)
    found.train_from_iterator(texts, trainer)
    return found


def _one_word() -> Tokenizer:
    """As Llama 2: all of a text is one word to merge."""
    texts = [text.replace(" ", "▁")[:9_000] for text in CORPUS[:4]]
    return _trained(
        models.BPE(unk_token="<unk>", fuse_unk=True),
        trainers.BpeTrainer(vocab_size=2_000, special_tokens=["<unk>"]),
        [text[at : at + 40] for text in texts for at in range(0, len(text), 40)],
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    )


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": lambda: _trained(
        models.BPE(),
        trainers.BpeTrainer(vocab_size=3_000, special_tokens=["<s>"]),
        pre_tokenizer=pre_tokenizers.ByteLevel(),
        post_processor=processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 0)]),
    ),
    "one word": _one_word,
    "sentencepiece": lambda: _trained(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=2_000, special_tokens=["<unk>"], unk_token="<unk>"),
        CORPUS[:9],
        normalizer=normalizers.Sequence(
            [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
        ),
        pre_tokenizer=pre_tokenizers.Metaspace(),
    ),
    "wordpiece": lambda: _trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=3_000, special_tokens=["[UNK]", "[CLS]", "[SEP]"]),
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        post_processor=processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1)),
    ),
    "demo": lambda: Tokenizer.from_file(str(ROOT / "infra/demo_model/tokenizer.json")),
}


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest) -> tuple[ModelTokenizer, Tokenizer]:
    """A model's tokenizer, and the library's."""
    written = KINDS[request.param]().to_str()
    files = msgspec.structs.replace(hash_tokenizer(), tokenizer_json=written)
    plain = Tokenizer.from_str(written)
    plain.no_truncation()
    plain.no_padding()
    return ModelTokenizer("m", files), plain


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that texts of a few thousand characters are long."""
    monkeypatch.setattr(tokens, "PIECE_CHARS", PIECE_CHARS)


def texts(seed: int, max_run: int = 300) -> Iterator[str]:
    """Words, prose, runs of one character, scripts, all mixed. `max_run`: of characters without a
    space between them."""
    rng = random.Random(seed)
    for _ in range(NUM_TEXTS):
        parts, wanted = list[str](), rng.randrange(PIECE_CHARS + 1, 8 * PIECE_CHARS)
        while sum(map(len, parts)) < wanted:
            size = rng.choice([3, 30, max_run])
            parts.append(
                rng.choice(
                    [
                        " ".join(rng.choices(WORDS, k=size)),
                        rng.choice(CORPUS)[: 4 * size],
                        rng.choice(" aA.=#漢😀é\n\t0") * (size // 2),
                        "".join(rng.choices(rng.choice(SCRIPTS), k=size)),
                        "".join(map(chr, rng.choices(range(32, 0x2FFF), k=size))),
                    ]
                )
            )
        yield ("" if max_run == 300 else " ").join(parts)


def test_a_text_that_fits_has_the_ids_of_the_library(
    both: tuple[ModelTokenizer, Tokenizer],
) -> None:
    """Also where it has exactly as many tokens as it may have; with one more it is refused."""
    own, plain = both
    for text in texts(1):
        ids = plain.encode(text).ids
        assert [*own.encode_each([text], len(ids))] == [ids]
        assert list(own.encode_each([text], None)) == [ids]
        [refused] = own.encode_each([text], len(ids) - 1)
        assert isinstance(refused, Over)
        assert len(ids) * 0.4 < refused.num_tokens <= len(ids)
        [pair] = own.encode_pairs([(text, text)], 2 * len(ids))
        [expected] = plain.encode_batch_fast([(text, text)])
        if len(expected) > 2 * len(ids):
            assert pair == Over(len(expected))
            continue
        assert pair == (expected.ids, expected.type_ids.count(0))


def test_a_text_is_refused_without_all_of_its_tokens(
    both: tuple[ModelTokenizer, Tokenizer],
) -> None:
    """Only so much of it is read as shows that it is too long."""
    own, plain = both
    for text in texts(2):
        num_tokens = len(plain.encode(text * 3, add_special_tokens=False).ids)
        [refused] = own.encode_each([text * 3], num_tokens // 3)
        assert isinstance(refused, Over)
        assert not refused.is_exact
        assert num_tokens // 3 < refused.num_tokens <= num_tokens
        assert abs(own.count(text * 3) - num_tokens) < 0.05 * num_tokens


@pytest.mark.parametrize("keeps_end", [True, False])
@pytest.mark.each_value
def test_a_long_text_is_cut_as_a_whole_one(
    both: tuple[ModelTokenizer, Tokenizer], keeps_end: bool
) -> None:
    """Where the cut is in no run of hundreds of characters: its tokens depend on where it began."""
    own, plain = both
    for text in texts(3, max_run=99):
        bare = plain.encode(text, add_special_tokens=False).ids
        size = len(bare) // 7 + 9
        cut = Cut(size, keeps_end)
        num_special = plain.num_special_tokens_to_add(False)
        kept = size - num_special
        around = plain.encode("").ids
        expected = bare[-kept:] if keeps_end else bare[:kept]
        found = own.cut_text(text, cut)
        assert len(found) == size
        assert [i for i in found if i not in around] == [i for i in expected if i not in around]
        assert own.cut_chat(text, cut) == own.cut_ids(bare, cut)
        assert len(own.cut_pair(("a", text), cut)[0]) == size


@pytest.mark.parametrize("keeps_end", [True, False])
@pytest.mark.each_value
def test_a_long_text_is_shortened_as_a_short_one(
    both: tuple[ModelTokenizer, Tokenizer], keeps_end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same part of it is left."""
    own, _ = both
    for text in texts(4):
        found = own.shorten(text, 99, keeps_end=keeps_end)
        with monkeypatch.context() as patch:
            patch.setattr(tokens, "PIECE_CHARS", len(text))
            assert own.shorten(text, 99, keeps_end=keeps_end) == found
