"""One request and its answer on a connection: uvicorn's, which writes the answer in fewer pieces.

The head goes out with the first part of the body, in one write: the caller of a stream waits for
its first token, which is that part. A client of HTTP/1.0 knows no chunks: its answer ends with
its connection.
"""

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

_CLOSE = (b"connection", b"close")
_NO_BODY = (204, 304)


class Exchange(RequestResponseCycle):
    """Writes what the app sends. Raises RuntimeError where that would not end where its head says:
    a client would take the rest for the next answer on the connection.
    """

    _head = b""  # of the answer, until its body begins
    _num_left: int | None = None  # bytes of the body, where their number was announced
    _is_given_up = False  # the rest of the request's body

    def give_up_body(self) -> None:
        """The client has had its time."""
        self._is_given_up = True
        self.message_event.set()

    async def receive(self) -> ASGIReceiveEvent:
        """Raises TimeoutError where the body was given up before its end."""
        message = await super().receive()
        if self._is_given_up and self.more_body and not self.response_started:
            raise TimeoutError
        return message

    async def send(self, message: ASGISendEvent) -> None:
        """Waits while the client has not taken what was written before. An answer has started when
        its head was written: until then it may be replaced by another, which says what went wrong.
        """
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start" and not self.response_started:
            self._head = self._head_of(message["status"], [*message["headers"]])
            self.waiting_for_100_continue = False
            return
        if message["type"] != "http.response.body" or self.response_complete:
            raise RuntimeError(f"{message['type']} out of turn")
        is_last = not message.get("more_body", False)
        framed = self._framed(message.get("body", b""), is_last=is_last)
        if not self.response_started:
            if not self._head:
                raise RuntimeError("a body without a head")
            framed = self._head + framed
            self.response_started = True
        self.transport.write(framed)
        if is_last:
            self._end()

    def _head_of(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        length = next((value for name, value in headers if name == b"content-length"), None)
        has_body = self.scope["method"] != "HEAD" and status not in _NO_BODY
        self._num_left = 0 if not has_body else None if length is None else int(length)
        self.chunked_encoding = self._num_left is None and self.scope["http_version"] != "1.0"
        if self.chunked_encoding:
            headers.append((b"transfer-encoding", b"chunked"))
        elif self._num_left is None:
            self.keep_alive = False
        if self.waiting_for_100_continue and self.more_body:
            self.keep_alive = False  # the body may come or not: what comes next could be either
        if _CLOSE in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            headers.append(_CLOSE)
        headers = [*self.default_headers, *headers]
        lines = [b"%b: %b\r\n" % header for header in headers]
        head = b"".join((STATUS_LINE[status], *lines, b"\r\n"))
        if not head.count(b"\n") == head.count(b"\r") == len(headers) + 2:
            raise RuntimeError("a line end in a header")
        return head

    def _framed(self, body: bytes, *, is_last: bool) -> bytes:
        if self.chunked_encoding:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            return chunk + b"0\r\n\r\n" if is_last else chunk
        if self.scope["method"] == "HEAD":
            return b""
        if self._num_left is not None:
            self._num_left -= len(body)
            if self._num_left < 0 or (is_last and self._num_left > 0):
                raise RuntimeError("a body of another length than its head says")
        return body

    def _end(self) -> None:
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
