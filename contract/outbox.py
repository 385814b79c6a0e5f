"""A typed call for each Redis Function of the outbox, which holds the messages of callbacks.

Transitions of jobs post messages (`outbox.post` in lua/_outbox.lua); workers/callbacks delivers
them.
"""

import contextlib
from enum import StrEnum
from typing import Any, Literal

import msgspec
import redis.asyncio

from contract.callbacks import Callback, MessageKind, OutboxState
from contract.codec import decode_callback, wire_errors
from contract.connection import broker_errors
from contract.errors import WireError
from contract.keys import Keys
from contract.library import Partition


class Taken(msgspec.Struct, frozen=True):
    """A message that a relay has leased; `attempt` is its fencing token."""

    job_id: str
    attempt: int


class OutboxRecord(msgspec.Struct, frozen=True):
    """The message for a job's caller and the state of its delivery. Times in ms of the Redis clock.

    Fields are those of the record in Redis, under their `name` where one is given.
    """

    job_id: str
    tenant: str
    model: str
    lane: str
    kind: MessageKind
    code: str
    message: str
    state: OutboxState
    note: str  # outcome of the last attempt
    number: int = 0  # of the job's messages: part of the message's id
    at_ms: int = msgspec.field(default=0, name="at")  # time of the event
    created_ms: int = msgspec.field(default=0, name="created")  # when the job was submitted
    num_prompt_tokens: int = msgspec.field(default=0, name="prompt_tokens")
    num_output_tokens: int = msgspec.field(default=0, name="tokens")
    num_cached_tokens: int = msgspec.field(default=0, name="cached")
    attempt: int = 0
    failures: int = 0  # failed attempts of this message
    callback: Callback | None = None  # None once it is delivered

    @property
    def message_id(self) -> str:
        """The message's id, the same on every attempt."""
        return f"{self.job_id}-{self.number}"


class DeadLetter(msgspec.Struct, frozen=True):
    """A message whose delivery was given up; `died_ms` is the time by the Redis clock."""

    record: OutboxRecord
    died_ms: int


class DoneVerdict(StrEnum):
    """The reply to the report of an attempt's outcome."""

    OK = "OK"
    SUPERSEDED = "SUPERSEDED"
    FENCED = "FENCED"
    GONE = "GONE"


Outcome = Literal["delivered", "retry", "dead"]


class Outbox(Partition):
    """The outbox of one partition. Every call may be repeated, and raises BrokerUnavailable,
    CommandDenied, and WireError where a record is not as this version writes it.
    """

    async def take(self, *, lease_s: float, max_messages: int, max_per_target: int) -> list[Taken]:
        """Leases due messages."""
        reply = await self._call("outbox_take", int(lease_s * 1000), max_messages, max_per_target)
        return [Taken(job_id.decode(errors="replace"), attempt) for job_id, attempt in reply]

    async def start(self, taken: Taken, *, lease_s: float) -> OutboxRecord | None:
        """Begins an attempt and renews its lease; returns None if another relay has taken it.

        Raises WireError.
        """
        reply = await self._call(
            "outbox_start", taken.job_id, taken.attempt, int(lease_s * 1000), "begin"
        )
        return _record(taken.job_id, reply[1]) if reply[0] == b"OK" else None

    async def renew(self, taken: Taken, *, lease_s: float) -> bool:
        """Renews the lease of an attempt; False where another relay has taken it."""
        reply = await self._call(
            "outbox_start", taken.job_id, taken.attempt, int(lease_s * 1000), "renew"
        )
        return bool(reply[0] == b"OK")

    async def done(
        self, taken: Taken, outcome: Outcome, *, delay_s: float = 0.0, note: str = ""
    ) -> DoneVerdict:
        """Reports an attempt's outcome; a retry is due after `delay_s`."""
        reply = await self._call(
            "outbox_done", taken.job_id, taken.attempt, outcome, int(delay_s * 1000), note
        )
        return DoneVerdict(reply[0].decode())

    async def dead(
        self, tenant: str, *, job_id: str = "", limit: int = 100, before_ms: int | None = None
    ) -> list[DeadLetter]:
        """A tenant's dead letters, youngest first, or that of one job. Omits unreadable records."""
        before = "" if before_ms is None else before_ms
        reply = await self._call("outbox_dead", tenant, job_id, limit, before, reads=True)
        letters = []
        for raw_id, died_ms, flat in reply:
            with contextlib.suppress(WireError):
                record = _record(raw_id.decode(errors="replace"), flat)
                letters.append(DeadLetter(record, died_ms))
        return letters

    async def replay(self, job_id: str, tenant: str) -> OutboxState | None:
        """Schedules a dead letter again. The record's state; None if the tenant has none."""
        reply = await self._call("outbox_replay", job_id, tenant)
        if reply == [b"NOT_FOUND"]:
            return None
        return OutboxState.DUE if reply == [b"OK"] else OutboxState(reply[0].decode())


def _record(job_id: str, flat: list[bytes]) -> OutboxRecord:
    """Decodes a record. Raises WireError."""
    with wire_errors("record of the outbox"):
        raw = dict(zip(flat[::2], flat[1::2], strict=True))
        callback = raw.pop(b"callback", None)
        fields = {name.decode(): value.decode() for name, value in raw.items()}
        record = msgspec.convert(fields | {"job_id": job_id}, OutboxRecord, strict=False)
        return msgspec.structs.replace(
            record, callback=None if callback is None else decode_callback(callback)
        )


_SHOWN = {OutboxState.DELIVERED: "delivered", OutboxState.DEAD: "given_up"}


class CallbackState(msgspec.Struct, frozen=True):
    """The state of a job's callback for its caller, without target and secret.

    `state` is `pending`, `delivered` or `given_up`. `next_attempt_ms`, by the Redis clock, is None
    during an attempt and before the first message.
    """

    state: str
    num_attempts: int
    next_attempt_ms: int | None


async def callback_state(
    client: redis.asyncio.Redis, keys: Keys, job_id: str, tenant: str
) -> CallbackState | None:
    """Returns the state of a job's callback; None if the tenant's job has no callback.

    Raises BrokerUnavailable, WireError.
    """
    with broker_errors(client, "HMGET", record="record of the outbox"):
        job: Any = await client.hmget(keys.of("job", job_id), ["tenant", "callback_to"])
        record: Any = await client.hmget(
            keys.of("out", job_id), ["tenant", "state", "attempt", "to"]
        )
        if record[0] is None:
            has_one = job[0] == tenant.encode() and job[1]
            return CallbackState("pending", 0, None) if has_one else None
        if record[0] != tenant.encode():
            return None
        due: Any = None
        if record[1] == b"due" and record[3]:
            due = await client.zscore(keys.of("due", record[3].decode()), job_id)
        state = OutboxState(record[1].decode())
        return CallbackState(
            _SHOWN.get(state, "pending"), int(record[2] or 0), None if due is None else int(due)
        )
