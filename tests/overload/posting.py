"""One POST on its own connection, over HTTP/1.0, where closing the connection ends the response.

A load generator must cost less than the system under load. In a pool of connections the cost of a
call grows with their number.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


class Broken(Exception):
    """The connection broke, or a timeout passed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of a response; header names are lower-case."""

    status: int
    headers: Mapping[str, str]
    _reader: asyncio.StreamReader

    async def lines(self) -> AsyncIterator[str]:
        """Lines of the body without line ends. Raises Broken."""
        while line := await _line(self._reader):
            yield line.decode().rstrip("\r\n")

    async def read_json(self) -> Any:
        """Reads the whole body. Raises Broken."""
        return json.loads("".join([line async for line in self.lines()]))


@contextlib.asynccontextmanager
async def posting(
    url: str, body: Mapping[str, Any], *, timeout_s: float, api_key: str = ""
) -> AsyncIterator[Answer]:
    """Sends the request and reads the head. Raises Broken, also while the response is read."""
    parts = urlsplit(url)
    data = json.dumps(body).encode()
    key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
    head = (
        f"POST {parts.path} HTTP/1.0\r\nhost: {parts.hostname}\r\n"
        f"{key}content-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                writer.write(head.encode() + data)
                status = int((await _line(reader)).split()[1])
                yield Answer(status, await _headers(reader), reader)
            finally:
                writer.close()
    except (OSError, TimeoutError) as exc:
        raise Broken(type(exc).__name__) from exc


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    headers = {}
    while line := (await _line(reader)).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return headers


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except ValueError as exc:  # longer than any line of a response
        raise Broken("a line without end") from exc
