"""Encodes and decodes records in msgpack, and converts the errors of those that cannot be decoded.
Each job's record has the wire version."""

import contextlib
import hashlib
import zlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from contract.callbacks import Callback
from contract.errors import WireError
from contract.events import LogEntry, LogEvent
from contract.jobs import Job, ObjectRef
from contract.model_cards import MAX_TOKENIZER_BYTES, ModelCard, TokenizerFiles

WIRE_VERSION = 1

T = TypeVar("T")

encode = msgspec.msgpack.Encoder().encode

# msgspec, json, int() and bytes.decode() raise ValueErrors; missing fields and fields of another
# type raise the others.
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)


def wire_error(exc: Exception, what: str) -> WireError | None:
    """Converts a decoder's error and the WRONGTYPE error of Redis; None for another error. `what`
    names the kind of record."""
    is_wrong_type = str(exc).startswith("WRONGTYPE")  # by its text: not all parts have redis-py
    if is_wrong_type or isinstance(exc, _UNREADABLE):
        return WireError(f"unreadable {what}: {type(exc).__name__}")
    return None


@contextlib.contextmanager
def wire_errors(what: str) -> Iterator[None]:
    """Raises WireError for such errors, without the cause, which may quote the record."""
    try:
        yield
    except Exception as exc:
        if (error := wire_error(exc, what)) is not None:
            raise error from None
        raise


def _decoder(kind: type[T], what: str) -> Callable[[bytes], T]:
    """A function that decodes one kind of record; it raises WireError."""
    decoder = msgspec.msgpack.Decoder(kind)

    def decode(raw: bytes) -> T:
        with wire_errors(what):
            return decoder.decode(raw)

    return decode


decode_job = _decoder(Job, "job record")
WarmPrompt = tuple[str, int, tuple[int, ...]]  # tenant, tokens that are computed, token ids
decode_warm_prompt: Callable[[bytes], WarmPrompt] = _decoder(WarmPrompt, "warm prompt")  # type: ignore[arg-type]
decode_ref = _decoder(ObjectRef, "object reference")
decode_callback = _decoder(Callback, "callback")
decode_card = _decoder(ModelCard, "model card")
decode_metadata = _decoder(dict[str, str], "metadata")
_event_decoder: msgspec.msgpack.Decoder[LogEvent] = msgspec.msgpack.Decoder(LogEvent)
_tokenizer_decoder = msgspec.msgpack.Decoder(TokenizerFiles)


def decode_logged(raw: bytes) -> LogEntry:
    """Decodes `<number> <hash> <event>`, as in a log and in the messages of its channel. Raises
    WireError."""
    try:  # for each token: `wire_errors` would take as long as the rest
        number, hash_, event = raw.split(b" ", 2)
        return LogEntry(int(number), hash_.decode(), _event_decoder.decode(event))
    except _UNREADABLE as exc:
        raise WireError(f"unreadable log event: {type(exc).__name__}") from None


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
