"""RQ jobs that can only attempt delivery of the outbox record they name.

RQ imports and calls the function named in a job's record, so whoever can write to Redis could run
code, even with the JSON serializer. These jobs import nothing: their function name is compared with
the only allowed one, their arguments carry an HMAC under a key that is not in Redis, and RQ's other
ways to run or send something are disabled.
"""

import hashlib
import hmac
from typing import Any

from contract.outbox import Taken
from workers.callbacks.rq_compat import FAILURE_TTL_S, JobWithoutCode

FUNCTION = "workers.callbacks.deliver"  # a name to compare with; the function does not exist
_TTL_S = 60  # of an RQ job; after that the outbox has made another attempt


class ForgedJob(Exception):
    """An RQ job that no relay of ours made. The message quotes nothing of it."""


class SignedJob(JobWithoutCode):
    """An RQ job that asks for one attempt."""

    @property
    def func(self) -> None:
        """RQ would import it by name."""
        raise ForgedJob("nothing is imported")

    def taken(self, key: bytes) -> Taken:
        """The delivery it asks for. Raises ForgedJob."""
        try:
            function, instance, args, kwargs = self.serializer.loads(self.data)
            job_id, attempt, mac = args
        except (ValueError, TypeError, AttributeError) as exc:
            raise ForgedJob("its data is not what we write") from exc
        if function != FUNCTION or instance is not None or kwargs != {}:
            raise ForgedJob("its function is not the one that is allowed")
        if not (isinstance(job_id, str) and type(attempt) is int and isinstance(mac, str)):
            raise ForgedJob("its arguments are not what we write")
        taken = Taken(job_id, attempt)
        is_ours = hmac.compare_digest(mac.encode(), _mac(key, taken).encode())
        if not is_ours or self.id != rq_job_id(taken):
            raise ForgedJob("its signature is not ours")
        return taken


def rq_job_id(taken: Taken) -> str:
    """One id per attempt: RQ accepts an id once while its record exists."""
    return f"cb-{taken.job_id}-{taken.attempt}"


def signed_job(taken: Taken, key: bytes, connection: Any, serializer: Any) -> SignedJob:
    """The RQ job of an attempt; contains only the record's id."""
    job = SignedJob.create(
        FUNCTION,
        args=(taken.job_id, taken.attempt, _mac(key, taken)),
        id=rq_job_id(taken),
        connection=connection,
        serializer=serializer,
        ttl=_TTL_S,
        result_ttl=0,
        failure_ttl=FAILURE_TTL_S,
        description=rq_job_id(taken),
    )
    assert isinstance(job, SignedJob)
    return job


def derived_key(key: str, namespace: str) -> bytes:
    """The key of a namespace; signatures are not valid in another namespace."""
    return hmac.digest(key.encode(), f"batchway callbacks {namespace}".encode(), hashlib.sha256)


def _mac(key: bytes, taken: Taken) -> str:
    text = f"{FUNCTION}\n{taken.job_id}\n{taken.attempt}".encode()
    return hmac.digest(key, text, hashlib.sha256).hex()
