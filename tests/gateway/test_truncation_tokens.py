"""How texts, pairs and ids are cut, beside what the library `tokenizers` does by its own rules."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from contract.model_cards import TokenizerFiles
from gateway.models.tokens import Cut, ModelTokenizer, NoRoom, Over
from tests.fakes import BOS_ID, hash_tokenizer
from tests.gateway.vector_worker import vector_files

TEXTS = st.text(st.sampled_from("ab é漢🌍\n<"), max_size=40)
SIDES = st.booleans()
SIZES = st.integers(1, 60)


def ids_of(name: str, text: str, *, adds_special_tokens: bool = True) -> list[int]:
    [ids] = OURS[name].encode_each([text], None, adds_special_tokens=adds_special_tokens)
    assert not isinstance(ids, Over)
    return ids


def _bert() -> TokenizerFiles:
    """Words, pieces of words, and BERT's special tokens."""
    pieces = ["[UNK]", "[CLS]", "[SEP]", "a", "b", "##a", "##b", "ab", "é", "漢", "<"]
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": f"[{name}]",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, name in enumerate(("UNK", "CLS", "SEP"))
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]},
        "decoder": None,
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {piece: number for number, piece in enumerate(pieces)},
        },
    }
    return msgspec.structs.replace(hash_tokenizer(), tokenizer_json=json.dumps(tokenizer))


FILES = {"bytes": vector_files(), "words": _bert(), "bare": hash_tokenizer()}
OURS = {name: ModelTokenizer(name, files) for name, files in FILES.items()}


def reference(name: str, cut: Cut) -> Tokenizer:
    """The library with its own truncation, as transformers use it."""
    tokenizer = Tokenizer.from_str(FILES[name].tokenizer_json)
    side = "left" if cut.keeps_end else "right"
    tokenizer.enable_truncation(cut.max_tokens, direction=side, strategy="longest_first")
    return tokenizer


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FILES)), TEXTS, SIZES, SIDES)
def test_a_text_is_cut_as_by_the_library(name: str, text: str, size: int, keeps_end: bool) -> None:
    """Special tokens are kept. What the library cannot do is refused."""
    cut, num_special = Cut(size, keeps_end), len(ids_of(name, ""))
    if size > num_special:
        expected = reference(name, cut).encode(text).ids
        assert OURS[name].cut_text(text, cut) == expected
        assert len(expected) <= size
    elif ids_of(name, text, adds_special_tokens=False):
        with pytest.raises(NoRoom):
            OURS[name].cut_text(text, Cut(num_special, keeps_end))


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(sorted(FILES)), TEXTS, TEXTS, SIZES, SIDES)
def test_a_pair_is_cut_as_by_the_library(
    name: str, first: str, second: str, size: int, keeps_end: bool
) -> None:
    """The longer text loses the most; the number of tokens of the first text is right."""
    if size < len(Tokenizer.from_str(FILES[name].tokenizer_json).encode("", "").ids) + 2:
        return
    cut = Cut(size, keeps_end)
    [expected] = reference(name, cut).encode_batch_fast([(first, second)])
    ids, num_first = OURS[name].cut_pair((first, second), cut)
    assert (ids, num_first) == (expected.ids, expected.type_ids.count(0))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FILES)), TEXTS, SIZES, SIDES)
def test_an_instruction_is_never_cut(name: str, text: str, size: int, keeps_end: bool) -> None:
    """Whichever end of the text is kept; of a pair it is before the first text."""
    kept, cut = "abba: ", Cut(size, keeps_end)
    own = ids_of(name, kept, adds_special_tokens=False)
    whole = ids_of(name, kept + text)
    try:
        found = [
            OURS[name].cut_text(text, cut, kept),
            OURS[name].cut_pair((text, "b"), Cut(size + 3, keeps_end), kept)[0],
        ]
    except NoRoom:
        assert size < len(own) + 6
        return
    for ids in found:
        start = int(ids[0] != own[0])
        assert ids[start : start + len(own)] == own
    assert len(found[0]) == min(size, len(whole))
    if len(whole) <= size:
        assert found[0] == whole


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FILES)), TEXTS, st.integers(1, 30), SIDES)
def test_a_shortened_text_is_a_part_with_few_tokens(
    name: str, text: str, size: int, keeps_end: bool
) -> None:
    """The beginning or the end, and not much less than it may be."""
    found = OURS[name].shorten(text, size, keeps_end=keeps_end)
    before, after = (ids_of(name, each, adds_special_tokens=False) for each in (text, found))
    assert text.endswith(found) if keeps_end else text.startswith(found)
    assert len(after) <= size
    assert found == text if len(before) <= size else len(after) > size - 4


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 255), min_size=1, max_size=20), st.booleans(), SIZES, SIDES)
def test_ids_keep_the_token_with_which_prompts_begin(
    ids: list[int], has_bos: bool, size: int, keeps_end: bool
) -> None:
    """Only where the end is kept, and where they have it."""
    ids = [BOS_ID] * has_bos + ids
    found = OURS["bare"].cut_ids(ids, Cut(size, keeps_end))
    assert len(found) == min(size, len(ids))
    if not keeps_end or len(ids) <= size:
        assert found == ids[:size]
    elif has_bos:
        assert found == [BOS_ID, *ids[len(ids) - size + 1 :]]
    else:
        assert found == ids[-size:]
