"""The interface and the errors of object stores.

PayloadError
├── PayloadUnavailable   the store does not answer or refuses: a retry may succeed
└── PayloadLost          the object is missing or damaged: a retry does not help

Objects are written once, under a job's id: `<job id>/prompt`, `<job id>/response` and
`<job id>/image-<number>` before the job is submitted, `<job id>/result-<epoch>` before its end.
Readers find objects only through the job's record, which only fenced transitions write, so that an
object of a stale worker is never read. Files and the parts of a batch's results lie under their own
ids; their records name them. Parts of an upload are found under its id.
"""

import hashlib
import io
import re
from abc import ABC, abstractmethod
from typing import BinaryIO

from contract.errors import BatchwayError
from contract.jobs import ObjectRef

# The longest time that a job may wait and be kept; older objects belong to no job.
MAX_AGE_S = 38 * 86_400.0

_KEY = re.compile(
    r"job-\d{1,4}-[0-9a-f]{32}/(?:prompt|response|image-\d{1,3}|result-\d{1,9})"
    r"|file-(?:\d{1,4}-)?[0-9a-f]{32}/content"
    r"|upload_(?:\d{1,4}-)?[0-9a-f]{32}/part_[0-9a-f]{32}"
    r"|batch_(?:\d{1,4}-)?[0-9a-f]{32}/(?:output|error)-\d{1,9}-[0-9a-f]{16}"
)


class PayloadError(BatchwayError):
    """An object cannot be read or written."""


class PayloadUnavailable(PayloadError):
    """The store does not answer or refuses."""


class PayloadLost(PayloadError):
    """The object is missing or damaged."""


class ObjectStore(ABC):
    """Blocking calls, for use in a thread. Each raises PayloadUnavailable."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the store, by which references are compared."""

    def put(self, key: str, data: bytes) -> ObjectRef:
        """Writes an object atomically; returns its reference."""
        self.write(key, io.BytesIO(data))
        return ObjectRef(self.name, key, hashlib.sha256(data).hexdigest(), len(data))

    def get(self, ref: ObjectRef) -> bytes:
        """The object's bytes. Raises PayloadLost where it is missing, damaged or in another
        store."""
        if ref.store != self.name:
            raise PayloadLost(f"the object is in another store: {ref.store}, not {self.name}")
        if not is_key(ref.key):
            raise PayloadLost("the reference has an invalid key")
        data = self.read(ref.key, 0, ref.num_bytes + 1)
        if len(data) != ref.num_bytes or hashlib.sha256(data).hexdigest() != ref.sha256:
            raise PayloadLost(f"object {ref.key} is damaged: its size or hash differs")
        return data

    @abstractmethod
    def write(self, key: str, content: BinaryIO) -> None:
        """Writes an object atomically, reading the content to its end in pieces."""

    @abstractmethod
    def read(self, key: str, start: int, num_bytes: int) -> bytes:
        """Bytes of an object, fewer at its end. Raises PayloadLost where it is missing."""

    @abstractmethod
    def sizes(self, job_id: str) -> dict[str, int]:
        """The bytes of a job's or upload's objects by their names, of some thousand at most."""

    @abstractmethod
    def delete_job(self, job_id: str) -> None:
        """Deletes all objects of a job, file or batch, if any."""

    @abstractmethod
    def delete_older(self, age_s: float) -> int:
        """Deletes objects older than `age_s` seconds; the number of their jobs. Does nothing where
        the store expires objects itself."""

    @abstractmethod
    def url(self, ref: ObjectRef, ttl_s: float) -> str:
        """A URL that reads the object without a key for `ttl_s` seconds. For a directory, path and
        query relative to the gateway's address."""

    def download_url(self, key: str, filename: str, ttl_s: float) -> str | None:
        """A URL of the store itself that reads the object, under this name, without a key; None if
        it has none."""
        return None


def prompt_key(job_id: str) -> str:
    return f"{job_id}/prompt"


def response_key(job_id: str) -> str:
    return f"{job_id}/response"


def image_key(job_id: str, number: int) -> str:
    return f"{job_id}/image-{number}"


def result_key(job_id: str, epoch: int) -> str:
    return f"{job_id}/result-{epoch}"


def is_key(key: str) -> bool:
    """Whether batchway makes such keys."""
    return _KEY.fullmatch(key) is not None
