"""The contents of files in the object store, moved in chunks: no file is ever whole in memory."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import BinaryIO

from contract.files import content_key
from contract.payloads.store import ObjectStore
from gateway.files.ranges import Span

CHUNK_BYTES = 256 * 1024
_LINES_PER_TURN = 50  # to check them takes about 1.5 ms


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
