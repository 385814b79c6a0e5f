"""The texts of a model's tokens, as answers with log probabilities and echoes show them."""

import os.path
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

NewStream = Callable[..., Any]  # the library's DecodeStream

# A token such as "▁world" decodes with its leading space only after other tokens.
NUM_CONTEXT_IDS = 6
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Decodes a growing text, the one after `context_ids`, and tells where each token starts. Its
    first character has the index `offset`. Incomplete characters wait; special tokens have no text,
    unless `skips_special` is false."""

    def __init__(
        self,
        tokenizer: Any,
        new: NewStream,
        context_ids: Sequence[int] = (),
        offset: int = 0,
        *,
        skips_special: bool = True,
    ) -> None:
        self._tokenizer, self._new, self._skips_special = tokenizer, new, skips_special
        self._undecoded = [*context_ids[-NUM_CONTEXT_IDS:]]  # that form no whole character yet
        self._stream = new(ids=self._undecoded, skip_special_tokens=skips_special)
        # The context's text, if a character may be incomplete at its end: then the first piece
        # repeats it.
        text = self._decoded()
        self._context = text if text.endswith(_INCOMPLETE) else ""
        if not self._context:
            self._undecoded = []
        self._offset = offset

    def push(self, token_id: int) -> tuple[int, str]:
        """Returns the token's offset, and the text that it completes."""
        start = self._offset
        self._undecoded.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception:  # tokenizers raises bare Exceptions for ids that decode to no text
            self._stream = self._new(ids=[], skip_special_tokens=self._skips_special)
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
        skips = self._skips_special
        text: str = self._tokenizer.decode(self._undecoded, skip_special_tokens=skips)
        return text


class TokenTexts:
    """Of one tokenizer. May be used from several threads. `library`: the module `tokenizers`.
    Raises ValueError if it cannot read the tokenizer."""

    def __init__(self, tokenizer_json: str, library: Any) -> None:
        try:
            self._tokenizer = library.Tokenizer.from_str(tokenizer_json)
        except Exception as exc:  # tokenizers raises bare Exceptions
            raise ValueError("unreadable tokenizer") from exc
        self._new_stream = library.decoders.DecodeStream
        self._bytes_of_char = _byte_level(tokenizer_json)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added: dict[int, str] = {token_id: token.content for token_id, token in added.items()}

    def text_stream(self, context_ids: Sequence[int] = (), offset: int = 0) -> TextStream:
        """Decodes ids token by token."""
        return TextStream(self._tokenizer, self._new_stream, context_ids, offset)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, also if they are part of a character."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._bytes_of_char:
            return b"".join(self._bytes_of_char.get(char, char.encode()) for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])  # byte fallback
        return token.replace("\u2581", " ").encode()


class _Decoder(msgspec.Struct):
    type: str
    decoders: "list[_Decoder]" = []


class _Parts(msgspec.Struct):
    """The part of tokenizer.json that is read here; megabytes of it are skipped."""

    decoder: _Decoder | None = None


def _byte_level(tokenizer_json: str) -> dict[str, bytes]:
    """For byte-level tokenizers, the bytes by the printable characters that stand for them
    (GPT-2's); else {}."""
    decoder = msgspec.json.decode(tokenizer_json, type=_Parts).decoder
    parts = [] if decoder is None else [decoder, *decoder.decoders]
    if all(part.type != "ByteLevel" for part in parts):
        return {}
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    stand_ins = {chr(byte): bytes([byte]) for byte in printable}
    return stand_ins | {chr(256 + rank): bytes([byte]) for rank, byte in enumerate(others)}
