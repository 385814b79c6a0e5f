"""The contents of files in the object store, moved bit by bit: no file is ever whole in memory."""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import BinaryIO

from contract.files import content_key
from contract.payloads.store import ObjectStore
from gateway.http.errors import ApiError

CHUNK_BYTES = 256 * 1024
_LINES_PER_TURN = 50  # to check them takes about 1.5 ms
_RANGE = re.compile(r"bytes=(?:(\d{1,18})-(\d{0,18})|-(\d{1,18}))")


class Span:
    """The bytes `start` up to `end` (exclusive) of a file."""

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    @classmethod
    def asked(cls, header: str | None, num_bytes: int) -> "Span | None":
        """The bytes that a Range header asks for; None for all: without the header, or with one
        that is not a single range (RFC 9110, section 14.2). Raises ApiError (416)."""
        match = _RANGE.fullmatch(header or "")
        if match is None:
            return None
        first, last, suffix = match.groups()
        if suffix is not None:
            start, end = max(num_bytes - int(suffix), 0), num_bytes
        else:
            start, end = int(first), min(int(last) + 1 if last else num_bytes, num_bytes)
            if last and int(last) < start:
                return None
        if start >= end:
            headers = {"content-range": f"bytes */{num_bytes}"}
            message = f"the file has {num_bytes} bytes, none of them in this range"
            raise ApiError(416, "range_not_satisfiable", message, headers=headers)
        return cls(start, end)


async def chunks(store: ObjectStore, file_id: str, span: Span) -> AsyncGenerator[bytes, None]:
    """Raises PayloadError."""
    at = span.start
    while at < span.end:
        num_bytes = min(CHUNK_BYTES, span.end - at)
        chunk = await asyncio.to_thread(store.read, content_key(file_id), at, num_bytes)
        if not chunk:
            return
        yield chunk
        at += len(chunk)


async def write_content(store: ObjectStore, file_id: str, content: BinaryIO) -> None:
    """Raises PayloadUnavailable."""
    await asyncio.to_thread(store.write, content_key(file_id), content)


async def lines(
    store: ObjectStore, file_id: str, num_bytes: int, *, max_line_bytes: int
) -> AsyncIterator[bytes | None]:
    """The lines of a file without their ends; None for one that is too long. Other tasks run every
    few lines."""
    rest, is_too_long = b"", False
    async for chunk in chunks(store, file_id, Span(0, num_bytes)):
        *whole, rest = (rest + chunk).split(b"\n")
        for number, line in enumerate(whole):
            if number % _LINES_PER_TURN == 0:
                await asyncio.sleep(0)
            yield None if is_too_long or len(line) > max_line_bytes else line
            is_too_long = False
        if len(rest) > max_line_bytes:
            rest, is_too_long = b"", True
    if rest or is_too_long:
        yield None if is_too_long or len(rest) > max_line_bytes else rest
