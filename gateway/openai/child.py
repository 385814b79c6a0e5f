"""A process that computes what callers or models send, with limits on its memory and its time.

It speaks frames over file descriptor 0, a socket, with child_process.py, and ends when that is
closed. It imports little and holds no secret.
"""

import json
import math
import os
import resource
import signal
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import Any

REQUEST_HEAD = struct.Struct(">I")  # length of the JSON in bytes
REPLY_HEAD = struct.Struct(">BI")  # kind; length of the text in bytes


class Reply(IntEnum):
    """What a reply is; the first two have a text."""

    DONE = 0
    REFUSED = 1  # the text says why
    READY = 2
    UNREADABLE = 3  # what the process was started with; then the process ends
    OUT_OF_MEMORY = 4  # then the process ends


class Refused(Exception):
    """The request is refused; the message is for the caller only."""


def serve(prepare: Callable[[Any], Callable[[Any], str]]) -> None:
    """Answers one request after the other until the gateway closes the socket. `prepare` gets what
    the process was started with, and returns the function that answers or raises Refused."""
    with suppress(BrokenPipeError, ConnectionResetError):  # the gateway has ended
        _serve(prepare)


def _serve(prepare: Callable[[Any], Callable[[Any], str]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process; the gateway ends it
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start = _receive()
    if start is None:
        return
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, start["max_memory_bytes"])
    _limit_cpu(start["cpu_s"])
    try:
        answer = prepare(start)
    except Exception:
        _send(Reply.UNREADABLE)
        return
    _send(Reply.READY)
    while (request := _receive()) is not None:
        _limit_cpu(start["cpu_s"])
        try:
            _send(Reply.DONE, answer(request).encode())
        except Refused as exc:
            _send(Reply.REFUSED, str(exc).encode(errors="replace"))
        except UnicodeEncodeError:
            _send(Reply.REFUSED, b"the output is not valid text")
        except MemoryError:
            _send(Reply.OUT_OF_MEMORY)
            return


def _receive() -> Any:
    """The next request; None when the gateway has closed the socket."""
    head = _read(REQUEST_HEAD.size)
    raw = head and _read(*REQUEST_HEAD.unpack(head))
    return json.loads(raw) if raw else None


def _read(num_bytes: int) -> bytes:
    """Empty if the gateway closes the socket before all bytes have arrived."""
    parts = []
    while num_bytes:
        part = os.read(0, min(num_bytes, 2**20))
        if not part:
            return b""
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def _send(kind: Reply, text: bytes = b"") -> None:
    unsent = memoryview(REPLY_HEAD.pack(kind, len(text)) + text)
    while unsent:
        unsent = unsent[os.write(0, unsent) :]


def _limit_cpu(cpu_s: int) -> None:
    """Allows that many seconds from now on. Then the kernel ends the process, even if the gateway
    has been killed."""
    _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + cpu_s)


def _limit(kind: int, value: int) -> None:
    """Lowers a limit, unless a lower one holds already or this system does not know it."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (value, hard))
