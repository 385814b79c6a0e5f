"""A byte tokenizer with tokens of several bytes and with added tokens, as real models have them."""

import functools
import json
from collections.abc import Iterable, Sequence

import msgspec
from tokenizers import Tokenizer

from contract.model_cards import TokenizerFiles
from contract.output_formats import ReasoningFormat, ToolFormat
from gateway.grammars.compiled import Around
from gateway.grammars.rules.calls import Reasoning
from gateway.models.tokens import ModelTokenizer
from tests.fakes import EOS_ID, INLINE, VOCAB_SIZE, hash_tokenizer
from workers.engine.grammar import Grammars

# Some are special, some are not, and some do not look like marks at all.
SPECIAL = ("<|im_end|>", "[INST]", '<|"|>')
ORDINARY = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<h1>", "[MARK]", "aha")
_MERGES = ("th", "in", "ink", "<th", '{"', '":', '",', ' "', "re", "er", "an", "ame", "</", ">\n")


@functools.cache
def marked_tokenizer(marks: tuple[str, ...] = ORDINARY) -> TokenizerFiles:
    """The hash model's tokenizer with `marks` besides the special tokens."""
    files = hash_tokenizer()
    parts = json.loads(files.tokenizer_json)
    vocab, merges = parts["model"]["vocab"], parts["model"]["merges"]
    for text in _MERGES:
        pieces = _pieces(text)
        for end in range(2, len(pieces) + 1):
            merged = "".join(pieces[:end])
            if merged not in vocab:
                merges.append(["".join(pieces[: end - 1]), pieces[end - 1]])
                vocab[merged] = len(vocab)
    first = len(vocab)
    for number, content in enumerate(dict.fromkeys([*SPECIAL, *marks])):
        is_special = content in SPECIAL
        shape = {**parts["added_tokens"][0], "content": content, "special": is_special}
        parts["added_tokens"].append(shape | {"id": first + number})
    return msgspec.structs.replace(files, tokenizer_json=json.dumps(parts))


def _pieces(text: str) -> list[str]:
    """GPT-2's characters for the bytes of a text."""
    return list(text.replace(" ", "\u0120").replace("\n", "\u010a"))


class MarkedModel:
    """What gateway and worker make of such a tokenizer."""

    def __init__(
        self,
        marks: Iterable[str] = ORDINARY,
        reasoning: ReasoningFormat | None = None,
        tool_format: ToolFormat | None = None,
    ) -> None:
        plain = marked_tokenizer(tuple(marks))
        self.files = msgspec.structs.replace(plain, reasoning=reasoning, tool_format=tool_format)
        self.tokenizer = Tokenizer.from_str(plain.tokenizer_json)
        self.vocab_size = self.tokenizer.get_vocab_size()
        self.grammars = grammars_of(plain.tokenizer_json, self.vocab_size)
        self._marks = ModelTokenizer("m", self.files).marks

    def around(self, state: str = "none", budget: int | None = None) -> Around:
        """What a chat's answer stands in. `state`: how the prompt leaves the reasoning."""
        format_ = self.files.reasoning
        reasoning: Reasoning | None = None
        if format_ is not None:
            fields = msgspec.structs.asdict(format_)
            reasoning = {"format": fields, "state": state, "budget": budget}
        ids, added = self._marks["ids"], self._marks["added"]
        return {"marks": {"ids": ids, "added": added, "ends": [EOS_ID]}, "reasoning": reasoning}

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def text(self, token_ids: Sequence[int]) -> str:
        """With special tokens, but without the ending one."""
        found: str = self.tokenizer.decode(
            [i for i in token_ids if i != EOS_ID], skip_special_tokens=False
        )
        return found


@functools.cache
def grammars_of(tokenizer_json: str, vocab_size: int) -> Grammars:
    assert vocab_size > VOCAB_SIZE
    return Grammars(tokenizer_json, vocab_size, {EOS_ID}, *INLINE)
