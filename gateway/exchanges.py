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
    """Writes what the app sends. The app's own mistakes are assertions."""

    _head = b""  # of the answer, until its body begins
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
        """Waits while the client has not taken what was written before."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        assert not self.response_complete, "an answer that goes on behind its end"
        if not self.response_started:
            assert message["type"] == "http.response.start", message["type"]
            self.response_started = True
            self.waiting_for_100_continue = False
            self._head = self._head_of(message["status"], [*message["headers"]])
            return
        assert message["type"] == "http.response.body", message["type"]
        is_last = not message.get("more_body", False)
        self.transport.write(self._head + self._framed(message.get("body", b""), is_last=is_last))
        self._head = b""
        if is_last:
            self._end()

    def _head_of(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        length = next((value for name, value in headers if name == b"content-length"), None)
        self.expected_content_length = 0 if length is None else int(length)
        self.chunked_encoding = False
        if length is None and self.scope["method"] != "HEAD" and status not in _NO_BODY:
            if self.scope["http_version"] == "1.0":
                self.keep_alive = False
            else:
                self.chunked_encoding = True
                headers.append((b"transfer-encoding", b"chunked"))
        if _CLOSE in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            headers.append(_CLOSE)
        headers = [*self.default_headers, *headers]
        lines = [b"%b: %b\r\n" % header for header in headers]
        head = b"".join((STATUS_LINE[status], *lines, b"\r\n"))
        assert head.count(b"\n") == head.count(b"\r") == len(headers) + 2, "a line end in a header"
        return head

    def _framed(self, body: bytes, *, is_last: bool) -> bytes:
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
            return b""
        if not self.chunked_encoding:
            self.expected_content_length -= len(body)
            return body
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return chunk + b"0\r\n\r\n" if is_last else chunk

    def _end(self) -> None:
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive or self.expected_content_length != 0:
            self.transport.close()
        self.on_response()
