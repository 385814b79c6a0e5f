"""A caller on a bare socket, to measure a server without a client library."""

import json
import socket
import time
from collections.abc import Mapping
from typing import Any, Self

import httpx

_EVENT = b"data: "
_LAST_EVENT = b"data: [DONE]"
_LAST_CHUNK = b"0\r\n\r\n"
_READ_BYTES = 2**16


class BareCaller:
    """One persistent connection. Raises OSError without a server."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = httpx.URL(url)
        self._socket = socket.create_connection((self._url.host, self._url.port), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()

    def ttft_s(self, path: str, body: Mapping[str, Any]) -> float:
        """Returns the seconds from sending to the first event of a stream, which is read to its
        end. Raises OSError, and RuntimeError for any other answer."""
        raw = json.dumps(body).encode()
        head = (
            f"POST /v1/{path} HTTP/1.1\r\nhost: {self._url.host}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
        )
        answer, first_s = b"", None
        sent_s = time.monotonic()
        self._socket.sendall(head.encode() + raw)
        while not (_LAST_EVENT in answer and answer.endswith(_LAST_CHUNK)):
            part = self._socket.recv(_READ_BYTES)
            answer += part
            if first_s is None and _EVENT in answer:
                first_s = time.monotonic()
            if not part or not answer.startswith(b"HTTP/1.1 200 "[: len(answer)]):
                raise RuntimeError(f"no stream: {answer.splitlines()[:1]}")
        assert first_s is not None
        return first_s - sent_s
