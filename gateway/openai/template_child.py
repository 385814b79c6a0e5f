"""The process that renders a chat template, with limits on its memory and its time.

`python -m gateway.openai.template_child` speaks frames over file descriptor 0, a socket, with
template_process.py, and ends when that is closed. It imports little and holds no secret.
"""

import json
import math
import os
import resource
import signal
import struct
import time
from contextlib import suppress
from enum import IntEnum
from typing import Any

REQUEST_HEAD = struct.Struct(">I")  # length of the JSON in bytes
REPLY_HEAD = struct.Struct(">BI")  # kind; length of the text in bytes
MAX_REPLY_BYTES = 4 * 4 * 1024 * 1024  # four for each character that a template may say


class Reply(IntEnum):
    """What a reply is; the first two have a text."""

    RENDERED = 0
    REFUSED = 1  # by the template: the text says why
    READY = 2
    UNREADABLE = 3  # the template; then the process ends
    OUT_OF_MEMORY = 4  # then the process ends


def main() -> None:
    """Renders one request after the other until the gateway closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches us too; the gateway ends us
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from gateway.openai.chat_template import (  # the gateway imports this module too
        ChatTemplate,
        Refused,
    )

    start = _receive()
    if start is None:
        return
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, start["max_memory_bytes"])
    _limit_cpu(start["cpu_s"])
    try:
        template = ChatTemplate(start["source"], start["special_tokens"])
    except Exception:
        _send(Reply.UNREADABLE)
        return
    _send(Reply.READY)
    while (messages := _receive()) is not None:
        _limit_cpu(start["cpu_s"])
        try:
            _send(Reply.RENDERED, template.render(messages).encode())
        except Refused as exc:
            _send(Reply.REFUSED, str(exc).encode(errors="replace"))
        except UnicodeEncodeError:
            _send(Reply.REFUSED, b"the chat template's output is not valid text")
        except MemoryError:
            _send(Reply.OUT_OF_MEMORY)
            return


def _receive() -> Any:
    """The next request; None where the gateway is gone."""
    head = _read(REQUEST_HEAD.size)
    raw = head and _read(*REQUEST_HEAD.unpack(head))
    return json.loads(raw) if raw else None


def _read(num_bytes: int) -> bytes:
    """Empty where the gateway is gone before all of it has come."""
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
    """So many seconds from now on. Then the kernel ends the process, also where the gateway that
    watched it has been killed.
    """
    _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + cpu_s)


def _limit(kind: int, value: int) -> None:
    """Lowers a limit, unless a lower one holds already or this system does not know it."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (value, hard))


if __name__ == "__main__":
    with suppress(BrokenPipeError, ConnectionResetError):  # the gateway is gone
        main()
