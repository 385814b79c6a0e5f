"""Joins a batch's parts to its output file and its error file."""

import io
from collections.abc import Mapping, Sequence

from contract.batches import Part, part_key, result_file_id
from contract.files import StoredFile
from contract.payloads.store import ObjectStore, PayloadLost
from gateway.files.contents import write_content
from gateway.runners.batches.lease import LeasedBatch


class PartLost(PayloadLost):
    """The object store no longer has all of a part's results."""

    def __init__(self, number: int) -> None:
        super().__init__(f"part {number} is missing or cut off")
        self.number = number


class _Joined(io.RawIOBase):
    """The objects of parts, read one after another. Blocks. Raises PartLost, PayloadUnavailable."""

    def __init__(self, store: ObjectStore, objects: Sequence[tuple[int, str, int]]) -> None:
        self._store = store
        self._objects = list(objects)  # each part's number, key and size
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while self._objects:
            number, key, num_bytes = self._objects[0]
            wanted = min(len(buffer), num_bytes - self._at)
            if wanted:
                data = self._read(number, key, wanted)
                buffer[: len(data)] = data
                self._at += len(data)
                return len(data)
            del self._objects[0]
            self._at = 0
        return 0

    def _read(self, number: int, key: str, wanted: int) -> bytes:
        try:
            data = self._store.read(key, self._at, wanted)
        except PayloadLost as exc:
            raise PartLost(number) from exc
        if not data:
            raise PartLost(number)
        return data


_BUFFER_BYTES = 256 * 1024


async def write_results(leased: LeasedBatch, parts: Mapping[int, Part]) -> dict[str, str]:
    """Writes the files that are not empty. Returns their ids by the names of the batch's fields.
    May be repeated. Raises PartLost, PayloadUnavailable."""
    sizes = {
        "output": {number: part.output_bytes for number, part in parts.items()},
        "error": {number: part.error_bytes for number, part in parts.items()},
    }
    fields = {}
    for kind, size_of in sizes.items():
        batch_id = leased.batch.id
        objects = [
            (number, part_key(batch_id, kind, number, parts[number].token), size_of[number])
            for number in sorted(size_of)
            if size_of[number]
        ]
        if objects:
            file = StoredFile(
                id=result_file_id(batch_id, kind),
                tenant=leased.batch.tenant,
                num_bytes=sum(size_of.values()),
                purpose="batch_output",
                filename=f"{batch_id}_{kind}.jsonl",
            )
            with io.BufferedReader(_Joined(leased.store, objects), _BUFFER_BYTES) as content:
                await write_content(leased.store, file.id, content)
            await _add(leased, file)
            fields[f"{kind}_file_id"] = file.id
    return fields


async def _add(leased: LeasedBatch, file: StoredFile) -> None:
    """Records a file of results, even if the tenant's files have reached their limit."""
    lifetime_s = leased.batch.asked.output_lifetime_s
    await leased.gateway.broker.ask_files(
        lambda files: files.add(file, lifetime_s=lifetime_s, max_tenant_bytes=0)
    )
