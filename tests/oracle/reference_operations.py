"""Operations on many jobs in Python, like reference.py for the other functions. A place is that of
a cursor: time, id; None: at the end. Calls of flows and flows are not known here."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from contract.batches import LeaseLost
from contract.callbacks import OutboxState
from contract.function_types import Wanted
from contract.jobs import JobStatus
from contract.operations import OperationKind, OperationsFull, OperationState

if TYPE_CHECKING:
    from tests.oracle.reference import Reference

OPEN_MS = 86_400_000
LISTED_MS = 8 * OPEN_MS
MAX_OPEN = 3  # few, so that walks reach it

Place = tuple[int, str] | None
Counts = tuple[int, int, int]  # matched, done, failed
Answer = tuple[OperationState, Counts, tuple[str, ...], bool, Place]


@dataclass(slots=True)
class OperationEntry:
    """An operation's record. `worked_ms`: when it was taken last."""

    owner: str
    tenant: str
    kind: OperationKind
    wanted: Wanted
    created_ms: int
    before_ms: int
    worked_ms: int
    place: Place
    there: frozenset[str]  # the jobs when it began
    state: OperationState = OperationState.RUNNING
    counts: Counts = (0, 0, 0)
    token: str = ""
    lease_ms: int = 0
    finished_ms: int | None = None


class OperationsReference:
    """The operations of one partition."""

    def __init__(self, jobs: "Reference") -> None:
        self._jobs = jobs
        self.entries: dict[str, OperationEntry] = {}

    def add(
        self, operation_id: str, kind: OperationKind, wanted: Wanted, *, owner: str, tenant: str
    ) -> None:
        """Raises OperationsFull."""
        if operation_id in self.entries:
            return
        if sum(entry.owner == owner for entry in self._open().values()) >= MAX_OPEN:
            raise OperationsFull
        now_ms = self._jobs.now_ms
        before_ms = now_ms + 1
        if kind is not OperationKind.REPLAY_CALLBACKS and wanted.created_before_ms:
            before_ms = min(before_ms, wanted.created_before_ms)
        place = before_ms, ""
        there = frozenset(self._jobs.records)
        self.entries[operation_id] = OperationEntry(
            owner, tenant, kind, wanted, now_ms, before_ms, now_ms, place, there
        )

    def take(self, token: str, *, lease_s: float, only: str = "") -> str | None:
        now_ms = self._jobs.now_ms
        order = sorted(self._open().items(), key=lambda item: (item[1].worked_ms, item[0]))
        for operation_id, entry in order:
            if only in ("", operation_id) and entry.lease_ms <= now_ms:
                entry.token, entry.lease_ms = token, now_ms + int(lease_s * 1000)
                entry.worked_ms = now_ms
                return operation_id
        return None

    def step(
        self,
        operation_id: str,
        token: str,
        *,
        lease_s: float,
        reported: tuple[Place, Counts] | None,
        max_looks: int,
        max_jobs: int,
    ) -> Answer:
        """Raises LeaseLost."""
        entry, now_ms = self.entries.get(operation_id), self._jobs.now_ms
        if entry is None or entry.token != token or entry.lease_ms <= now_ms:
            raise LeaseLost(operation_id)
        entry.lease_ms = now_ms + int(lease_s * 1000)
        ids, place, has_worked = tuple[str, ...](), None, False
        if entry.state is OperationState.RUNNING:
            if reported is not None:
                entry.place, entry.counts = reported
            if max_jobs and entry.place is not None:
                has_worked = True
                ids, place = self._work(entry, max_looks, max_jobs)
                if not ids:
                    entry.place = place
            if entry.place is None:
                self._finish(entry, OperationState.COMPLETED)
            elif now_ms - entry.created_ms > OPEN_MS:
                self._finish(entry, OperationState.EXPIRED)
        return entry.state, entry.counts, ids, has_worked, place

    def stop(self, operation_id: str) -> OperationState | None:
        entry = self.entries.get(operation_id)
        if entry is not None and entry.state is OperationState.RUNNING:
            self._finish(entry, OperationState.CANCELLED)
        return None if entry is None else entry.state

    def of_owner(self, owner: str) -> list[str]:
        """The youngest first."""
        own = {i: e for i, e in self.entries.items() if e.owner == owner}
        added_ms = max((entry.created_ms for entry in own.values()), default=0)
        recent = [i for i, e in own.items() if e.created_ms > added_ms - LISTED_MS]
        return sorted(recent, key=lambda i: (own[i].created_ms, i), reverse=True)

    def missed(self, entry: OperationEntry) -> list[str]:
        """Jobs that a completed cancel was to end, and that have not ended. Lanes change while it
        works."""
        records = self._jobs.records.items()
        return [
            job_id
            for job_id, record in records
            if job_id in entry.there
            and not record.is_terminal
            and entry.tenant in ("", record.job.tenant)
            and entry.wanted.created_after_ms < record.created_ms < entry.before_ms
            and not entry.wanted.statuses
            and not entry.wanted.lanes
            and record.matches(entry.wanted)
        ]

    def _open(self) -> dict[str, OperationEntry]:
        running = OperationState.RUNNING
        return {i: entry for i, entry in self.entries.items() if entry.state is running}

    def _finish(self, entry: OperationEntry, state: OperationState) -> None:
        entry.state, entry.finished_ms = state, self._jobs.now_ms

    def _work(
        self, entry: OperationEntry, max_looks: int, max_jobs: int
    ) -> tuple[tuple[str, ...], Place]:
        """Returns the ids for the gateway, and the place behind them."""
        assert entry.place is not None
        created_ms, last_id = entry.place
        is_jobs = entry.kind is not OperationKind.REPLAY_CALLBACKS
        looked, is_more = self._looked(entry, max_looks)
        ids: list[str] = []
        num_matched = 0
        for row_ms, row_id in looked:
            if num_matched == max_jobs:
                return tuple(ids), (created_ms, last_id)
            if is_jobs and row_ms <= entry.wanted.created_after_ms:
                is_more = False
                break
            created_ms, last_id = row_ms, row_id
            if not self._is_meant(entry, row_id):
                continue
            num_matched += 1
            if entry.kind is OperationKind.REPLAY:
                ids.append(row_id)
            else:
                self._act(entry, row_id)
                matched, done, failed = entry.counts
                entry.counts = matched + 1, done + 1, failed
        return tuple(ids), (created_ms, last_id) if is_more else None

    def _looked(self, entry: OperationEntry, max_looks: int) -> tuple[list[tuple[int, str]], bool]:
        """The next rows of the list, and whether there may be more: as many are read, also
        of the place's own time."""
        assert entry.place is not None
        created_ms, last_id = entry.place
        rows = sorted(self._listed(entry.kind, entry.tenant), reverse=True)
        if (created_ms, last_id) in rows:
            first = rows.index((created_ms, last_id)) + 1
        else:
            is_whole = last_id == ""
            first = sum(ms > created_ms or (is_whole and ms == created_ms) for ms, _ in rows)
        while True:
            found = rows[first : first + max_looks]
            is_more = len(found) == max_looks
            behind = [row for row in found if row < (created_ms, last_id)]
            if behind or not is_more:
                return behind, is_more
            first += max_looks

    def _listed(self, kind: OperationKind, tenant: str) -> Iterable[tuple[int, str]]:
        if kind is OperationKind.REPLAY_CALLBACKS:
            dead = self._jobs.outbox.dead(tenant)
            return [(self._jobs.outbox.entries[i].died_ms, i) for i in dead]
        records = self._jobs.records.items()
        return [(r.created_ms, i) for i, r in records if tenant in ("", r.job.tenant)]

    def _is_meant(self, entry: OperationEntry, job_id: str) -> bool:
        if entry.kind is OperationKind.REPLAY_CALLBACKS:
            posted = self._jobs.outbox.entries[job_id]
            assert posted.state is OutboxState.DEAD
            statuses = entry.wanted.statuses
            return not statuses or posted.kind.value in {status.value for status in statuses}
        record = self._jobs.records[job_id]
        is_kind = record.is_terminal == (entry.kind is OperationKind.REPLAY)
        return is_kind and record.matches(entry.wanted)

    def _act(self, entry: OperationEntry, job_id: str) -> None:
        now_ms = self._jobs.now_ms
        if entry.kind is OperationKind.CANCEL:
            record = self._jobs.records[job_id]
            assert self._jobs.cancel(job_id, record.job.tenant) is JobStatus.CANCELLED
        else:
            tenant = self._jobs.outbox.entries[job_id].tenant
            assert self._jobs.outbox.replay(job_id, tenant, now_ms=now_ms) is OutboxState.DUE
