"""A text that grows token by token, to say where in it each token starts.

Decodes as workers do: characters come when they are whole, special tokens have no text.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

# A first token such as "▁world" only keeps its space where something stands before it.
_NUM_CONTEXT_IDS = 6


class TextStream:
    """Text behind `context_ids`, whose first character has the number `offset`."""

    def __init__(
        self, tokenizer: "Tokenizer", context_ids: Sequence[int] = (), offset: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._stream = _stream_after(context_ids[-_NUM_CONTEXT_IDS:])
        self._undecoded: list[int] = []  # ids that have not yet made a whole character
        self._offset = offset

    def push(self, token_id: int) -> tuple[int, str]:
        """The offset at which the token starts, and the text that it completes."""
        start = self._offset
        self._undecoded.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception:  # tokenizers raises bare ones: ids that no text has
            self._stream = _stream_after(())
            piece = self._decoded()
        if piece is None:
            return start, ""
        self._undecoded.clear()
        self._offset += len(piece)
        return start, piece

    def end(self) -> str:
        """What is left of a character that was cut off."""
        text = self._decoded()
        self._undecoded.clear()
        self._offset += len(text)
        return text

    def _decoded(self) -> str:
        text: str = self._tokenizer.decode(self._undecoded, skip_special_tokens=True)
        return text


def _stream_after(context_ids: Sequence[int]) -> "DecodeStream":
    from tokenizers.decoders import DecodeStream  # functions start without it: see tokens.py

    return DecodeStream(ids=list(context_ids), skip_special_tokens=True)
