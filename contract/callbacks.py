"""Where and how a job's caller is told of its end. Knows nothing of HTTP or of AWS clients.

What is sent, and how, is in workers/callbacks; which addresses are open to it in addresses.py.
"""

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from fnmatch import fnmatchcase

import msgspec

from contract.jobs import TERMINAL_STATUSES


class CallbackKind(StrEnum):
    """What kind of thing `target` names: a URL, or something in AWS."""

    URL = "url"
    SQS = "sqs"  # the URL of a queue
    SNS = "sns"  # the ARN of a topic
    EVENTBRIDGE = "eventbridge"  # the name or ARN of a bus
    LAMBDA = "lambda"  # the name or ARN of a function
    S3 = "s3"  # <bucket>/<prefix of keys>


class MessageKind(StrEnum):
    """What a message says. The last four are the statuses in which jobs end."""

    STARTED = "started"
    PROGRESS = "progress"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_end(self) -> bool:
        return self.value in TERMINAL_STATUSES

    @property
    def event_type(self) -> str:
        """The `type` of the message that a receiver sees."""
        return f"job.{self.value}"


class OutboxState(StrEnum):
    """Where a record of the outbox stands."""

    DUE = "due"  # waits for its next attempt
    TAKEN = "taken"  # an attempt is under way
    IDLE = "idle"  # told of a start or of progress; the job runs
    DELIVERED = "delivered"
    DEAD = "dead"  # given up; may be replayed


class Callback(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a caller asked for. `secret` signs; it is never logged and never shown again."""

    kind: CallbackKind
    target: str
    secret: str | None = None
    is_full: bool = False  # the output in the message itself, not only where to get it
    tells_start: bool = False
    progress_tokens: int = 0  # tells of progress every so many output tokens; 0: never
    traceparent: str = ""  # of the request that asked for it; '': not traced

    def __repr__(self) -> str:
        return f"Callback({self.kind}, secret={'set' if self.secret else 'none'})"

    def destination(self, tenant: str) -> str:
        """Names what is sent to one after another for this tenant: a server, a queue, a bucket."""
        server = self.target
        if self.kind is CallbackKind.URL:
            server = "/".join(self.target.split("/", 3)[:3]).lower()
        elif self.kind is CallbackKind.S3:
            server = self.target.partition("/")[0]
        return hashlib.sha256(f"{tenant}\n{self.kind}\n{server}".encode()).hexdigest()[:16]


def is_open_target(callback: Callback, patterns: Sequence[str]) -> bool:
    """Whether the operator lets callbacks reach this in AWS, with the operator's own rights.

    A pattern is `<kind>:<target>`, with `*` and `?` as in file names.
    """
    return any(fnmatchcase(f"{callback.kind}:{callback.target}", pattern) for pattern in patterns)
