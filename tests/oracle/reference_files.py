"""The functions of files and batches in Python, like reference.py for the others."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from contract.batches import (
    Batch,
    BatchesFull,
    BatchStatus,
    LeaseLost,
    NewBatch,
    Part,
    StatusChanged,
)
from contract.callbacks import Callback, MessageKind
from contract.files import FilesFull, StoredFile
from tests.oracle.reference_outbox import OutboxReference

PART_DELAY_MS = 60_000
END_KINDS = {
    BatchStatus.COMPLETED: MessageKind.SUCCEEDED,
    BatchStatus.FAILED: MessageKind.FAILED,
    BatchStatus.EXPIRED: MessageKind.EXPIRED,
    BatchStatus.CANCELLED: MessageKind.CANCELLED,
}


@dataclass(slots=True)
class BatchRecord:
    """A batch, and the lease of its feeder. Times are in ms of the reference's clock."""

    batch: Batch
    callback: Callback | None
    token: str = ""
    lease_ms: int = 0
    parts: dict[int, Part] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        return self.batch.status in END_KINDS


class FilesReference:
    """The files of one partition."""

    def __init__(self) -> None:
        self.files: dict[str, StoredFile] = {}
        self.due_ms: dict[str, int] = {}  # files and batches: when their objects are deleted

    def begin(self, file_id: str, *, upload_s: float, now_ms: int) -> None:
        self.due_ms.setdefault(file_id, now_ms + int(upload_s * 1000))

    def add(
        self, file: StoredFile, *, lifetime_s: float, max_tenant_bytes: int, now_ms: int
    ) -> StoredFile:
        """Raises FilesFull."""
        known = self.files.get(file.id)
        if known is not None:
            self.files[file.id] = msgspec.structs.replace(known, num_bytes=file.num_bytes)
            return self.files[file.id]
        held = self.tenant_bytes(file.tenant)
        if max_tenant_bytes and held + file.num_bytes > max_tenant_bytes:
            raise FilesFull(held)
        expires_ms = now_ms + int(lifetime_s * 1000)
        self.files[file.id] = msgspec.structs.replace(
            file, created_ms=now_ms, expires_ms=expires_ms
        )
        self.due_ms[file.id] = expires_ms
        return self.files[file.id]

    def tenant_bytes(self, tenant: str) -> int:
        return sum(file.num_bytes for file in self.files.values() if file.tenant == tenant)

    def page(
        self, tenant: str, *, after: str, max_files: int, now_ms: int
    ) -> Sequence[StoredFile] | None:
        """The oldest first, without those that have expired."""
        own = [file for file in self.files.values() if file.tenant == tenant]
        own.sort(key=lambda file: (file.created_ms, file.id))
        ids = [file.id for file in own]
        if after and after not in ids:
            return None
        first = ids.index(after) + 1 if after else 0
        return [file for file in own[first:] if file.expires_ms > now_ms][:max_files]

    def drop(self, file_id: str, tenant: str = "", *, now_ms: int) -> bool:
        file = self.files.get(file_id)
        if file is None or tenant not in ("", file.tenant):
            return False
        del self.files[file_id]
        self.due_ms[file_id] = now_ms
        return True

    def due(self, max_ids: int, *, now_ms: int) -> list[str]:
        over = [(due_ms, each) for each, due_ms in self.due_ms.items() if due_ms <= now_ms]
        return [each for _, each in sorted(over)[:max_ids]]

    def deleted(self, object_id: str) -> None:
        self.due_ms.pop(object_id, None)


class BatchesReference:
    """The batches of one partition."""

    def __init__(self, files: FilesReference, outbox: OutboxReference) -> None:
        self.records: dict[str, BatchRecord] = {}
        self._files = files
        self._outbox = outbox

    def add(
        self,
        batch_id: str,
        asked: NewBatch,
        *,
        window_s: float,
        callback: Callback | None,
        max_open: int,
        now_ms: int,
    ) -> None:
        """Raises BatchesFull."""
        if batch_id in self.records:
            return
        tenant = asked.terms.tenant
        is_open = [each.batch.tenant == tenant for each in self._open()]
        if max_open and sum(is_open) >= max_open:
            raise BatchesFull
        batch = Batch(
            id=batch_id,
            tenant=asked.terms.tenant,
            status=BatchStatus.VALIDATING,
            asked=asked,
            created_ms=now_ms,
            expires_ms=now_ms + int(window_s * 1000),
        )
        self.records[batch_id] = BatchRecord(batch, callback)

    def find(self, batch_id: str, tenant: str) -> Batch | None:
        record = self.records.get(batch_id)
        return record.batch if record is not None and record.batch.tenant == tenant else None

    def page(self, tenant: str, *, after: str, max_batches: int) -> list[Batch] | None:
        """The youngest first."""
        own = [each.batch for each in self.records.values() if each.batch.tenant == tenant]
        own.sort(key=lambda batch: (batch.created_ms, batch.id), reverse=True)
        ids = [batch.id for batch in own]
        if after and after not in ids:
            return None
        first = ids.index(after) + 1 if after else 0
        return own[first : first + max_batches]

    def cancel(self, batch_id: str, tenant: str, *, now_ms: int) -> BatchStatus | None:
        record = self.records.get(batch_id)
        if record is None or record.batch.tenant != tenant:
            return None
        if record.batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            self._move(record, BatchStatus.CANCELLING, now_ms)
        return record.batch.status

    def _open(self) -> list[BatchRecord]:
        """The oldest first."""
        left = [record for record in self.records.values() if not record.has_ended]
        return sorted(left, key=lambda record: (record.batch.created_ms, record.batch.id))

    def take(
        self,
        token: str,
        *,
        lease_s: float,
        in_progress: bool,
        max_batches: int,
        max_more: int,
        now_ms: int,
    ) -> list[str]:
        if max_batches + max_more == 0:
            return []
        left = [
            record
            for record in self._open()
            if (record.batch.status is BatchStatus.IN_PROGRESS) == in_progress
        ]
        taken = [record for record in left if record.token == token]
        others = [record for record in left if record.token != token]
        held = Counter(each.batch.tenant for each in others if each.lease_ms > now_ms)
        turns: list[tuple[int, BatchRecord]] = []
        for record in others:
            if record.lease_ms <= now_ms:
                turns.append((held[record.batch.tenant], record))
                held[record.batch.tenant] += 1
        for turn, record in sorted(turns, key=lambda each: each[0]):
            if len(taken) < max_batches + (0 if turn else max_more):
                taken.append(record)
        for record in taken:
            record.token, record.lease_ms = token, now_ms + int(lease_s * 1000)
        return [record.batch.id for record in taken]

    def save(
        self,
        batch_id: str,
        token: str,
        *,
        lease_s: float,
        expected: BatchStatus | None,
        status: BatchStatus | None,
        part: tuple[int, Part | None] | None,
        fields: Mapping[str, int],
        now_ms: int,
    ) -> tuple[BatchStatus, int]:
        """Raises LeaseLost, StatusChanged."""
        record = self.records.get(batch_id)
        if record is None or record.token != token or record.lease_ms <= now_ms:
            raise LeaseLost(batch_id)
        record.lease_ms = now_ms + int(lease_s * 1000)
        before = record.batch.status
        if before is not status and expected not in (None, before):
            raise StatusChanged(before)
        if record.has_ended:
            if status not in (None, before):
                raise StatusChanged(before)
            return before, now_ms
        if part is not None and part[1] is not None:
            record.parts[part[0]] = part[1]
        elif part is not None:
            record.parts.pop(part[0], None)
        record.batch = msgspec.structs.replace(record.batch, **fields)
        if status is not None and status is not before:
            self._move(record, status, now_ms)
        return record.batch.status, now_ms

    def _move(self, record: BatchRecord, status: BatchStatus, now_ms: int) -> None:
        times = {} if status is BatchStatus.VALIDATING else {f"{status}_ms": now_ms}
        record.batch = msgspec.structs.replace(record.batch, status=status, **times)
        if record.has_ended:
            batch, kind = record.batch, END_KINDS[status]
            self._outbox.post(batch.id, batch.tenant, record.callback, kind, now_ms)
            self._files.due_ms[batch.id] = now_ms + PART_DELAY_MS
