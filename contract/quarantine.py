"""Jobs that killed engines: what is on record of them, and how one is run again.

A terminal job stays as it is. To run one again is to submit a new job with the content of the old
one's record, under an id that follows from the old one's: so a repeat finds the job that is there.
"""

import contextlib
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import msgspec
import redis.asyncio

from contract.codec import decode_job, decode_metadata
from contract.connection import broker_errors
from contract.errors import BatchwayError, WireError, wire_errors
from contract.function_types import Submission, Submitted
from contract.functions import Functions
from contract.keys import Keys

LEAST_RETENTION_S = 86_400.0  # of the new job: whoever asked for it comes back for the result
_FIELDS = (
    "job", "lane", "max_tokens", "created", "deadline", "ttl_ms", "max_attempts", "metadata"
)  # fmt: skip


class NotInQuarantine(BatchwayError):
    """No such record: the id is wrong, or a thousand others came after it."""


class CannotRequeue(BatchwayError):
    """The job cannot be run again from its record. The message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class PoisonRecord:
    """What is kept of a poison job: sizes and hashes, never text."""

    job_id: str
    since_ms: int  # Unix, of the clock of Redis
    about: dict[str, Any]
    is_readable: bool  # the job's own record is still kept, so it can be run again
    requeued_as: str | None


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The poison jobs of one partition. Every method raises BrokerUnavailable, WireError."""

    client: redis.asyncio.Redis
    keys: Keys

    async def list(self) -> list[PoisonRecord]:
        """All on record, the latest first."""
        with wire_errors("quarantine"), broker_errors(self.client, "ZREVRANGE"):
            rows: Any = await self.client.zrevrange(self.keys.quarantine, 0, -1, withscores=True)
        found = [(raw_id.decode(errors="replace"), int(since_ms)) for raw_id, since_ms in rows]
        return [await self._record(job_id, since_ms) for job_id, since_ms in found]

    async def find(self, job_id: str) -> PoisonRecord:
        """Raises NotInQuarantine."""
        with broker_errors(self.client, "ZSCORE"):
            since_ms = await self.client.zscore(self.keys.quarantine, job_id)
        if since_ms is None:
            raise NotInQuarantine(f"there is no {job_id!r} in the quarantine")
        return await self._record(job_id, int(since_ms))

    async def requeue(self, job_id: str, deadline_s: float | None = None) -> Submitted:
        """Submits the job once more; `is_new` is False where that was done before.

        Its deadline is as long as it was unless another is given. Raises NotInQuarantine,
        CannotRequeue, JobRefused, BrokerFull, WireError.
        """
        await self.find(job_id)
        with wire_errors("job record"), broker_errors(self.client, "HMGET"):
            values: Any = await self.client.hmget(self.keys.job(job_id), _FIELDS)
        raw = dict(zip(_FIELDS, values, strict=True))
        if raw["job"] is None:
            raise CannotRequeue(
                f"the record of {job_id} is no longer kept, its prompt is gone: submit it anew"
            )
        job = decode_job(raw["job"])
        if job.stored_prompt is not None:
            raise CannotRequeue(
                f"the prompt of {job_id} lies in an object store, and goes with it: submit it anew"
            )
        with wire_errors("job record"):
            given_s = (int(raw["deadline"]) - int(raw["created"])) / 1000
            again = msgspec.structs.replace(job, id=requeued_id(job_id), lane=raw["lane"].decode())
            terms = Submission(
                max_output_tokens=int(raw["max_tokens"]),
                deadline_s=given_s if deadline_s is None else deadline_s,
                retention_s=max(LEAST_RETENTION_S, int(raw["ttl_ms"]) / 1000),
                max_attempts=int(raw["max_attempts"]),
                metadata=decode_metadata(raw["metadata"] or b""),
            )
        return await Functions(self.client, self.keys).submit(again, terms)

    async def _record(self, job_id: str, since_ms: int) -> PoisonRecord:
        again = requeued_id(job_id)
        with wire_errors("record of a poison job"), broker_errors(self.client, "HGET or EXISTS"):
            raw: Any = await self.client.hget(self.keys.of("poison"), job_id)
            is_readable = bool(await self.client.exists(self.keys.job(job_id)))
            was_requeued = bool(await self.client.exists(self.keys.job(again)))
        about = {}
        with contextlib.suppress(WireError), wire_errors("record of a poison job"):
            about = dict(json.loads(raw or b"{}"))
        return PoisonRecord(
            job_id,
            since_ms,
            about,
            is_readable,
            again if was_requeued else None,
        )


def requeued_id(job_id: str) -> str:
    """The id under which a poison job is run again: one for each, in the same partition."""
    head, _, _ = job_id.rpartition("-")
    digest = hashlib.sha256(f"{job_id} again".encode()).hexdigest()
    return f"{head}-{digest[:32]}"
