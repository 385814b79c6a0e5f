"""What a client sends: the body of a request, with its length, its encoding and its JSON; and that
the client has disconnected.

What takes a moment to parse is checked in a process of its own (strict_json.py) and parsed without
checks after that, so no body holds the event loop. `connections.RequestGuard` limits a body's time.
"""

import asyncio
import math
import zlib
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from contract.connection import end_tasks
from gateway.child import Refused
from gateway.child_process import ChildFailed, ChildLimits, ChildPool
from gateway.http import strict_json
from gateway.http.errors import ApiError, bad_request
from gateway.http.strict_json import JsonRefused
from gateway.turns import Turns, current_owner

SHORT_BYTES = 64 * 1024
"""A body of up to so many bytes is read without a turn."""
ENCODINGS = ("gzip", "deflate")
_GZIP_BITS, _ZLIB_BITS, _RAW_BITS = 31, 15, -15  # zlib's names of its formats
_ZLIB_METHOD = 8  # in the low four bits of its first byte; deflate without zlib cannot begin so
_PIECE_BYTES = 64 * 1024  # decoded at a time, in about 0.2 ms
_MEMBER_BYTES, _MANY_MEMBERS = 4096, 64  # a gzip file has one member for so many bytes, or few
# What is parsed at once, in 3 ms: bodies with so many marks, quotes and escapes, bytes.
_LIGHT_MARKS, _LIGHT_QUOTES, _LIGHT_BYTES = 8_192, 32_768, 512 * 1024
_NUM_CHECKS = 2  # at a time; one of each owner

T = TypeVar("T")


class Body:
    """The body of one request. Raises ApiError: 413 if it is too long, by its Content-Length, its
    actual or its decoded bytes; 415 for an encoding that is not among `encodings`. `limit`: what
    sets `max_bytes`, for the message."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        max_bytes: int,
        limit: str,
        encodings: Sequence[str] = ENCODINGS,
    ) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._limit = limit
        headers = Headers(scope=scope)
        self._decoder = Decoder(headers.get("content-encoding", ""), max_bytes, encodings)
        self._num_bytes = 0
        self._is_complete = False
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > max_bytes:
            raise self._too_long()

    async def receive(self) -> Message:
        """The next ASGI message, of a body at most 64 KiB if it is encoded."""
        try:
            if self._decoder.has_more:
                await asyncio.sleep(0)  # others' turn: a few bytes may stand for megabytes
                return self._message(b"")
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            data = message.get("body", b"")
            self._num_bytes += len(data)
            self._is_complete = not message.get("more_body", False)
            if self._num_bytes > self._max_bytes:
                raise TooMuch
            return self._message(data)
        except TooMuch:
            raise self._too_long() from None

    def _message(self, data: bytes) -> Message:
        body = self._decoder.decode(data, is_last=self._is_complete)
        has_more = self._decoder.has_more or not self._is_complete
        return {"type": "http.request", "body": body, "more_body": has_more}

    def _too_long(self) -> ApiError:
        message = f"the body has more than {self._max_bytes} bytes, {self._limit}"
        return ApiError(413, "body_too_large", message)


class TooMuch(Exception):
    """The body would have more bytes than are allowed."""


class Decoder:
    """Decodes one body, piece by piece, and stops at the limit, because a few bytes may stand for
    gigabytes. `encoding`: the header's value; `max_bytes`: of the decoded body.

    Raises ApiError (415) for other encodings.
    """

    def __init__(self, encoding: str, max_bytes: int, encodings: Sequence[str] = ENCODINGS) -> None:
        self._encoding = encoding.strip().lower().removeprefix("x-")
        self._left = max_bytes
        if self._encoding not in ("", "identity", *encodings):
            message = f"the content-encoding must be {' or '.join([*encodings, 'absent'])}"
            headers = {"accept-encoding": ", ".join(encodings) or "identity"}
            raise ApiError(415, "unsupported_media_type", message, headers=headers)
        self._open = zlib.decompressobj()  # replaced at the first byte
        self._num_members = 0
        self._num_decoded = 0
        self._waiting = b""  # not decoded yet
        self.has_more = False

    def decode(self, data: bytes, *, is_last: bool) -> bytes:
        """The next bytes of the body; if `has_more` after that, decode(b"") gives further ones.
        Raises TooMuch, and ApiError if it is not so encoded."""
        decoded = data if self._encoding not in ENCODINGS else self._decompressed(data, is_last)
        self._left -= len(decoded)
        self._num_decoded += len(decoded)
        if self._left < 0:
            raise TooMuch
        return decoded

    def _decompressed(self, data: bytes, is_last: bool) -> bytes:
        data = self._waiting + data
        try:
            if data and (not self._num_members or (self._open.eof and self._encoding == "gzip")):
                self._begin(data[0])  # a gzip file may have several members
            if data and self._open.eof:
                raise self._malformed()
            decoded = self._open.decompress(data, min(self._left + 1, _PIECE_BYTES))
        except zlib.error:
            raise self._malformed() from None
        self._waiting = self._open.unused_data or self._open.unconsumed_tail
        is_full = len(decoded) == _PIECE_BYTES and not self._open.eof
        self.has_more = bool(self._waiting) or is_full
        if is_last and not self.has_more and not self._open.eof and len(decoded) <= self._left:
            raise self._malformed()
        return decoded

    def _begin(self, first: int) -> None:
        self._num_members += 1
        if self._num_members > _MANY_MEMBERS + self._num_decoded // _MEMBER_BYTES:
            raise bad_request("bad_request", "the body's gzip data has too many members")
        bits = _GZIP_BITS
        if self._encoding == "deflate":  # zlib's, by the standard; some clients leave its head out
            bits = _ZLIB_BITS if first & 0x0F == _ZLIB_METHOD else _RAW_BITS
        self._open = zlib.decompressobj(bits)

    def _malformed(self) -> ApiError:
        return bad_request("bad_request", f"the body is no whole {self._encoding} data")


class JsonBodies:
    """Parses JSON bodies: light ones at once, others after a process has checked them, one at a
    time for each owner."""

    def __init__(self) -> None:
        # The processes have a low priority from the start, so none has to give way.
        limits = ChildLimits(long_s=math.inf)
        self._checks = ChildPool("gateway.http.strict_json", {}, limits)
        self._turns = Turns(_NUM_CHECKS, 1)

    async def parse(self, raw: bytes) -> dict[str, Any]:
        """Raises ApiError if it is not a valid JSON object, and Busy."""
        if is_light(raw):
            return parse_object(raw)
        await self._checked(raw)
        fields: dict[str, Any] = from_json(raw)  # of 4 MB in at most 20 ms; json's takes 90
        return fields

    async def hash(self, raw: bytes, endpoint: str) -> str:
        """A hash that is equal for equal bodies of an endpoint. Raises ApiError, Busy."""
        if is_light(raw):
            return strict_json.hash_of(endpoint, parse_object(raw))
        return await self._checked(raw, endpoint)

    async def _checked(self, raw: bytes, endpoint: str = "") -> str:
        try:
            async with self._turns.turn(current_owner()):
                return await self._checks.ask({"body": raw, "endpoint": endpoint})
        except Refused as refusal:
            raise bad_request("invalid_json", str(refusal)) from None
        except ChildFailed as failure:
            raise bad_request("invalid_json", f"the body cannot be read: {failure}") from None

    async def aclose(self) -> None:
        await self._checks.aclose()


def is_light(raw: bytes) -> bool:
    """Whether a body can be parsed in milliseconds, by its bytes alone."""
    if len(raw) > _LIGHT_BYTES:
        return False
    num_marks = len(raw) - len(raw.translate(None, b",:[]{}"))
    return num_marks <= _LIGHT_MARKS and raw.count(b'"') + raw.count(b"\\") <= _LIGHT_QUOTES


def parse_object(raw: bytes) -> dict[str, Any]:
    """Raises ApiError if `raw` is not a valid JSON object."""
    try:
        return strict_json.parse_object(raw)
    except JsonRefused as refusal:
        raise bad_request("invalid_json", str(refusal)) from None


class ClientGone(Exception):
    """The client closed the connection. Nobody sees the response."""


async def until_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Returns the result of `work`, or cancels it and raises ClientGone when the client disconnects
    first. Also raises what `receive` raises: a body may arrive that nobody asked for."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        watching.result()
        raise ClientGone
    finally:
        await end_tasks(working, watching)
