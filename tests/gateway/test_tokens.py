"""How texts, pairs and chats become token ids, are cut, and become text again, beside what the
library `tokenizers` does by its own rules, and beside other work."""

import asyncio
import json
import os.path
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from contract.model_cards import TokenizerFiles
from contract.token_texts import TextStream
from gateway.models.tokens import Cut, ModelTokenizer, NoRoom, Over, tokenised
from tests.fakes import BOS_ID, encode_text, hash_tokenizer, output_text
from tests.gateway.vector_worker import vector_files

pytestmark = pytest.mark.anyio

LONG = "what a long text " * 60_000
# The loop ticks about once in a millisecond; tokenising takes hundreds of them. If the loop stood
# still, it would tick once before and once after.
LEAST_TICKS = 20
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
BARE = Tokenizer.from_str(hash_tokenizer().tokenizer_json)


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


@pytest.mark.parametrize(
    "encode",
    [
        lambda tokenizer: list(tokenizer.encode_each([LONG], None)),
        lambda tokenizer: list(tokenizer.encode_pairs([("a", LONG)])),
        lambda tokenizer: list(tokenizer.encode_each([LONG], 900_000)),
        lambda tokenizer: tokenizer.count(LONG),
    ],
    ids=["text", "pair", "limited", "count"],
)
async def test_the_event_loop_goes_on_while_a_long_text_is_tokenised(
    encode: Callable[[ModelTokenizer], object],
) -> None:
    """Other calls of the gateway are answered meanwhile."""
    has_begun = threading.Event()

    def encoded() -> object:
        has_begun.set()
        return encode(OURS["bytes"])

    task = asyncio.create_task(tokenised(encoded, len(LONG)))
    num_ticks = 0
    while not task.done():
        await asyncio.sleep(0.001)
        num_ticks += has_begun.is_set()

    assert await task
    assert num_ticks >= LEAST_TICKS


def test_texts_and_pairs_have_the_ids_that_they_have_alone() -> None:
    """With special tokens; rendered chats without."""
    tokenizer = OURS["bytes"]
    alone = Tokenizer.from_str(FILES["bytes"].tokenizer_json)
    texts, pairs = ["", "a", "größer 漢字", "<eos> b"], [("a", "größer"), ("b" * 99, "")]

    assert list(tokenizer.encode_each(texts, None)) == [alone.encode(text).ids for text in texts]
    [chat] = tokenizer.encode_each(["a<eos>"], None, adds_special_tokens=False)
    assert chat == alone.encode("a<eos>", add_special_tokens=False).ids
    encodings = [alone.encode(*pair) for pair in pairs]
    assert list(tokenizer.encode_pairs(pairs)) == [(e.ids, e.type_ids.count(0)) for e in encodings]


@pytest.mark.parametrize("prompt", ["Count 3. \N{REPLACEMENT CHARACTER}", "x é🎉", "é", ""])
@pytest.mark.parametrize("output", ["A", "東🎉x", "\ufffd q"])
def test_a_prompt_that_ends_anywhere_stays_out_of_the_stream(prompt: str, output: str) -> None:
    """Cut at every byte; offsets count the characters that came before."""
    token_ids = encode_text(prompt + output)
    for cut in range(len(token_ids) + 1):
        stream = TextStream(BARE, DecodeStream, token_ids[:cut], offset=7)
        pushed = [stream.push(token_id) for token_id in token_ids[cut:]]
        before, after = output_text(token_ids[:cut]), prompt + output
        rest = after[len(os.path.commonprefix([before, after])) :]
        assert "".join(piece for _, piece in pushed) + stream.end() == rest
        seen = ""
        for offset, piece in pushed:
            assert offset == 7 + len(seen)
            seen += piece
