"""Bytes to records and back: msgpack, with the version of the wire beside every job."""

import hashlib
import zlib
from collections.abc import Mapping

import msgspec

from contract.errors import WireError, wire_errors
from contract.events import LogEntry, LogEvent
from contract.jobs import MAX_TOKENIZER_BYTES, Job, ModelCard, ObjectRef, TokenizerFiles

WIRE_VERSION = 1

_encoder = msgspec.msgpack.Encoder()
_job_decoder = msgspec.msgpack.Decoder(Job)
_event_decoder: msgspec.msgpack.Decoder[LogEvent] = msgspec.msgpack.Decoder(LogEvent)
_ref_decoder = msgspec.msgpack.Decoder(ObjectRef)
_metadata_decoder = msgspec.msgpack.Decoder(dict[str, str])
_card_decoder = msgspec.msgpack.Decoder(ModelCard)
_tokenizer_decoder = msgspec.msgpack.Decoder(TokenizerFiles)


def encode_job(job: Job) -> bytes:
    return _encoder.encode(job)


def decode_job(raw: bytes) -> Job:
    """Raises WireError."""
    with wire_errors("job record"):
        return _job_decoder.decode(raw)


def encode_ref(ref: ObjectRef) -> bytes:
    return _encoder.encode(ref)


def decode_ref(raw: bytes) -> ObjectRef:
    """Raises WireError."""
    with wire_errors("object reference"):
        return _ref_decoder.decode(raw)


def encode_metadata(metadata: Mapping[str, str]) -> bytes:
    """Nothing where there is none."""
    return _encoder.encode(metadata) if metadata else b""


def decode_metadata(raw: bytes) -> dict[str, str]:
    """Raises WireError."""
    with wire_errors("metadata"):
        return _metadata_decoder.decode(raw) if raw else {}


def encode_terms(terms: Mapping[str, str | int | float]) -> bytes:
    """What submit is told beside the job: a map by name, read by Lua."""
    return _encoder.encode(terms)


def encode_event(event: LogEvent) -> bytes:
    return _encoder.encode(event)


def decode_entry(number: int, hash_: bytes, raw: bytes) -> LogEntry:
    """Raises WireError."""
    with wire_errors("log event"):
        return LogEntry(number=number, hash=hash_.decode(), event=_event_decoder.decode(raw))


def decode_hint(raw: bytes) -> LogEntry:
    """A message of an events channel, `<number> <hash> <event>`. Raises WireError."""
    with wire_errors("hint"):
        number, hash_, event = raw.split(b" ", 2)
        return decode_entry(int(number), hash_, event)


def encode_card(card: ModelCard) -> bytes:
    return _encoder.encode(card)


def decode_card(raw: bytes) -> ModelCard:
    """Raises WireError."""
    try:
        return _card_decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise WireError(f"unreadable model card: {type(exc).__name__}") from exc


def encode_tokenizer(files: TokenizerFiles) -> tuple[str, bytes]:
    """The key of a tokenizer, and what is stored under it: the files, compressed. The key is the
    sha256 of the stored bytes, so that a reader checks it before it decompresses anything.

    Raises ValueError where they are longer than a reader takes.
    """
    raw = _encoder.encode(files)
    if len(raw) > MAX_TOKENIZER_BYTES:
        raise ValueError(
            f"tokenizer and chat template are {len(raw)} bytes; at most {MAX_TOKENIZER_BYTES} "
            "are published"
        )
    packed = zlib.compress(raw)
    return hashlib.sha256(packed).hexdigest(), packed


def decode_tokenizer(sha256: str, packed: bytes) -> TokenizerFiles:
    """The files that are stored under a key. The hash protects against bytes that were damaged or
    exchanged; against a worker that stores a matching hash of something malicious, the bound does:
    no more than MAX_TOKENIZER_BYTES are decompressed.

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
