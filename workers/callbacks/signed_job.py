"""RQ jobs that can only attempt delivery of the outbox record they name.

RQ imports and calls the function named in a job's record, so whoever can write to Redis could run
code, even with the JSON serializer. These jobs import nothing: their function name is compared with
the only allowed one, their arguments carry an HMAC under a key that is not in Redis, and RQ's other
ways to run code or send requests are disabled.
"""

import hashlib
import hmac
from typing import Any

from contract.outbox import Taken
from workers.callbacks.rq_compat import FAILURE_TTL_S, JobWithoutCode

FUNCTION = "workers.callbacks.deliver"  # a name to compare with; the function does not exist
_TTL_S = 60  # of an RQ job; after that the outbox has made another attempt


class ForgedJob(Exception):
    """An RQ job that no relay of this namespace created. The message quotes no part of the job."""


class SignedJob(JobWithoutCode):
    """An RQ job that requests one delivery attempt."""

    @property
    def func(self) -> None:
        """RQ would import it by name."""
        raise ForgedJob("functions of RQ jobs are not imported")

    def taken(self, key: bytes) -> Taken:
        """The attempt that the job requests. Raises ForgedJob."""
        try:
            function, instance, args, kwargs = self.serializer.loads(self.data)
            job_id, attempt, mac = args
        except (ValueError, TypeError, AttributeError) as exc:
            raise ForgedJob("its data does not have the expected form") from exc
        if function != FUNCTION or instance is not None or kwargs != {}:
            raise ForgedJob("it names another function")
        if not (isinstance(job_id, str) and type(attempt) is int and isinstance(mac, str)):
            raise ForgedJob("its arguments do not have the expected types")
        taken = Taken(job_id, attempt)
        is_authentic = hmac.compare_digest(mac.encode(), _mac(key, taken).encode())
        if not is_authentic or self.id != rq_job_id(taken):
            raise ForgedJob("its signature is wrong")
        return taken


def rq_job_id(taken: Taken) -> str:
    """One id per attempt: RQ accepts an id once while its record exists."""
    return f"cb-{taken.job_id}-{taken.attempt}"


def signed_job(taken: Taken, key: bytes, connection: Any, serializer: Any) -> SignedJob:
    """Creates the RQ job of an attempt. It contains the job's id and the attempt's number only."""
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
    """Derives the signing key of a namespace, so that its signatures are valid nowhere else."""
    return hmac.digest(key.encode(), f"batchway callbacks {namespace}".encode(), hashlib.sha256)


def _mac(key: bytes, taken: Taken) -> str:
    text = f"{FUNCTION}\n{taken.job_id}\n{taken.attempt}".encode()
    return hmac.digest(key, text, hashlib.sha256).hex()
