"""A step's output as `append` takes it, packed, and what it answers.

contract/lua/append.lua says why: an argument of its own for each thing said would cost more than
the thing, and nearly always there is nothing to answer.
"""

import struct
from collections.abc import Sequence
from typing import Any

from contract.codec import encode_event, encode_ref
from contract.function_types import Append, Verdict
from contract.jobs import TERMINAL_STATUSES, JobStatus

_SIZE = struct.Struct("<I")
_HEAD = struct.Struct("<III")  # epoch, output tokens, bytes of the event
_GOES_ON = bytes(2)  # after the event's number: no end


def encode_items(items: Sequence[Append]) -> bytes:
    """All that is said of the jobs but their ids."""
    parts: list[bytes] = []
    for item in items:
        event = encode_event(item.event) if item.event is not None else b""
        parts += (_HEAD.pack(item.epoch, item.num_tokens, len(event)), event, b"%d" % item.number)
        parts.append(_encode_end(item) if item.fin else _GOES_ON)
    return b"".join(parts)


def _encode_end(item: Append) -> bytes:
    message = item.message.encode()
    result = b"" if item.result is None else encode_ref(item.result)
    words = f"\0{item.fin}\0{item.code}\0".encode()
    return b"".join((words, _SIZE.pack(len(message)), message, _SIZE.pack(len(result)), result))


def decode_verdicts(
    items: Sequence[Append], reply: list[Any]
) -> list[tuple[Verdict | JobStatus, int]]:
    """A verdict for each item, with its number."""
    verdicts: list[tuple[Verdict | JobStatus, int]]
    verdicts = [(Verdict.OK, item.number + 1) for item in items]
    for place, raw, number in zip(reply[::3], reply[1::3], reply[2::3], strict=True):
        word = raw.decode()
        verdicts[place - 1] = (
            JobStatus(word) if word in TERMINAL_STATUSES else Verdict(word),
            number,
        )
    return verdicts
