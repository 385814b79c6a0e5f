"""Decodes a growing text and tells where each token starts.

Decodes as workers do: incomplete characters wait, special tokens have no text.
"""

import os.path
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

# A token such as "▁world" decodes with its leading space only after other tokens.
_NUM_CONTEXT_IDS = 6
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text after `context_ids`. Its first character has the index `offset`."""

    def __init__(
        self, tokenizer: "Tokenizer", context_ids: Sequence[int] = (), offset: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        context = context_ids[-_NUM_CONTEXT_IDS:]
        self._stream = _stream_after(context)
        # The context's text, if a character may be incomplete at its end: then the first piece
        # repeats it.
        text = tokenizer.decode(list(context), skip_special_tokens=True)
        self._context = text if text.endswith(_INCOMPLETE) else ""
        # Ids that do not form a whole character yet.
        self._undecoded: list[int] = list(context) if self._context else []
        self._offset = offset

    def push(self, token_id: int) -> tuple[int, str]:
        """Returns the token's offset, and the text that it completes."""
        start = self._offset
        self._undecoded.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception:  # tokenizers raises bare Exceptions for ids that decode to no text
            self._stream = _stream_after(())
            piece = self._decoded()
        if piece is None:
            return start, ""
        self._undecoded.clear()
        piece = self._after_context(piece)
        self._offset += len(piece)
        return start, piece

    def end(self) -> str:
        """Returns the rest: an incomplete character."""
        text = self._after_context(self._decoded())
        self._undecoded.clear()
        self._offset += len(text)
        return text

    def _after_context(self, text: str) -> str:
        """The first decoded text, without the context's."""
        text = text[len(os.path.commonprefix([text, self._context])) :]
        self._context = ""
        return text

    def _decoded(self) -> str:
        text: str = self._tokenizer.decode(self._undecoded, skip_special_tokens=True)
        return text


def _stream_after(context_ids: Sequence[int]) -> "DecodeStream":
    from tokenizers.decoders import DecodeStream  # imported here for a faster start: see tokens.py

    return DecodeStream(ids=list(context_ids), skip_special_tokens=True)
