"""Operations on many jobs by filter, which gateways work through part by part: a typed call for
each Redis Function (lua/_operations.lua).

An operation is leased by one gateway at a time. Its counts and how far it is change with the jobs
in one step, so the next gateway goes on exactly there.
"""

from enum import StrEnum
from typing import Any

import msgspec

from contract.batches import LeaseLost
from contract.codec import encode
from contract.connection import broker_errors, repeated
from contract.errors import BatchwayError
from contract.function_types import TenantLimits, Wanted
from contract.keys import new_id
from contract.library import Partition

MAX_OPEN = 16  # operations of a tenant that have not ended
MAX_LISTED = 100
# Of one step, which Redis runs in a few milliseconds: records read, and jobs changed.
MAX_LOOKS, MAX_STEP_JOBS = 150, 8


class OperationKind(StrEnum):
    CANCEL = "cancel"
    REPLAY = "replay"  # submits ended jobs again, under new ids
    REPLAY_CALLBACKS = "replay_callbacks"


class OperationState(StrEnum):
    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # some jobs found no room for a day


class OperationsFull(BatchwayError):
    """The tenant has as many open operations as it may have."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """An operation's record. Times are in Unix ms of the Redis clock."""

    id: str
    owner: str  # the tenant that asked
    tenant: str  # of the jobs; empty: all tenants
    kind: OperationKind
    state: OperationState
    matched: int = 0
    done: int = 0
    failed: int = 0
    created_ms: int = msgspec.field(name="created")
    finished_ms: int | None = msgspec.field(default=None, name="finished")
    limits: TenantLimits = TenantLimits()  # that jobs submitted again must keep


class OperationProgress(msgspec.Struct, frozen=True):
    """Where an operation is after a step. `job_ids`: see operation_step.lua."""

    state: OperationState
    matched: int
    done: int
    failed: int
    job_ids: tuple[str, ...]
    cursor: bytes


def new_operation_id(partition: int = 0) -> str:
    return new_id("op-", partition)


class Operations(Partition):
    """The operations of one partition. Every call may be repeated, and raises BrokerUnavailable,
    CommandDenied, and WireError where a record is not as this version writes it."""

    async def add(
        self,
        operation_id: str,
        kind: OperationKind,
        wanted: Wanted,
        *,
        owner: str,
        tenant: str,
        limits: TenantLimits = TenantLimits(),  # noqa: B008 - it is frozen
    ) -> None:
        """Records an operation on the jobs of a tenant; empty: of all. Raises OperationsFull."""
        names = operation_id, owner, tenant, kind.value
        reply = await self._call("operation_add", *names, encode(wanted), encode(limits), MAX_OPEN)
        if reply == [b"FULL"]:
            raise OperationsFull(f"{owner} has {MAX_OPEN} open operations")

    async def find(self, operation_id: str) -> Operation | None:
        """Reads an operation. Raises WireError."""
        with broker_errors(self._client, "HGETALL", record="operation"):
            key = self._keys.of("operation", operation_id)
            raw: Any = await repeated(lambda: self._client.hgetall(key))
            return _operation(operation_id, raw) if raw else None

    async def of_owner(self, owner: str) -> list[Operation]:
        """A tenant's operations of the last week, the youngest first. Raises WireError."""
        with broker_errors(self._client, "ZREVRANGE", record="operation"):
            key = self._keys.of("operations", owner)
            raw_ids: Any = await self._client.zrevrange(key, 0, MAX_LISTED - 1)
        found = [await self.find(raw_id.decode()) for raw_id in raw_ids]
        return [each for each in found if each is not None]

    async def take(self, token: str, *, lease_s: float, only: str = "") -> str | None:
        """Leases an open operation; `only`: this one. Returns its id, or None."""
        reply = await self._call("operation_take", token, int(lease_s * 1000), only)
        return reply[0].decode() if reply else None

    async def step(
        self,
        operation_id: str,
        token: str,
        *,
        lease_s: float,
        reported: OperationProgress | None = None,
        max_looks: int = MAX_LOOKS,
        max_jobs: int = MAX_STEP_JOBS,
    ) -> OperationProgress:
        """Works through the next jobs, and renews the lease; 0 s: gives it back. `reported`: the
        step whose jobs were handed out, with the counts after them. Raises LeaseLost."""
        r = reported
        report = ("",) if r is None else (r.cursor, r.matched, r.done, r.failed)
        bounds = int(lease_s * 1000), max_looks, max_jobs
        reply = await self._call("operation_step", operation_id, token, *bounds, *report)
        if reply == [b"FENCED"]:
            raise LeaseLost(operation_id)
        _, state, matched, done, failed, ids, cursor = reply
        job_ids = tuple(raw_id.decode(errors="replace") for raw_id in ids)
        return OperationProgress(
            OperationState(state.decode()), matched, done, failed, job_ids, cursor
        )

    async def give_back(self, operation_id: str, token: str) -> None:
        """Ends the lease. Raises LeaseLost."""
        await self.step(operation_id, token, lease_s=0, max_jobs=0)

    async def stop(self, operation_id: str) -> OperationState | None:
        """Ends an operation where it is; returns its state afterwards, None if there is none."""
        [state] = await self._call("operation_stop", operation_id)
        return None if state == b"NOT_FOUND" else OperationState(state.decode())


_SHOWN = ("owner", "tenant", "kind", "state", "matched", "done", "failed", "created", "finished")


def _operation(operation_id: str, raw: dict[bytes, bytes]) -> Operation:
    texts = {name: raw[name.encode()].decode() for name in _SHOWN if name.encode() in raw}
    limits = msgspec.msgpack.decode(raw[b"terms"], type=TenantLimits)
    fields = {"id": operation_id, "limits": limits, **texts}
    return msgspec.convert(fields, Operation, strict=False)
