"""A process for untrusted input of callers or models, with limits on memory and time.

It exchanges frames with child_process.py over a socket, its file descriptor 0, and ends when the
socket is closed. It imports little, has no secrets, and can open nothing (confinement.py).
"""

import json
import math
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from importlib import import_module
from typing import Any

from gateway.confinement import confine

REQUEST_HEAD = struct.Struct(">I")  # length of the JSON in bytes
REPLY_HEAD = struct.Struct(">BI")  # kind; length of the text in bytes

# What Python, jinja2 and markupsafe import when a template first needs it.
_OWN = ("encodings.unicode_escape", "html", "pprint", "textwrap", "unicodedata")
_LATER = (*_OWN, "jinja2.constants", "jinja2.debug")


class Reply(IntEnum):
    """The kind of a reply; the first two have a text."""

    DONE = 0
    REFUSED = 1  # the text is the reason
    READY = 2
    UNREADABLE = 3  # the start message is unusable; the process ends
    OUT_OF_MEMORY = 4  # the process ends


class Refused(Exception):
    """The request is rejected. Show the message to the caller only."""


def serve(prepare: Callable[[Any], Callable[[Any], str]]) -> None:
    """Answers requests one by one until the gateway closes the socket. `prepare` gets the start
    message and returns a function that answers a request or raises Refused."""
    with suppress(BrokenPipeError, ConnectionResetError):  # the gateway has ended
        _serve(prepare)


def _serve(prepare: Callable[[Any], Callable[[Any], str]]) -> None:
    # Ctrl-C reaches this process too, but the gateway ends it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start = _receive()
    if start is None:
        return
    if "jinja2" in sys.modules:
        for name in _LATER:
            import_module(name)
    if start["time_zone"] is not None:
        os.environ["TZ"] = start["time_zone"]
    time.tzset()
    confine()
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
    """Reads `num_bytes`; empty if the gateway closes the socket before."""
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
    """Allows this many seconds of CPU time from now. Then the kernel ends the process, even if the
    gateway was killed."""
    _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + cpu_s)


def _limit(kind: int, value: int) -> None:
    """Lowers a resource limit, unless it is lower already or unknown to this system."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (value, hard))
