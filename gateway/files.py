"""Stored files: their contents in the object store, moved in chunks so that no file is ever whole
in memory; the bytes that a Range header asks for (RFC 9110, section 14); a tenant's quota."""

import asyncio
import hashlib
import io
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, BinaryIO

from contract.files import FilesFull, StoredFile, content_key
from contract.payloads.store import ObjectStore, PayloadError, PayloadLost
from gateway.http.errors import ApiError, bad_request
from gateway.state import Gateway

# Key in the request's state: the most bytes of an answer that the platform takes.
ANSWER_BYTES = "answer_bytes"
CHUNK_BYTES = 256 * 1024
_JOIN_BYTES = 2**20  # of one read of a part that is joined with others
# Lines of so many bytes together, where each counts some more, are checked within some 2 ms.
_TURN_BYTES, _LINE_BYTES = 8_000, 160

_SPEC = re.compile(r"(\d+)-(\d*)|-(\d+)", re.ASCII)
_MAX_DIGITS = 18  # a longer number is beyond the end of every file; Python reads 4,300


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
        """Returns the bytes that the header asks for. None stands for all of them: without the
        header, with one that is malformed or of another unit, with ranges that do not touch each
        other, and for an empty file. Raises ApiError (416)."""
        spans = _spans(header or "", num_bytes)
        if not spans or num_bytes == 0:
            return None
        if not any(span.num_bytes > 0 for span in spans):
            headers = {"content-range": f"bytes */{num_bytes}"}
            message = f"the file has {num_bytes} bytes, none of them in this range"
            raise ApiError(416, "range_not_satisfiable", message, headers=headers)
        return _joined([span for span in spans if span.num_bytes > 0])


def store_of(gateway: Gateway) -> ObjectStore:
    """Raises ApiError (400) if this installation has none."""
    store = gateway.broker.payloads.store
    if store is None:
        message = "files need an object store, which this gateway does not have"
        raise bad_request("no_object_store", message)
    return store


async def delete_objects(gateway: Gateway, object_id: str) -> None:
    """Deletes the objects of a file or batch that nobody needs. If deletion fails, the feeder
    repeats it."""
    try:
        await asyncio.to_thread(store_of(gateway).delete_job, object_id)
    except PayloadError:
        return
    shard = await gateway.broker.shards.of(object_id)
    await shard.ask("file", shard.files.deleted, object_id)


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


class Joined(io.RawIOBase):
    """Objects one after the other, read once. Its methods block and raise PayloadError."""

    def __init__(self, store: ObjectStore, parts: Sequence[tuple[str, int]]) -> None:
        """`parts`: key and bytes of each object."""
        self._store = store
        self._parts = [part for part in reversed(parts) if part[1]]
        self._at = 0
        self._md5 = hashlib.md5(usedforsecurity=False)

    def buffered(self) -> BinaryIO:
        return io.BufferedReader(self, _JOIN_BYTES)

    @property
    def md5(self) -> str:
        """Of what was read."""
        return self._md5.hexdigest()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        if not self._parts:
            return 0
        key, num_bytes = self._parts[-1]
        asked = min(len(buffer), num_bytes - self._at)
        data = self._store.read(key, self._at, asked)
        if len(data) != asked:
            raise PayloadLost(f"object {key} is shorter than it was")
        buffer[:asked] = data
        self._md5.update(data)
        self._at += asked
        if self._at == num_bytes:
            self._parts.pop()
            self._at = 0
        return asked


async def lines(
    store: ObjectStore, file_id: str, num_bytes: int, *, max_line_bytes: int
) -> AsyncIterator[bytes | None]:
    """The lines of a file without their ends; None for one that is too long. Other tasks run every
    few lines."""
    rest, is_too_long, num_passed = b"", False, 0
    async for chunk in chunks(store, file_id, Span(0, num_bytes)):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            num_passed += len(line) + _LINE_BYTES
            if num_passed > _TURN_BYTES:
                num_passed = 0
                await asyncio.sleep(0)
            yield None if is_too_long or len(line) > max_line_bytes else line
            is_too_long = False
        if len(rest) > max_line_bytes:
            rest, is_too_long = b"", True
    if rest or is_too_long:
        yield None if is_too_long or len(rest) > max_line_bytes else rest


async def check_quota(gateway: Gateway, tenant: str) -> None:
    """Raises ApiError (429) if the tenant's files have reached their limit."""
    shard = await gateway.broker.shards.home(tenant)
    held = await shard.ask("file", shard.files.tenant_bytes, tenant)
    most = gateway.settings.max_tenant_file_bytes
    if most and held >= most:
        raise files_full(held, most)


async def recorded(
    gateway: Gateway, file: StoredFile, lifetime_s: float, max_tenant_bytes: int
) -> StoredFile:
    """Records a file whose content is stored. `max_tenant_bytes`: of all the tenant's files; 0: no
    limit. Raises ApiError (429) if it has no room."""
    shard = await gateway.broker.shards.of(file.id)
    terms: dict[str, Any] = {"lifetime_s": lifetime_s, "max_tenant_bytes": max_tenant_bytes}
    try:
        return await shard.ask("file", shard.files.add, file, **terms)
    except FilesFull as exc:
        await delete_objects(gateway, file.id)
        raise files_full(exc.num_bytes, gateway.settings.max_tenant_file_bytes) from None


def files_full(held: int, most: int) -> ApiError:
    message = f"the files of this tenant have {held} bytes; they may have {most}: delete some"
    return tenant_quota(message)


def tenant_quota(message: str) -> ApiError:
    headers = {"x-should-retry": "false", "x-dropped-reason": "tenant_quota"}
    return ApiError(429, "tenant_quota", message, headers=headers)


def _spans(header: str, num_bytes: int) -> list[Span]:
    """The span of each range, within the file; an empty list if the header is to be ignored."""
    unit, _, ranges = header.partition("=")
    spans = []
    for text in filter(None, (part.strip(" \t") for part in ranges.split(","))):
        match = _SPEC.fullmatch(text)
        if match is None or unit.lower() != "bytes":
            return []
        first, last, suffix = (_number(digits) for digits in match.groups())
        if suffix is not None:
            spans.append(Span(max(num_bytes - suffix, 0), num_bytes))
        elif first is not None and last is not None and last < first:
            return []
        else:
            end = num_bytes if last is None else min(last + 1, num_bytes)
            spans.append(Span(first or 0, end))
    return spans


def _number(digits: str | None) -> int | None:
    """The number that the digits spell; None if there are no digits."""
    if not digits:
        return None
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) <= _MAX_DIGITS else 10 ** len(digits)


def _joined(spans: list[Span]) -> Span | None:
    """Returns one span for all of them; None if there is a gap."""
    spans.sort(key=lambda span: span.start)
    whole = spans[0]
    for span in spans[1:]:
        if span.start > whole.end:
            return None
        whole = Span(whole.start, max(whole.end, span.end))
    return whole
