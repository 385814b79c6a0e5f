"""The functions of the outbox in Python, like reference.py for the others."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from contract.callbacks import Callback, MessageKind, OutboxState
from contract.outbox import DoneVerdict, Outcome, Taken
from tests.oracle.reference_memory import TIMES_FREE


@dataclass(slots=True)
class OutboxEntry:
    """A job's record. `due_ms` is set while it waits, `lease_ms` during an attempt."""

    tenant: str
    destination: str
    kind: MessageKind
    number: int = 0
    state: OutboxState = OutboxState.DUE
    attempt: int = 0
    failures: int = 0
    taken: int | None = None  # number of the message that is on its way
    due_ms: int | None = None
    lease_ms: int | None = None
    died_ms: int = 0


class OutboxReference:
    """The records of one partition. Tests ignore the order in which tenants and their destinations
    are tried."""

    def __init__(self) -> None:
        self.entries: dict[str, OutboxEntry] = {}

    def post(
        self, of_id: str, tenant: str, callback: Callback | None, kind: MessageKind, now_ms: int
    ) -> None:
        """Writes what a transition writes for a job or batch with a callback."""
        if callback is None:
            return
        entry = self.entries.setdefault(
            of_id, OutboxEntry(tenant, callback.destination(tenant), kind)
        )
        entry.kind, entry.failures = kind, 0
        entry.number += 1
        if entry.state is not OutboxState.TAKEN:
            entry.state, entry.due_ms = OutboxState.DUE, now_ms

    def can_be_taken(self, now_ms: int, max_per_target: int) -> dict[str, tuple[set[str], int]]:
        """By destination: the jobs whose messages are due, and how many of them may be taken."""
        due: dict[str, set[str]] = defaultdict(set)
        num_flying: dict[str, int] = defaultdict(int)
        for job_id, entry in self.entries.items():
            is_flying = entry.lease_ms is not None and entry.lease_ms > now_ms
            num_flying[entry.destination] += is_flying
            is_due = entry.due_ms is not None and entry.due_ms <= now_ms
            if is_due or (entry.lease_ms is not None and not is_flying):
                due[entry.destination].add(job_id)
        return {
            to: (ids, min(len(ids), max(0, max_per_target - num_flying[to])))
            for to, ids in due.items()
        }

    def may_take(self, tenant: str, num_free: int, now_ms: int) -> bool:
        """Whether a tenant may have one more message in flight, with so many free places."""
        num_flying = sum(
            entry.tenant == tenant and entry.lease_ms is not None and entry.lease_ms > now_ms
            for entry in self.entries.values()
        )
        return num_free > 0 and (num_flying == 0 or num_flying + 1 <= TIMES_FREE * (num_free - 1))

    def take(self, taken: Taken, *, lease_s: float, now_ms: int) -> None:
        """Takes what Redis has chosen among the messages that could be taken."""
        entry = self.entries[taken.job_id]
        entry.attempt += 1
        assert entry.attempt == taken.attempt, "attempts are counted one by one"
        entry.state, entry.taken = OutboxState.TAKEN, entry.number
        entry.due_ms, entry.lease_ms = None, now_ms + int(lease_s * 1000)

    def lapse(self, now_ms: int, destinations: set[str]) -> None:
        """Gives back messages with expired leases, as a visit to their destinations does."""
        for entry in self.entries.values():
            is_over = entry.lease_ms is not None and entry.lease_ms <= now_ms
            if entry.destination in destinations and is_over:
                entry.state, entry.lease_ms, entry.due_ms = OutboxState.DUE, None, now_ms

    def start(
        self, taken: Taken, *, lease_s: float, now_ms: int, renews: bool = False
    ) -> MessageKind | None:
        entry = self.entries.get(taken.job_id)
        if entry is None or entry.state is not OutboxState.TAKEN or entry.attempt != taken.attempt:
            return None
        entry.lease_ms = now_ms + int(lease_s * 1000)
        if not renews:
            entry.taken = entry.number
        return entry.kind

    def done(
        self, taken: Taken, outcome: Outcome, *, delay_s: float = 0.0, now_ms: int
    ) -> DoneVerdict:
        entry = self.entries.get(taken.job_id)
        if entry is None:
            return DoneVerdict.GONE
        if entry.attempt != taken.attempt:
            return DoneVerdict.FENCED
        if entry.taken is None:
            return DoneVerdict.OK
        is_current = entry.taken == entry.number
        entry.taken = entry.lease_ms = entry.due_ms = None
        if not is_current:
            entry.state, entry.due_ms = OutboxState.DUE, now_ms
            return DoneVerdict.SUPERSEDED
        if outcome == "retry":
            entry.failures += 1
            entry.state, entry.due_ms = OutboxState.DUE, now_ms + int(delay_s * 1000)
        else:
            entry.state, entry.died_ms = _over(entry.kind, outcome), now_ms
        return DoneVerdict.OK

    def replay(self, job_id: str, tenant: str, *, now_ms: int) -> OutboxState | None:
        entry = self.entries.get(job_id)
        if entry is None or entry.tenant != tenant:
            return None
        if entry.state is OutboxState.DEAD:
            entry.state, entry.due_ms, entry.failures = OutboxState.DUE, now_ms, 0
        return entry.state

    def dead(self, tenant: str) -> set[str]:
        """The jobs of a tenant whose callbacks could not be delivered."""
        return {
            job_id
            for job_id, entry in self.entries.items()
            if entry.tenant == tenant and entry.state is OutboxState.DEAD
        }


def _over(kind: MessageKind, outcome: Literal["delivered", "dead"]) -> OutboxState:
    return OutboxState(outcome) if kind.is_end else OutboxState.IDLE
