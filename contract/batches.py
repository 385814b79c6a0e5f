"""The records of batches, and the calls of their Redis Functions.

A batch's requests are the lines of a file. A feeder leases the batch, runs each line as a job, and
writes the results of every `PART_LINES` lines as a part into the object store. Only the holder of
the lease can change a batch; `batch_parts` names the object of each part, which holds the writer's
token, so that no other feeder's object is ever read.
"""

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from contract.api_keys import KeyTerms
from contract.callbacks import Callback
from contract.codec import encode, wire_errors
from contract.connection import broker_errors, repeated
from contract.errors import BatchwayError, WireError
from contract.jobs import Endpoint
from contract.keys import in_partition, new_id, partition_of
from contract.library import Partition

PART_LINES = 64
MAX_ERRORS = 1_000  # lines that a batch's errors list
KEEP_S = 30 * 86_400.0  # a batch's record, after its end
MAX_OPEN = 100  # batches of a tenant that have not ended


class BatchStatus(StrEnum):
    """OpenAI's states of a batch."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class BatchesFull(BatchwayError):
    """The tenant has as many open batches as it may have."""


class LeaseLost(BatchwayError):
    """Another feeder may hold the batch."""


class StatusChanged(BatchwayError):
    """The batch has another status than the feeder knew: its caller has cancelled it."""


class LineError(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a file is no batch; `line` counts from 1, and is None where no line is to blame."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Part(msgspec.Struct, frozen=True, array_like=True):
    """The results of one part. Its objects are `part_key(…)`; one without bytes does not exist."""

    token: str
    num_completed: int
    num_failed: int  # with a response that is an error, or without one
    output_bytes: int
    error_bytes: int
    is_cut_short: bool  # lines were not run because the window was over
    num_input_tokens: int = 0  # of the lines that completed
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_cached_tokens: int = 0


class NewBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The immutable part of a batch, as its caller requested it."""

    endpoint: Endpoint
    input_file_id: str
    completion_window: str
    terms: KeyTerms  # of the caller's key
    metadata: Mapping[str, str] | None = None
    output_lifetime_s: float


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch's record. Times are in Unix ms of the Redis clock, None for what has not happened.

    Fields are those of the record in Redis, under their `name` where one is given.
    """

    id: str
    tenant: str
    status: BatchStatus
    asked: NewBatch
    model: str = ""
    total: int = 0  # lines; 0 until the file is validated
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    errors: Sequence[LineError] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_ms: int = msgspec.field(name="created")
    start_ms: int | None = msgspec.field(default=None, name="start")  # no line runs before
    expires_ms: int = msgspec.field(name="expires")  # the end of the window
    in_progress_ms: int | None = msgspec.field(default=None, name="in_progress_at")
    finalizing_ms: int | None = msgspec.field(default=None, name="finalizing_at")
    completed_ms: int | None = msgspec.field(default=None, name="completed_at")
    failed_ms: int | None = msgspec.field(default=None, name="failed_at")
    expired_ms: int | None = msgspec.field(default=None, name="expired_at")
    cancelling_ms: int | None = msgspec.field(default=None, name="cancelling_at")
    cancelled_ms: int | None = msgspec.field(default=None, name="cancelled_at")


def new_batch_id(partition: int = 0) -> str:
    return new_id("batch_", partition)


def line_job_id(batch_id: str, line: int) -> str:
    """The id of a line's job, the same whoever submits it."""
    return _derived_id("job-", batch_id, str(line))


def result_file_id(batch_id: str, kind: str) -> str:
    """The id of a batch's file of one kind, `output` or `error`."""
    return _derived_id("file-", batch_id, kind)


def _derived_id(kind: str, batch_id: str, name: str) -> str:
    """An id in the batch's partition."""
    digits = hashlib.sha256(f"{batch_id}/{name}".encode()).hexdigest()[:32]
    return in_partition(kind + digits, partition_of(batch_id))


def part_key(batch_id: str, kind: str, number: int, token: str) -> str:
    """The key of a part in the object store."""
    return f"{batch_id}/{kind}-{number}-{token}"


class Batches(Partition):
    """The batches of one partition. Every call may be repeated, and raises BrokerUnavailable,
    CommandDenied, and WireError for a record that is not as this version writes it."""

    async def add(
        self,
        batch_id: str,
        asked: NewBatch,
        *,
        window_s: float,
        start_at_s: float = 0.0,
        callback: Callback | None = None,
        max_open: int = MAX_OPEN,
    ) -> None:
        """Records a batch. `start_at_s`: Unix time before which no line runs, from which the window
        counts. `callback` is told of its end. `max_open`: of the tenant's batches; 0: no limit.
        Raises BatchesFull."""
        fields: list[str | bytes] = ["asked", encode(asked)]
        if callback is not None:
            fields += ["callback", encode(callback)]
            fields += ["callback_to", callback.destination(asked.terms.tenant)]
        reply = await self._call(
            "batch_add",
            *(batch_id, asked.terms.tenant, int(window_s * 1000), int(KEEP_S * 1000), max_open),
            *(int(start_at_s * 1000), *fields),
        )
        if reply == [b"FULL"]:
            raise BatchesFull("as many batches of the tenant as may be have not ended")

    async def find(self, batch_id: str, tenant: str | None = None) -> Batch | None:
        """Returns a batch; None if the tenant has no such batch. `tenant` None: of any tenant."""
        with broker_errors(self._client, "HGETALL", record="batch"):
            key = self._keys.of("batch", batch_id)
            found = _record(batch_id, await repeated(lambda: self._client.hgetall(key)))
        return found if found and tenant in (None, found.tenant) else None

    async def page(self, tenant: str, *, after: str, max_batches: int) -> list[Batch] | None:
        """The tenant's batches after the batch `after`, youngest first; None where that batch is
        not in the list. Omits unreadable records."""
        key = self._keys.of("batches", tenant)
        with broker_errors(self._client, "ZREVRANGE", record="list of batches"):
            start = 0
            if after:
                rank: Any = await repeated(lambda: self._client.zrevrank(key, after))
                if rank is None:
                    return None
                start = rank + 1
            ids: Any = await repeated(
                lambda: self._client.zrevrange(key, start, start + max_batches - 1)
            )
            names = [batch_id.decode() for batch_id in ids]
            async with self._client.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.hgetall(self._keys.of("batch", name))
                records: Any = await pipeline.execute(raise_on_error=False)
            return _readable(names, records)

    async def cancel(self, batch_id: str, tenant: str) -> BatchStatus | None:
        """Has the batch cancelled. Returns its status then; None if the tenant has no such one."""
        reply = await self._call("batch_cancel", batch_id, tenant)
        return None if reply == [b"NOT_FOUND"] else BatchStatus(reply[1].decode())

    async def move(self, batch_id: str, tenant: str, start_at_s: float) -> bool | None:
        """Has the batch start at another Unix time, the past for now, with a window of the same
        length; False if it has started, None if the tenant has no such one."""
        reply = await self._call("batch_move", batch_id, tenant, int(start_at_s * 1000))
        return None if reply == [b"NOT_FOUND"] else reply == [b"OK"]

    async def take(
        self,
        token: str,
        *,
        lease_s: float,
        in_progress: bool,
        max_batches: int,
        max_more: int = 0,
        last_ends_ms: Mapping[str, int] | None = None,
    ) -> list[str]:
        """Leases unfinished batches that no feeder holds: those in progress, or those in other
        states. Tenants with the fewest leased batches come first, of a tenant the batches whose
        window ends first. `max_more`: the number of batches beyond `max_batches`, only of tenants
        without a leased batch. Also one beyond of a tenant of `last_ends_ms`, if its window ends
        before."""
        terms = int(lease_s * 1000), int(in_progress), max_batches, max_more
        ends = (each for pair in (last_ends_ms or {}).items() for each in pair)
        reply = await self._call("batch_take", token, *terms, *ends)
        return [batch_id.decode() for batch_id in reply]

    async def are_fed(self) -> bool:
        """Whether a gateway that runs batches was alive within the last hour."""
        with broker_errors(self._client, "EXISTS"):
            key = self._keys.of("batches_fed")
            return bool(await repeated(lambda: self._client.exists(key)))

    async def save(
        self,
        batch_id: str,
        token: str,
        *,
        lease_s: float,
        expected: BatchStatus | None = None,
        status: BatchStatus | None = None,
        part: tuple[int, Part | None] | None = None,
        fields: Mapping[str, str | int | bytes] | None = None,
    ) -> tuple[BatchStatus, int]:
        """Renews the lease (0: gives it back) and records progress. Returns the batch's status, and
        the time in ms. `part`: its number, and None to forget it. Raises LeaseLost, and
        StatusChanged if the status is not the expected one."""
        number, written = ("", None) if part is None else part
        packed = b"" if written is None else msgspec.msgpack.encode(written)
        flat = [each for pair in (fields or {}).items() for each in pair]
        reply = await self._call(
            "batch_save",
            *(batch_id, token, int(lease_s * 1000), expected or "", status or ""),
            *(number, packed, *flat),
        )
        if reply[0] == b"FENCED":
            raise LeaseLost(batch_id)
        if reply[0] == b"CHANGED":
            raise StatusChanged(reply[1].decode())
        return BatchStatus(reply[1].decode()), reply[2]

    async def parts(self, batch_id: str) -> dict[int, Part]:
        """The parts that are written, by number."""
        with broker_errors(self._client, "HGETALL", record="part of a batch"):
            key = self._keys.of("batch_parts", batch_id)
            raw: Any = await repeated(lambda: self._client.hgetall(key))
            return {
                int(number): msgspec.msgpack.decode(part, type=Part) for number, part in raw.items()
            }

    async def job_states(self, job_ids: Sequence[str]) -> list[str | None]:
        """The states of jobs in one round trip; None for one that does not exist."""
        with broker_errors(self._client, "HGET", record="state of a job"):
            async with self._client.pipeline(transaction=False) as pipeline:
                for job_id in job_ids:
                    pipeline.hget(self._keys.of("job", job_id), "state")
                states: Any = await pipeline.execute()
            return [None if state is None else state.decode() for state in states]


def _readable(batch_ids: Sequence[str], replies: Sequence[Any]) -> list[Batch]:
    """The batches of a pipeline's replies; each may be an error."""
    found = []
    for batch_id, reply in zip(batch_ids, replies, strict=True):
        with contextlib.suppress(WireError), wire_errors("batch"):
            if isinstance(reply, Exception):
                raise reply
            found.append(_record(batch_id, reply))
    return [batch for batch in found if batch is not None]


_PACKED = (b"asked", b"errors")


def _record(batch_id: str, raw: Any) -> Batch | None:
    if not raw:
        return None
    fields = {
        name.decode(): msgspec.msgpack.decode(value) if name in _PACKED else value.decode()
        for name, value in raw.items()
        if name != b"callback"
    }
    return msgspec.convert({**fields, "id": batch_id}, Batch, strict=False)
