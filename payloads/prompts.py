"""A prompt's token ids as the bytes of an object: msgpack, as in a job's record."""

import msgspec

from payloads.store import PayloadLost

_decoder = msgspec.msgpack.Decoder(tuple[int, ...])


def encode_prompt(prompt_ids: tuple[int, ...]) -> bytes:
    return msgspec.msgpack.encode(prompt_ids)


def decode_prompt(data: bytes) -> tuple[int, ...]:
    """Raises PayloadLost."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as exc:
        raise PayloadLost(f"an unreadable prompt ({type(exc).__name__})") from exc
