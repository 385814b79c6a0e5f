"""Checks what must hold of the files and batches in Redis, as audit.py does for jobs."""

from typing import Any

from contract.batches import BatchStatus
from contract.keys import Keys
from tests.oracle.findings import Record, same

# The final statuses, as callbacks name them.
_ENDED = {
    "completed": "succeeded",
    "failed": "failed",
    "expired": "expired",
    "cancelled": "cancelled",
}
_STATUSES = {status.value for status in BatchStatus}


class FilesAudit:
    """Keeps the batches that have ended, which may never change."""

    def __init__(self, client: Any, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._ended: dict[str, dict[str, str]] = {}

    def check(self) -> None:
        """Raises AssertionError at the first violated invariant."""
        files = self._records("file", ("tenant", "bytes", "created", "expires"))
        batches = self._records("batch", ("tenant", "status", "created", "expires"))
        self._check_files(files)
        self._check_due(files, batches)
        self._check_batches(batches)

    def check_at_rest(self) -> None:
        """After every file has expired or was dropped, and every batch has ended."""
        patterns = ("file:*", "files:*", "file_bytes", "objects_due", "batches_open")
        left = [k for pattern in patterns for k in self._client.keys(self._keys.of(pattern))]
        assert left == [], f"I15: nothing is left behind: {left}"

    def _records(self, kind: str, names: tuple[str, ...]) -> dict[str, Record]:
        prefix = self._keys.of(kind, "")
        records = {}
        for key in self._client.keys(f"{prefix}*"):
            raw = self._client.hgetall(key)
            fields = {n.decode(): value.decode(errors="replace") for n, value in raw.items()}
            each = key.decode()[len(prefix) :]
            records[each] = record = Record(f"{kind}:{each}", fields)
            for name in names:
                assert record[name] != "", f"{record.key} {name}: holds nothing"
        return records

    def _lists(self, kind: str) -> dict[str, dict[str, object]]:
        prefix = self._keys.of(kind, "")
        return {
            key.decode()[len(prefix) :]: dict(self._scores(key))
            for key in self._client.keys(f"{prefix}*")
        }

    def _scores(self, key: str | bytes) -> dict[str, int]:
        rows: Any = self._client.zrange(key, 0, -1, withscores=True)
        return {member.decode(): int(score) for member, score in rows}

    def _check_files(self, files: dict[str, Record]) -> None:
        """I11: a tenant's files are listed, and their bytes counted."""
        lists: dict[str, dict[str, object]] = {}
        sums: dict[str, int] = {}
        for file_id, file in files.items():
            lists.setdefault(file["tenant"], {})[file_id] = file.number("created")
            sums[file["tenant"]] = sums.get(file["tenant"], 0) + file.number("bytes")
        same("I11: the lists of files", self._lists("files"), lists)
        raw: Any = self._client.hgetall(self._keys.of("file_bytes"))
        counted = {tenant.decode(): int(num_bytes) for tenant, num_bytes in raw.items()}
        found = {tenant: num_bytes for tenant, num_bytes in counted.items() if num_bytes}
        wanted = {tenant: num_bytes for tenant, num_bytes in sums.items() if num_bytes}
        same("I11: bytes of files", {"file_bytes": found}, {"file_bytes": wanted})
        strangers = counted.keys() - sums.keys()
        assert not strangers, f"I15: file_bytes: {sorted(strangers)} have no files"

    def _check_due(self, files: dict[str, Record], batches: dict[str, Record]) -> None:
        """I15: every file expires; the objects of a batch are deleted after its end."""
        due = self._scores(self._keys.of("objects_due"))
        found = {each: due.get(each) for each in files}
        wanted = {each: file.number("expires") for each, file in files.items()}
        same("I15: files expire", {"objects_due": found}, {"objects_due": wanted})
        early = [each for each in due if each in batches and batches[each]["status"] not in _ENDED]
        assert not early, f"objects_due: {early} have not ended"

    def _check_batches(self, batches: dict[str, Record]) -> None:
        """I1, I5, I12, I15: a batch is open or has ended, once and for all, and is told of."""
        lists = self._lists("batches")
        open_batches: dict[str, object] = {}
        for batch_id, batch in batches.items():
            created, status = batch.number("created"), batch["status"]
            assert status in _STATUSES, f"I2: {batch.key} status: holds {status!r}"
            listed = lists.get(batch["tenant"], {}).get(batch_id)
            assert listed == created, f"I15: {batch.key} is listed at {listed}, not {created}"
            if status not in _ENDED:
                open_batches[batch_id] = created
            self._check_expiry(batch_id, status in _ENDED)
            self._check_end(batch_id, batch)
        found = self._scores(self._keys.of("batches_open"))
        same("I1: open batches", {"batches_open": found}, {"batches_open": open_batches})
        for tenant in lists:
            ttl = self._client.pttl(self._keys.of("batches", tenant))
            assert ttl > 0, f"I15: batches:{tenant} expires: {ttl} ms"

    def _check_expiry(self, batch_id: str, has_ended: bool) -> None:
        for kind in ("batch", "batch_parts"):
            ttl = self._client.pttl(self._keys.of(kind, batch_id))
            assert ttl == -2 or (ttl > 0) == has_ended, (
                f"I15: {kind}:{batch_id} expires in {ttl} ms; the batch has ended: {has_ended}"
            )

    def _check_end(self, batch_id: str, batch: Record) -> None:
        before = self._ended.get(batch_id)
        now = {name: value for name, value in batch.items() if name not in ("lease", "token")}
        assert before in (None, now), f"I5: {batch.key} has changed after its end"
        if batch["status"] not in _ENDED:
            return
        self._ended[batch_id] = now
        at = batch.number(f"{batch['status']}_at")
        assert at >= batch.number("created"), f"{batch.key}: it ended at {at}"
        told: Any = self._client.hget(self._keys.of("out", batch_id), "kind")
        wanted = _ENDED[batch["status"]].encode() if "callback_to" in batch else None
        assert told == wanted, f"I12: {batch.key}, {batch['status']}: told {told!r}, not {wanted!r}"
