"""Names that say which partition holds a thing: keys and channels in Redis; ids of jobs, files,
uploads, batches and operations.

All keys of a partition share one hash tag: they live in one slot of a cluster, so that one function
may use all of them. The Lua functions derive the same keys from `tag`. docs/protocol.md lists all
keys and what each holds.
"""

import re
import secrets

import msgspec

# job-0-<hex>, response ids alike; other ids name a partition only where it is not 0.
_ID = re.compile(r"([a-z]+[-_])(?:([0-9]{1,4})-)?([0-9a-f]{32})")


class Keys(msgspec.Struct, frozen=True):
    """Names under `{bw:<namespace>:<partition>}`."""

    namespace: str = "default"
    partition: int = 0
    tag: str = ""  # follows from them

    def __post_init__(self) -> None:
        if not self.namespace or set(self.namespace) & set("{}:* \n"):
            raise ValueError(
                f"namespace {self.namespace!r} may not be empty or hold any of '{{}}:* '"
            )
        tag = f"{{bw:{self.namespace}:{self.partition}}}"
        msgspec.structs.force_setattr(self, "tag", tag)

    def of(self, *parts: str) -> str:
        """The key whose name behind the tag consists of these parts."""
        return ":".join((self.tag, *parts))


def new_id(kind: str, partition: int = 0) -> str:
    """An id that names its partition; `kind`: `job-`, `file-`, `batch_`, ….  128 random bits."""
    return _named(kind, partition, secrets.token_hex(16))


def new_job_id(partition: int = 0) -> str:
    return new_id("job-", partition)


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
