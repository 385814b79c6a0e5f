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
    """What a job's caller is to be told, and how that went so far. Times in ms of Redis."""

    job_id: str
    tenant: str
    model: str
    lane: str
    kind: MessageKind
    number: int  # of the job's messages: part of the message's id
    at_ms: int  # when it happened
    created_ms: int  # when the job was submitted
    num_prompt_tokens: int
    num_output_tokens: int
    code: str
    message: str
    state: OutboxState
    attempt: int
    failures: int  # of this message: the rung of the ladder it is on
    note: str  # what came of the last attempt
    callback: Callback | None  # None once it is delivered

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
        return _record_of(job_id, flat)


def _record_of(job_id: str, flat: list[bytes]) -> OutboxRecord:
    fields = {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}

    def text(name: str) -> str:
        return fields[name].decode()

    def number(name: str) -> int:
        return int(fields.get(name, b"0"))

    return OutboxRecord(
        job_id=job_id,
        tenant=text("tenant"),
        model=text("model"),
        lane=text("lane"),
        kind=MessageKind(text("kind")),
        number=number("number"),
        at_ms=number("at"),
        created_ms=number("created"),
        num_prompt_tokens=number("prompt_tokens"),
        num_output_tokens=number("tokens"),
        code=text("code"),
        message=text("message"),
        state=OutboxState(text("state")),
        attempt=number("attempt"),
        failures=number("failures"),
        note=text("note"),
        callback=decode_callback(fields["callback"]) if "callback" in fields else None,
    )
