"""An ended job as a new one: its content and terms from its record, under an id that derives from
the old one, so that a repeated replay finds the job that exists."""

import hashlib
from typing import Any

import msgspec
import redis.asyncio

from contract.codec import decode_callback, decode_job, decode_metadata, wire_errors
from contract.connection import broker_errors, repeated
from contract.function_types import Submission
from contract.jobs import Job
from contract.keys import Keys

LEAST_RETENTION_S = 86_400.0  # so that the result can be read
_FIELDS = (
    *("job", "lane", "max_tokens", "created", "deadline"),
    *("ttl_ms", "max_attempts", "metadata", "callback", "batch_price", "cached_price", "priority"),
)


def replayed_id(job_id: str) -> str:
    """The id of the job that replays this one: unique for each job, in the same partition."""
    head, _, _ = job_id.rpartition("-")
    digest = hashlib.sha256(f"{job_id} again".encode()).hexdigest()
    return f"{head}-{digest[:32]}"


async def replay_of(
    client: redis.asyncio.Redis, keys: Keys, job_id: str
) -> tuple[Job, Submission] | None:
    """Returns the job to submit and its terms, with a deadline of the same length; None where the
    record has expired. Its prompt may be an object of the old job. Raises WireError."""
    with broker_errors(client, "HMGET", record="job record"):
        key = keys.of("job", job_id)
        values: Any = await repeated(lambda: client.hmget(key, _FIELDS))
    raw = dict(zip(_FIELDS, values, strict=True))
    if raw["job"] is None:
        return None
    job = decode_job(raw["job"])
    with wire_errors("job record"):
        again = msgspec.structs.replace(job, id=replayed_id(job_id), lane=raw["lane"].decode())
        return again, Submission(
            max_output_tokens=int(raw["max_tokens"]),
            deadline_s=(int(raw["deadline"]) - int(raw["created"])) / 1000,
            retention_s=max(LEAST_RETENTION_S, int(raw["ttl_ms"]) / 1000),
            max_attempts=int(raw["max_attempts"]),
            metadata=decode_metadata(raw["metadata"]) if raw["metadata"] else {},
            callback=decode_callback(raw["callback"]) if raw["callback"] else None,
            batch_price=float(raw["batch_price"] or 1),
            cached_price=float(raw["cached_price"] or 1),
            priority=int(raw["priority"] or 0),
        )
