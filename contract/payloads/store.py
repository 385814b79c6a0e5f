"""What an object store must do, and what goes wrong with one. Knows neither S3 nor file systems.

PayloadError
├── PayloadUnavailable   the store does not answer, or refuses: try again later
└── PayloadLost          the object is gone, or is not what was written: it will not come back

Objects are written once, under a job's id: `<job id>/prompt` before the job is submitted,
`<job id>/result-<epoch>` before its end. Nobody looks for objects: what points to one is a part of
the job's record, which only a fenced transition writes, so that what a stale worker has written is
never read.
"""

import hashlib
import re
from typing import Protocol

from contract.errors import BatchwayError
from contract.jobs import ObjectRef

# The longest a job may wait and be kept: objects older than this belong to nobody.
MAX_AGE_S = 38 * 86_400.0

_KEY = re.compile(r"job-\d{1,4}-[0-9a-f]{32}/(?:prompt|result-\d{1,9})")


class PayloadError(BatchwayError):
    """An object cannot be read or written."""


class PayloadUnavailable(PayloadError):
    """The store does not answer, or refuses us."""


class PayloadLost(PayloadError):
    """The object is not there, or not as it was written."""


class ObjectStore(Protocol):
    """Blocking calls, to be made from a thread. Each raises PayloadUnavailable."""

    def put(self, key: str, data: bytes) -> ObjectRef:
        """Writes an object whole or not at all; a reader of the reference can tell."""

    def get(self, ref: ObjectRef) -> bytes:
        """Raises PayloadLost, also where the bytes are not those that were written."""

    def delete_job(self, job_id: str) -> None:
        """Deletes all objects of a job; there may be none."""

    def delete_older(self, age_s: float) -> int:
        """Deletes objects of jobs that were written so long ago; how many jobs had some. A store
        that does so by itself deletes nothing here."""

    def url(self, ref: ObjectRef, ttl_s: float) -> str:
        """A URL that reads the object for so long without any key; from a directory, the path and
        query below the gateway's own address."""


def prompt_key(job_id: str) -> str:
    return f"{job_id}/prompt"


def result_key(job_id: str, epoch: int) -> str:
    return f"{job_id}/result-{epoch}"


def is_key(key: str) -> bool:
    """Whether this is a key that batchway gives out."""
    return _KEY.fullmatch(key) is not None


def reference(store: str, key: str, data: bytes) -> ObjectRef:
    assert is_key(key), key
    return ObjectRef(store, key, hashlib.sha256(data).hexdigest(), len(data))


def check_place(store: str, ref: ObjectRef) -> None:
    """Raises PayloadLost where a reference is of another store, or no key of ours."""
    if ref.store != store:
        raise PayloadLost(f"the object lies in another store than ours: {ref.store}, not {store}")
    if not is_key(ref.key):
        raise PayloadLost("the reference names no object of batchway's")


def checked(ref: ObjectRef, data: bytes) -> bytes:
    """The data. Raises PayloadLost where they are not what the reference says."""
    if len(data) != ref.num_bytes or hashlib.sha256(data).hexdigest() != ref.sha256:
        raise PayloadLost(f"object {ref.key} is damaged: its hash is not the one on record")
    return data
