"""The records of files, whose content is in the object store, and the calls of their Redis
Functions.

A content is announced, then written, then recorded, and deleted after its record. Whatever is due
for deletion, at once or later, is in `objects_due` until it has been deleted.

An upload in parts has a record like a file's, with all bytes that the file is to have and the
purpose `upload:` with the seconds that it will be kept; lists leave it out.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec

from contract.codec import wire_errors
from contract.connection import broker_errors, repeated
from contract.errors import BatchwayError, WireError
from contract.keys import new_id
from contract.library import Partition

UPLOAD_S = 3_600.0  # until a content without a record is deleted
_LIST_PAGE = 200  # records per read
UPLOAD_PURPOSE = "upload:"


class FilesFull(BatchwayError):
    """The tenant's files have reached their limit. `num_bytes`: what they have."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__("the tenant's files have reached their limit")
        self.num_bytes = num_bytes


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file's record; times in Unix ms of the Redis clock.

    Fields are those of the record in Redis, under their `name` where one is given.
    """

    id: str
    tenant: str
    num_bytes: int = msgspec.field(name="bytes")
    purpose: str
    filename: str
    created_ms: int = msgspec.field(default=0, name="created")
    expires_ms: int = msgspec.field(default=0, name="expires")


def new_file_id(partition: int = 0) -> str:
    return new_id("file-", partition)


class Upload(msgspec.Struct, frozen=True):
    """A file that arrives in parts."""

    record: StoredFile
    file_lifetime_s: int

    @classmethod
    def of(cls, record: StoredFile) -> "Upload":
        """Raises WireError."""
        with wire_errors("upload"):
            return cls(record, int(record.purpose.removeprefix(UPLOAD_PURPOSE)))

    def file(self) -> StoredFile:
        """The file that it becomes, which is the same each time it is completed."""
        return msgspec.structs.replace(
            self.record, id=file_of_upload(self.record.id), purpose="batch"
        )


def file_of_upload(upload_id: str) -> str:
    return upload_id.replace("upload_", "file-", 1)


def part_key(upload_id: str, part_id: str) -> str:
    """The key of a part in the object store."""
    return f"{upload_id}/{part_id}"


def content_key(file_id: str) -> str:
    """The key of a file's content in the object store."""
    return f"{file_id}/content"


class Files(Partition):
    """The files of one partition. Every call may be repeated, and raises BrokerUnavailable,
    CommandDenied, and WireError for a record that is not as this version writes it."""

    async def begin(self, file_id: str, *, upload_s: float = UPLOAD_S) -> None:
        """Announces a content, which is deleted later unless `add` records the file."""
        await self._call("file_begin", file_id, int(upload_s * 1000))

    async def add(
        self, file: StoredFile, *, lifetime_s: float, max_tenant_bytes: int
    ) -> StoredFile:
        """Records a file; returns it with its times. `max_tenant_bytes`: of all the tenant's files;
        0: no limit. Raises FilesFull."""
        reply = await self._call(
            "file_add",
            *(file.id, file.tenant, file.num_bytes, file.purpose, file.filename),
            *(int(lifetime_s * 1000), max_tenant_bytes),
        )
        if reply[0] == b"FULL":
            raise FilesFull(reply[1])
        return msgspec.structs.replace(file, created_ms=reply[1], expires_ms=reply[2])

    async def find(self, file_id: str, tenant: str) -> StoredFile | None:
        """Returns a file; None if the tenant has no such file, or it has expired."""
        [flat] = await self._call("file_read", file_id)
        found = _record(file_id, flat)
        return found if found is not None and found.tenant == tenant else None

    async def find_upload(self, upload_id: str, tenant: str) -> Upload | None:
        """Returns an upload; None if the tenant has no such one, or it has expired."""
        found = await self.find(upload_id, tenant)
        return None if found is None else Upload.of(found)

    async def _readable(self, file_ids: Sequence[str]) -> list[StoredFile]:
        """Returns the files that exist and can be read."""
        reply = await self._call("file_read", *file_ids) if file_ids else []
        found = []
        for file_id, flat in zip(file_ids, reply, strict=True):
            with contextlib.suppress(WireError):
                found.append(_record(file_id, flat))
        return [file for file in found if file is not None]

    async def tenant_bytes(self, tenant: str) -> int:
        """The bytes of all the tenant's files."""
        with broker_errors(self._client, "HGET", record="number of bytes"):
            raw: Any = await repeated(
                lambda: self._client.hget(self._keys.of("file_bytes"), tenant)
            )
            return int(raw or 0)

    async def page(
        self, tenant: str, *, purpose: str, after: str, is_oldest_first: bool, max_files: int
    ) -> Sequence[StoredFile] | None:
        """The tenant's files after the file `after`, of one purpose or ('') all; None where that
        file is not in the list. Omits unreadable records."""
        key = self._keys.of("files", tenant)
        files: list[StoredFile] = []
        with broker_errors(self._client, "ZRANGE", record="list of files"):
            start = 0
            if after:
                rank_of = self._client.zrank if is_oldest_first else self._client.zrevrank
                rank: Any = await repeated(lambda: rank_of(key, after))
                if rank is None:
                    return None
                start = rank + 1
            while len(files) < max_files:
                read = self._client.zrange if is_oldest_first else self._client.zrevrange
                first = start
                ids: Any = await repeated(lambda: read(key, first, first + _LIST_PAGE - 1))  # noqa: B023
                found = await self._readable([file_id.decode() for file_id in ids])
                files += [file for file in found if _is_listed(file, purpose)]
                if len(ids) < _LIST_PAGE:
                    break
                start += _LIST_PAGE
        return files[:max_files]

    async def drop(self, file_id: str, tenant: str = "") -> bool:
        """Forgets a file of the tenant, or of any; False where there is none. Its content remains
        due for deletion until `deleted`."""
        return bool(await self._call("file_drop", file_id, tenant) == [b"DROPPED"])

    async def due(self, max_ids: int = 100) -> list[str]:
        """Returns files that have expired or were dropped, and batches whose parts nobody needs."""
        reply = await self._call("objects_due", max_ids)
        return [each.decode(errors="replace") for each in reply]

    async def deleted(self, object_id: str) -> None:
        """Reports that the objects of a file or batch have been deleted."""
        with broker_errors(self._client, "ZREM"):
            await repeated(lambda: self._client.zrem(self._keys.of("objects_due"), object_id))


def _is_listed(file: StoredFile, purpose: str) -> bool:
    return not file.purpose.startswith(UPLOAD_PURPOSE) and purpose in ("", file.purpose)


def _record(file_id: str, flat: list[bytes]) -> StoredFile | None:
    """Decodes a file's record. Raises WireError."""
    if not flat:
        return None
    with wire_errors("file"):
        fields = {flat[i].decode(): flat[i + 1].decode() for i in range(0, len(flat), 2)}
        return msgspec.convert({**fields, "id": file_id}, StoredFile, strict=False)
