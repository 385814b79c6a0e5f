"""Server-sent events: their encoding, and a response that ends when the client disconnects.

Independent of jobs.
"""

import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from contract.errors import BatchwayError
from gateway.http.bodies import ClientGone, unless_gone
from gateway.http.errors import ApiError, internal_error, is_message_call, to_api_error

log = logging.getLogger("batchway.gateway")

DONE = b"data: [DONE]\n\n"
# A heartbeat for streams whose events have ids. No empty line follows: the official client would
# take it for the end of an event without data, and fail.
COMMENT = b": waiting\n"
# A heartbeat for streams without ids. Clients that take each chunk for one event ignore an empty
# one, but fail on a comment.
EMPTY_LINE = b"\n"
MEDIA_TYPE = "text/event-stream; charset=utf-8"
STREAM_HEADER = (b"content-type", MEDIA_TYPE.encode())
HEADERS = {
    "cache-control": "no-store",
    "x-accel-buffering": "no",
    "referrer-policy": "no-referrer",  # the address may hold a token
}

# Some clients split lines here, although JSON allows these characters in strings.
_LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


class AnsweredOtherwise(Exception):
    """Raised before an answer's first bytes: respond with `response` instead."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status_code)
        self.response = response


def encode_json(value: object) -> bytes:
    """JSON on one line, by every definition of a line end."""
    raw = msgspec.json.encode(value)
    for found, escaped in _LINE_ENDS:
        raw = raw.replace(found, escaped)
    return raw


def json_response(
    content: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON response without pydantic's validation, for large bodies or additional headers."""
    return Response(encode_json(content), status, headers=headers, media_type="application/json")


def message(data: object, *, event: str | None = None, id_: str | None = None) -> bytes:
    """One event with JSON data. The id comes last, because some clients expect `data:` first."""
    head = f"event: {event}\n" if event else ""
    tail = f"id: {id_}\n" if id_ else ""
    return b"%bdata: %b\n%b\n" % (head.encode(), encode_json(data), tail.encode())


def failure(error: ApiError, scope: Scope) -> bytes:
    """The end of a stream that fails: an error event, in the form of the path that was called."""
    if is_message_call(scope):
        return message(error.body_for(scope), event="error")
    return message(error.body()) + DONE


class Heartbeat:
    """Tells when a heartbeat is due: `every_s` seconds after the last bytes."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last_s = time.monotonic()

    def touch(self) -> None:
        self._last_s = time.monotonic()

    def is_due(self) -> bool:
        """True once per interval."""
        if time.monotonic() - self._last_s < self._every_s:
            return False
        self.touch()
        return True


async def sse_response(
    request: Request,
    events: AsyncGenerator[bytes, None],
    *,
    headers: Mapping[str, str],
    on_gone: Callable[[], Awaitable[None]] | None = None,
) -> Response:
    """Streams the events of a generator. `on_gone` runs if the client disconnects before the end.

    Waits for the first bytes: an error before them is raised and gets an ordinary error response.
    """
    try:
        first = await unless_gone(request.receive, anext(events, b""))
    except ClientGone:
        if on_gone is not None:
            await on_gone()
        raise
    return EventStream(first, events, headers=headers, on_gone=on_gone)


class EventStream(StreamingResponse):
    """Starlette's StreamingResponse, which cancels the generator when the client disconnects; then
    `on_gone` runs.

    Only the transport buffers. The kernel closes it if the client does not read (listener.py).
    """

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        *,
        headers: Mapping[str, str],
        on_gone: Callable[[], Awaitable[None]] | None,
    ) -> None:
        super().__init__(self._whole(first, events), 200, {**HEADERS, **headers}, MEDIA_TYPE)
        self._events = events
        self._on_gone = on_gone
        self._is_complete = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope

        async def sent(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message["more_body"]:
                self._is_complete = True

        try:
            await super().__call__(scope, receive, sent)
        except (OSError, ClientDisconnect):
            pass  # the client has disconnected
        finally:
            await self._events.aclose()
            if not self._is_complete and self._on_gone is not None:
                await self._on_gone()

    async def _whole(
        self, first: bytes, events: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """All events. After a failure, an error event."""
        yield first
        try:
            async for part in events:
                yield part
        except Exception as exc:
            error = to_api_error(exc) if isinstance(exc, BatchwayError) else internal_error()
            if error.code == "internal_error":
                log.error("a stream failed: %s", type(exc).__name__)
            yield failure(error, self._scope)


class StreamDrain:
    """A server's shutdown: streams may go on until the drain time has passed."""

    def __init__(self) -> None:
        self.has_begun = False
        self._over_at_s = math.inf

    def begin(self, budget_s: float) -> None:
        if not self.has_begun:
            self.has_begun = True
            self._over_at_s = time.monotonic() + budget_s

    @property
    def is_over(self) -> bool:
        """Whether streams must end at once."""
        return time.monotonic() >= self._over_at_s
