"""Tokens of long texts, in bounded memory.

`tokenizers` takes about 140 bytes for each character while it encodes. So a long text is read in
pieces. Tokens far enough from the edges of a piece are the same as in the whole text, because
words, and what merges with them, are shorter than that distance.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

PIECE_CHARS = 65_536
_EDGE_CHARS = 256  # at a cut, where the tokens may be others than in the whole


class Over(msgspec.Struct, frozen=True):
    """A text has too many tokens: `num_tokens` or, unless `is_exact`, even more."""

    num_tokens: int
    is_exact: bool = True

    def __str__(self) -> str:
        return f"{self.num_tokens}" if self.is_exact else f"over {self.num_tokens}"


def least_tokens(tokenizer: Any, text: str, most: int) -> int:
    """Returns a lower bound of the text's number of tokens. Stops counting above `most`."""
    num_tokens = 0
    for start, piece in _pieces(text):
        num_tokens += _num_inner(tokenizer, piece, start > 0, start + len(piece) < len(text))
        if num_tokens > most:
            break
    return num_tokens


def about_tokens(tokenizer: Any, text: str) -> int:
    """The text's number of tokens, except for a few at the cuts and special ones."""
    encodings = (
        tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0]
        for _, piece in _pieces(text)
    )
    return sum(len(found.ids) for found in encodings)


def part_with(
    tokenizer: Any, text: str, num_tokens: int, *, of_end: bool = False
) -> tuple[str, Any]:
    """Returns a beginning or an end of the text, and its encoding without special tokens. At least
    `num_tokens` of these are the same as in the whole text. A shorter text is returned whole."""
    num_chars = PIECE_CHARS
    while num_chars < len(text):
        part = text[-num_chars:] if of_end else text[:num_chars]
        [found] = tokenizer.encode_batch([part], add_special_tokens=False)
        if _inner(found, num_chars, of_end, not of_end) >= num_tokens:
            return part, found
        num_chars *= 2
    return text, tokenizer.encode_batch([text], add_special_tokens=False)[0]


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    for start in range(0, len(text), PIECE_CHARS):
        yield start, text[start : start + PIECE_CHARS]


def _num_inner(tokenizer: Any, piece: str, cut_before: bool, cut_behind: bool) -> int:
    # Not `encode_batch_fast`, which gives no places in the text.
    [found] = tokenizer.encode_batch([piece], add_special_tokens=False)
    return _inner(found, len(piece), cut_before, cut_behind)


def _inner(found: Any, num_chars: int, cut_before: bool, cut_behind: bool) -> int:
    """Counts the tokens of a piece that are far enough from where it was cut."""
    first = _EDGE_CHARS if cut_before else 0
    last = num_chars - _EDGE_CHARS if cut_behind else num_chars
    return sum(first <= start and end <= last for start, end in found.offsets)
