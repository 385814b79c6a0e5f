"""How texts, pairs and chats become token ids: beside other work, as `tokenizers` alone does it."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from gateway.models.tokens import ModelTokenizer, tokenised
from tests.gateway.vector_worker import vector_files

pytestmark = pytest.mark.anyio

LONG = "what a long text " * 60_000
# The loop ticks about once in a millisecond; tokenising takes hundreds of them. If the loop stood
# still, it would tick once before and once after.
LEAST_TICKS = 20


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer("m", vector_files())


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
    tokenizer: ModelTokenizer, encode: Callable[[ModelTokenizer], object]
) -> None:
    """Other calls of the gateway are answered meanwhile."""
    has_begun = threading.Event()

    def encoded() -> object:
        has_begun.set()
        return encode(tokenizer)

    task = asyncio.create_task(tokenised(encoded, len(LONG)))
    num_ticks = 0
    while not task.done():
        await asyncio.sleep(0.001)
        num_ticks += has_begun.is_set()

    assert await task
    assert num_ticks >= LEAST_TICKS


def test_texts_and_pairs_have_the_ids_that_they_have_alone(tokenizer: ModelTokenizer) -> None:
    """With special tokens; rendered chats without."""
    alone = Tokenizer.from_str(vector_files().tokenizer_json)
    texts, pairs = ["", "a", "größer 漢字", "<eos> b"], [("a", "größer"), ("b" * 99, "")]

    assert list(tokenizer.encode_each(texts, None)) == [alone.encode(text).ids for text in texts]
    [chat] = tokenizer.encode_each(["a<eos>"], None, adds_special_tokens=False)
    assert chat == alone.encode("a<eos>", add_special_tokens=False).ids
    encodings = [alone.encode(*pair) for pair in pairs]
    assert list(tokenizer.encode_pairs(pairs)) == [(e.ids, e.type_ids.count(0)) for e in encodings]
