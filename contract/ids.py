"""Ids of jobs, files, uploads, batches and operations, which name the partition that holds them."""

import re
import secrets

# job-0-<hex>, response ids alike; other ids name a partition only where it is not 0.
_ID = re.compile(r"([a-z]+[-_])(?:([0-9]{1,4})-)?([0-9a-f]{32})")


def new_id(kind: str, partition: int = 0) -> str:
    """An id that names its partition; `kind`: `job-`, `file-`, `batch_`, ….  128 random bits."""
    return _named(kind, partition, secrets.token_hex(16))


def partition_of(object_id: str) -> int:
    """The partition of a job, file, upload, batch or operation; 0 for a text that is no id."""
    found = _ID.fullmatch(object_id)
    return int(found[2] or 0) if found else 0


def in_partition(object_id: str, partition: int) -> str:
    """The id with another partition; unchanged if it is no id."""
    found = _ID.fullmatch(object_id)
    return _named(found[1], partition, found[3]) if found else object_id


def _named(kind: str, partition: int, digits: str) -> str:
    number = f"{partition}-" if partition or kind == "job-" else ""
    return f"{kind}{number}{digits}"
