"""The Runtime API that Lambda offers inside an execution environment, in its streaming mode.

Knows bytes and headers; what an event means, the loop (stream_loop.py) knows. Source: the Lambda
developer guide, "Custom runtimes: response streaming"; the prelude is that of proxy integrations.
"""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import h11

from contract.tasks import end

_ROOT = "/2018-06-01/runtime/invocation"
_PRELUDE_END = b"\0" * 8
_READ_BYTES = 64 * 1024
_ERROR_TYPE = "Lambda-Runtime-Function-Error-Type"
_ERROR_BODY = "Lambda-Runtime-Function-Error-Body"

Headers = Sequence[tuple[str, str]]


class RuntimeApiError(Exception):
    """Lambda refused what we told it."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """One event to answer; `deadline_s` is Unix time."""

    id: str
    deadline_s: float
    event: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RuntimeApi:
    """`address` is host:port, from AWS_LAMBDA_RUNTIME_API."""

    address: str

    async def next(self) -> Invocation:
        """Waits for the next event, for as long as it takes. Raises RuntimeApiError, OSError."""
        async with self._connection() as connection:
            await connection.send(self._request("GET", "/next"))
            await connection.send(h11.EndOfMessage())
            headers, body = await connection.response()
        return Invocation(
            headers[b"lambda-runtime-aws-request-id"].decode(),
            int(headers[b"lambda-runtime-deadline-ms"]) / 1000,
            json.loads(body),
        )

    async def fail(self, invocation: Invocation, error_type: str, message: str) -> None:
        """Says that an event cannot be answered. Raises RuntimeApiError, OSError."""
        body = _error_body(error_type, message)
        headers = [(_ERROR_TYPE, error_type), ("Content-Length", str(len(body)))]
        async with self._connection() as connection:
            await connection.send(self._request("POST", f"/{invocation.id}/error", headers))
            await connection.send(h11.Data(body))
            await connection.send(h11.EndOfMessage())
            await connection.response()

    @asynccontextmanager
    async def answer(
        self, invocation: Invocation, status: int, headers: Headers
    ) -> "AsyncIterator[StreamedAnswer]":
        """An answer that is sent as it comes. Raises OSError."""
        async with self._connection() as connection:
            streamed = StreamedAnswer(connection)
            await connection.send(
                self._request("POST", f"/{invocation.id}/response", _STREAMING_HEADERS)
            )
            await streamed.write(_prelude(status, headers))
            try:
                yield streamed
            finally:
                await end(streamed.reply)

    def _request(self, method: str, path: str, headers: Headers = ()) -> h11.Request:
        return h11.Request(
            method=method, target=_ROOT + path, headers=[("Host", self.address), *headers]
        )

    @asynccontextmanager
    async def _connection(self) -> "AsyncIterator[_Connection]":
        host, _, port = self.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield _Connection(reader, writer)
        except BaseException:
            writer.transport.abort()  # nobody may take what was written
            raise
        finally:
            writer.close()


class StreamedAnswer:
    """The body of an answer. `reply` is done when Lambda has heard enough, of its own accord too:
    before the end that means that nobody listens any more.
    """

    def __init__(self, connection: "_Connection") -> None:
        self._connection = connection
        self.reply = asyncio.ensure_future(connection.response())

    async def write(self, part: bytes) -> None:
        """One chunk, on its way when this returns. Raises OSError where nobody listens."""
        if self.reply.done():
            raise ConnectionResetError("the answer is no longer wanted")
        if part:
            await self._connection.send(h11.Data(part))

    async def finish(self) -> None:
        """Raises RuntimeApiError, OSError."""
        await self._connection.send(h11.EndOfMessage())
        await self.reply

    async def abort(self, error_type: str, message: str) -> None:
        """Ends an answer that has begun with an error. Raises RuntimeApiError, OSError."""
        encoded = base64.b64encode(_error_body(error_type, message)).decode()
        trailers = [(_ERROR_TYPE, error_type), (_ERROR_BODY, encoded)]
        await self._connection.send(h11.EndOfMessage(headers=trailers))
        await self.reply


class _Connection:
    """One request and its response."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._http = h11.Connection(h11.CLIENT)
        self._reader = reader
        self._writer = writer

    async def send(self, event: h11.Event) -> None:
        if (raw := self._http.send(event)) is not None:
            self._writer.write(raw)
            await self._writer.drain()

    async def response(self) -> tuple[dict[bytes, bytes], bytes]:
        """Headers and body. Raises RuntimeApiError, OSError."""
        head, body = None, b""
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as exc:
                raise ConnectionResetError(str(exc)) from exc
            match event:
                case h11.Response():
                    head = event
                case h11.Data():
                    body += event.data
                case h11.EndOfMessage():
                    assert head is not None
                    if head.status_code >= 300:
                        raise RuntimeApiError(f"{head.status_code} {body[:200].decode()}")
                    return dict(head.headers), body
                case h11.ConnectionClosed():
                    raise ConnectionResetError("closed before the response")
                case h11.NEED_DATA:
                    self._http.receive_data(await self._reader.read(_READ_BYTES))


_STREAMING_HEADERS: Headers = (
    ("Lambda-Runtime-Function-Response-Mode", "streaming"),
    ("Content-Type", "application/vnd.awslambda.http-integration-response"),
    ("Transfer-Encoding", "chunked"),
    ("Trailer", f"{_ERROR_TYPE}, {_ERROR_BODY}"),
)


def _prelude(status: int, headers: Headers) -> bytes:
    """Status and headers, as JSON in front of the body."""
    several: dict[str, list[str]] = {}
    for name, value in headers:
        several.setdefault(name, []).append(value)
    return json.dumps({"statusCode": status, "multiValueHeaders": several}).encode() + _PRELUDE_END


def _error_body(error_type: str, message: str) -> bytes:
    return json.dumps({"errorType": error_type, "errorMessage": message}).encode()
