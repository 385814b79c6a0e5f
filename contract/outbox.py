"""One typed call for each Redis Function of the outbox, which holds what callers are to be told.

Records come into it with a job's transitions, see `post` in lua/_shared.lua. What is done to
deliver them is workers/callbacks.
"""

import contextlib
from enum import StrEnum
from typing import Any, Literal

import msgspec
import redis.asyncio

from contract.callbacks import Callback, MessageKind, OutboxState
from contract.codec import decode_callback
from contract.errors import WireError, wire_errors
from contract.keys import Keys
from contract.library import call_function


class Taken(msgspec.Struct, frozen=True):
    """A job whose message a relay has taken; `attempt` fences what is said of it."""

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
    attempt: int = 0
    failures: int = 0  # failed attempts of this message
    callback: Callback | None = None  # None once it is delivered

    @property
    def message_id(self) -> str:
        """The same on every attempt."""
        return f"{self.job_id}-{self.number}"


class DeadLetter(msgspec.Struct, frozen=True):
    """A message that was given up, and when (ms of Redis)."""

    record: OutboxRecord
    died_ms: int


class DoneVerdict(StrEnum):
    """What became of the news that an attempt has ended."""

    OK = "OK"
    SUPERSEDED = "SUPERSEDED"
    FENCED = "FENCED"
    GONE = "GONE"


Outcome = Literal["delivered", "retry", "dead"]


class Outbox:
    """The outbox of one partition. Every call may be repeated, and raises BrokerUnavailable,
    CommandDenied, and WireError where a record is not as this version writes it.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def _call(self, name: str, *args: str | int, reads: bool = False) -> Any:
        tag = self._keys.tag
        return await call_function(self._client, tag, f"outbox_{name}", *args, reads=reads)

    async def take(self, *, lease_s: float, max_messages: int, max_per_target: int) -> list[Taken]:
        """Takes what is due, for as long as the lease."""
        reply = await self._call("take", int(lease_s * 1000), max_messages, max_per_target)
        return [Taken(job_id.decode(errors="replace"), attempt) for job_id, attempt in reply]

    async def start(self, taken: Taken, *, lease_s: float) -> OutboxRecord | None:
        """Begins the attempt and renews its lease; None where it is another's by now.

        Raises WireError.
        """
        reply = await self._call("start", *_of(taken), int(lease_s * 1000), "begin")
        return _record(taken.job_id, reply[1]) if reply[0] == b"OK" else None

    async def renew(self, taken: Taken, *, lease_s: float) -> bool:
        """Renews the lease of an attempt that goes on; False where it is another's by now."""
        reply = await self._call("start", *_of(taken), int(lease_s * 1000), "renew")
        return bool(reply[0] == b"OK")

    async def done(
        self, taken: Taken, outcome: Outcome, *, delay_s: float = 0.0, note: str = ""
    ) -> DoneVerdict:
        """Says how an attempt ended; after `delay_s` the next is due where it is to be retried."""
        reply = await self._call("done", *_of(taken), outcome, int(delay_s * 1000), note)
        return DoneVerdict(reply[0].decode())

    async def dead(
        self, tenant: str, *, job_id: str = "", limit: int = 100, before_ms: int | None = None
    ) -> list[DeadLetter]:
        """A tenant's dead letters, the youngest first, or that of one job; without those whose
        record cannot be read.
        """
        before = "" if before_ms is None else before_ms
        reply = await self._call("dead", tenant, job_id, limit, before, reads=True)
        letters = []
        for raw_id, died_ms, flat in reply:
            with contextlib.suppress(WireError):
                record = _record(raw_id.decode(errors="replace"), flat)
                letters.append(DeadLetter(record, died_ms))
        return letters

    async def replay(self, job_id: str, tenant: str) -> OutboxState | None:
        """Tries a dead letter again; the record's state, None where the tenant has none."""
        reply = await self._call("replay", job_id, tenant)
        match reply:
            case [b"NOT_FOUND"]:
                return None
            case [b"OK"]:
                return OutboxState.DUE
        return OutboxState(reply[0].decode())


def _of(taken: Taken) -> tuple[str, int]:
    return taken.job_id, taken.attempt


def _record(job_id: str, flat: list[bytes]) -> OutboxRecord:
    """Raises WireError."""
    with wire_errors("record of the outbox"):
        raw = dict(zip(flat[::2], flat[1::2], strict=True))
        callback = raw.pop(b"callback", None)
        fields = {name.decode(): value.decode() for name, value in raw.items()}
        record = msgspec.convert(fields | {"job_id": job_id}, OutboxRecord, strict=False)
        return msgspec.structs.replace(
            record, callback=None if callback is None else decode_callback(callback)
        )
