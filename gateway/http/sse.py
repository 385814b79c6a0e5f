"""Server-sent events: their bytes, and a response that notices when its reader goes away.

Knows nothing of jobs.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from contract.errors import BatchwayError
from contract.tasks import end
from gateway.http.errors import internal_error, to_api_error

log = logging.getLogger("batchway.gateway")

DONE = b"data: [DONE]\n\n"
# For streams whose events have ids. No empty line follows: the official client would take it for
# the end of an event without data, and fail.
COMMENT = b": waiting\n"
# For streams without ids. Readers that take each chunk for one event drop empty ones, and choke on
# a comment.
EMPTY_LINE = b"\n"
MEDIA_TYPE = "text/event-stream; charset=utf-8"
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}

_PART = {"type": "http.response.body", "body": b"", "more_body": True}

T = TypeVar("T")

# Line ends to some readers of lines, though not to JSON.
_LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


class ClientGone(Exception):
    """The caller closed the connection."""


class AnsweredOtherwise(Exception):
    """Raised before a stream's first bytes: the answer is no stream, but this."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status_code)
        self.response = response


def encode_json(value: object) -> bytes:
    """JSON on one line, whatever a reader takes for a line end."""
    raw = msgspec.json.encode(value)
    for found, escaped in _LINE_ENDS:
        raw = raw.replace(found, escaped)
    return raw


def message(data: object, *, event: str | None = None, id_: str | None = None) -> bytes:
    """One event with JSON data. The id comes last, for readers that expect `data:` first."""
    head = f"event: {event}\n" if event else ""
    tail = f"id: {id_}\n" if id_ else ""
    return b"%bdata: %b\n%b\n" % (head.encode(), encode_json(data), tail.encode())


class Heartbeat:
    """When a comment is due: so long after the last bytes."""

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


async def until_gone(receive: Receive) -> None:
    """Returns when the caller has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The work's result. Raises, with the work ended, ClientGone where the caller goes first, and
    what `receive` raises: a body may still come, though nobody asked for one.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        watching.result()
        raise ClientGone
    finally:
        await end(working, watching)


class SseResponse(Response):
    """Streams a generator's events; `on_gone` runs where the reader leaves before the end.

    The status line waits for the first bytes: an error before them becomes an ordinary answer.
    Only the transport buffers; it is cut where its reader takes nothing (connections.py).
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        headers: Mapping[str, str],
        on_gone: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(headers={**HEADERS, **headers}, media_type=MEDIA_TYPE)
        del self.headers["content-length"]
        self._events = events
        self._on_gone = on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._pump(scope, receive, send))
        except ClientGone:
            await self._on_gone()
        finally:
            await self._events.aclose()

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False
        try:
            async for part in self._events:
                if not has_started:
                    await self._say(send, self._start())
                    has_started = True
                await self._say(send, {**_PART, "body": part})
        except ClientGone:
            raise
        except AnsweredOtherwise as exc:
            assert not has_started
            await exc.response(scope, receive, send)
            return
        except Exception as exc:
            error = to_api_error(exc) if isinstance(exc, BatchwayError) else internal_error()
            if error.code == "internal_error":
                log.error("a stream failed: %s", type(exc).__name__)
            if not has_started:
                error.headers.update(self._own_headers())
                await error.response()(scope, receive, send)
                return
            await self._say(send, {**_PART, "body": message(error.body()) + DONE})
        if not has_started:
            await self._say(send, self._start())
        await self._say(send, {**_PART, "more_body": False})

    async def _say(self, send: Send, said: Message) -> None:
        """Raises ClientGone where nobody takes it."""
        try:
            await send(said)
        except OSError as exc:
            raise ClientGone from exc

    def _start(self) -> Message:
        return {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }

    def _own_headers(self) -> dict[str, str]:
        return {name: value for name, value in self.headers.items() if name == "x-job-id"}
