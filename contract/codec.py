"""Encodes and decodes records in msgpack; each job's record has the wire version."""

import hashlib
import zlib
from collections.abc import Callable
from typing import TypeVar

import msgspec

from contract.callbacks import Callback
from contract.errors import WireError, wire_errors
from contract.events import LogEntry, LogEvent
from contract.jobs import Job, ObjectRef
from contract.model_cards import MAX_TOKENIZER_BYTES, ModelCard, TokenizerFiles

WIRE_VERSION = 1

T = TypeVar("T")

encode = msgspec.msgpack.Encoder().encode


def _decoder(kind: type[T], what: str) -> Callable[[bytes], T]:
    """A function that decodes one kind of record; it raises WireError."""
    decoder = msgspec.msgpack.Decoder(kind)

    def decode(raw: bytes) -> T:
        with wire_errors(what):
            return decoder.decode(raw)

    return decode


decode_job = _decoder(Job, "job record")
decode_ref = _decoder(ObjectRef, "object reference")
decode_callback = _decoder(Callback, "callback")
decode_card = _decoder(ModelCard, "model card")
decode_metadata = _decoder(dict[str, str], "metadata")
_event_decoder: msgspec.msgpack.Decoder[LogEvent] = msgspec.msgpack.Decoder(LogEvent)
_tokenizer_decoder = msgspec.msgpack.Decoder(TokenizerFiles)


def decode_entry(number: int, hash_: bytes, raw: bytes) -> LogEntry:
    """Decodes an entry of a log. Raises WireError."""
    with wire_errors("log event"):
        return LogEntry(number=number, hash=hash_.decode(), event=_event_decoder.decode(raw))


def decode_logged(raw: bytes) -> LogEntry:
    """Decodes `<number> <hash> <event>`, as in a log and in the messages of its channel. Raises
    WireError."""
    with wire_errors("log event"):
        number, hash_, event = raw.split(b" ", 2)
        return decode_entry(int(number), hash_, event)


def encode_tokenizer(files: TokenizerFiles) -> tuple[str, bytes]:
    """Returns a tokenizer's key and its compressed files. The key is the sha256 of the compressed
    bytes, so that a reader checks it before decompression.

    Raises ValueError where the files exceed MAX_TOKENIZER_BYTES.
    """
    raw = encode(files)
    if len(raw) > MAX_TOKENIZER_BYTES:
        raise ValueError(
            f"tokenizer and chat template are {len(raw)} bytes; at most {MAX_TOKENIZER_BYTES} "
            "are published"
        )
    packed = zlib.compress(raw)
    return hashlib.sha256(packed).hexdigest(), packed


def decode_tokenizer(sha256: str, packed: bytes) -> TokenizerFiles:
    """The files that are stored under a key. The hash detects damaged or replaced bytes. At most
    MAX_TOKENIZER_BYTES are decompressed, against a malicious worker.

    Raises WireError.
    """
    if hashlib.sha256(packed).hexdigest() != sha256:
        raise WireError(f"tokenizer {sha256[:12]} does not match its hash")
    try:
        raw = zlib.decompressobj().decompress(packed, MAX_TOKENIZER_BYTES + 1)
        if len(raw) > MAX_TOKENIZER_BYTES:
            raise WireError(
                f"tokenizer {sha256[:12]} is over {MAX_TOKENIZER_BYTES} bytes when decompressed"
            )
        return _tokenizer_decoder.decode(raw)
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise WireError(f"unreadable tokenizer {sha256[:12]}: {type(exc).__name__}") from exc
