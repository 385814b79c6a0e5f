"""Poison jobs, on which engines died: lists them and submits them again.

A requeued job is a new job with the content of the old record. Its id is derived from the old one,
so that a repeated requeue finds the existing job.
"""

import contextlib
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import msgspec

from contract.codec import decode_job, decode_metadata
from contract.connection import broker_errors
from contract.errors import BatchwayError, WireError, wire_errors
from contract.function_types import Submission, Submitted
from contract.functions import Functions

LEAST_RETENTION_S = 86_400.0  # of the new job, so that its result can be read
_FIELDS = (
    "job", "lane", "max_tokens", "created", "deadline", "ttl_ms", "max_attempts", "metadata"
)  # fmt: skip


class NotInQuarantine(BatchwayError):
    """No such record: the id is wrong, or a thousand later ones have replaced it."""


class CannotRequeue(BatchwayError):
    """The job cannot be requeued from its record. The message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class PoisonRecord:
    """A poison job: sizes and hashes, never text."""

    job_id: str
    since_ms: int  # Unix, of the clock of Redis
    about: dict[str, Any]
    is_readable: bool  # the job's record still exists, so it can be requeued
    requeued_as: str | None


class Quarantine(Functions):
    """The poison jobs of one partition. Every method raises BrokerUnavailable, WireError."""

    async def list(self) -> list[PoisonRecord]:
        """All records, latest first."""
        with wire_errors("quarantine"), broker_errors(self._client, "ZREVRANGE"):
            rows: Any = await self._client.zrevrange(
                self._keys.of("quarantine"), 0, -1, withscores=True
            )
        found = [(raw_id.decode(errors="replace"), int(since_ms)) for raw_id, since_ms in rows]
        return [await self._record(job_id, since_ms) for job_id, since_ms in found]

    async def find(self, job_id: str) -> PoisonRecord:
        """Returns a record. Raises NotInQuarantine."""
        with broker_errors(self._client, "ZSCORE"):
            since_ms = await self._client.zscore(self._keys.of("quarantine"), job_id)
        if since_ms is None:
            raise NotInQuarantine(f"there is no {job_id!r} in the quarantine")
        return await self._record(job_id, int(since_ms))

    async def requeue(self, job_id: str, deadline_s: float | None = None) -> Submitted:
        """Submits the job again; `is_new` is False where it was requeued before.

        The deadline's length stays the same unless `deadline_s` is given. Raises NotInQuarantine,
        CannotRequeue, JobRefused, BrokerFull, WireError.
        """
        await self.find(job_id)
        with wire_errors("job record"), broker_errors(self._client, "HMGET"):
            values: Any = await self._client.hmget(self._keys.of("job", job_id), _FIELDS)
        raw = dict(zip(_FIELDS, values, strict=True))
        if raw["job"] is None:
            raise CannotRequeue(
                f"the record and prompt of {job_id} have expired: submit the job anew"
            )
        job = decode_job(raw["job"])
        if job.has_objects:
            raise CannotRequeue(
                f"the prompt of {job_id} is in an object store and expires: submit the job anew"
            )
        with wire_errors("job record"):
            given_s = (int(raw["deadline"]) - int(raw["created"])) / 1000
            again = msgspec.structs.replace(job, id=requeued_id(job_id), lane=raw["lane"].decode())
            terms = Submission(
                max_output_tokens=int(raw["max_tokens"]),
                deadline_s=given_s if deadline_s is None else deadline_s,
                retention_s=max(LEAST_RETENTION_S, int(raw["ttl_ms"]) / 1000),
                max_attempts=int(raw["max_attempts"]),
                metadata=decode_metadata(raw["metadata"]) if raw["metadata"] else {},
            )
        return await self.submit(again, terms)

    async def _record(self, job_id: str, since_ms: int) -> PoisonRecord:
        again = requeued_id(job_id)
        with wire_errors("record of a poison job"), broker_errors(self._client, "HGET or EXISTS"):
            raw: Any = await self._client.hget(self._keys.of("poison"), job_id)
            is_readable = bool(await self._client.exists(self._keys.of("job", job_id)))
            was_requeued = bool(await self._client.exists(self._keys.of("job", again)))
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
    """The id of the requeued job: unique for each poison job, in the same partition."""
    head, _, _ = job_id.rpartition("-")
    digest = hashlib.sha256(f"{job_id} again".encode()).hexdigest()
    return f"{head}-{digest[:32]}"
