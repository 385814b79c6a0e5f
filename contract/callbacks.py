"""The callbacks of jobs: targets, kinds of messages, states, and the secrets that sign them, as
Standard Webhooks writes them. Secrets are never shown and never logged.

workers/callbacks sends the messages; callback_urls.py decides which addresses are allowed.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase

import msgspec

from contract.jobs import TERMINAL_STATUSES

SECRET_PREFIX = "whsec_"  # noqa: S105 - the prefix of all secrets
_SECRET_BYTES = range(24, 65)


class CallbackKind(StrEnum):
    """The kind of a target: a URL or an AWS resource."""

    URL = "url"
    SQS = "sqs"  # the URL of a queue
    SNS = "sns"  # the ARN of a topic
    EVENTBRIDGE = "eventbridge"  # the name or ARN of a bus
    LAMBDA = "lambda"  # the name or ARN of a function
    S3 = "s3"  # <bucket>/<prefix of keys>


class MessageKind(StrEnum):
    """The event that a message reports. The last four are the terminal statuses."""

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
        """The `type` field of the message."""
        return f"job.{self.value}"


class OutboxState(StrEnum):
    """The state of an outbox record."""

    DUE = "due"  # waits for its next attempt
    TAKEN = "taken"  # an attempt is under way
    IDLE = "idle"  # a start or progress message was sent; the job runs
    DELIVERED = "delivered"
    DEAD = "dead"  # given up; may be replayed


class Callback(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A callback as its caller requested it. `secret` is never logged or shown."""

    kind: CallbackKind
    target: str
    secret: str | None = None
    is_full: bool = False  # the message contains the output, not only its URL
    notifies_start: bool = False
    progress_tokens: int = 0  # output tokens between progress messages; 0: none
    traceparent: str = ""  # of the request that asked for it; '': not traced

    def __repr__(self) -> str:
        return f"Callback({self.kind}, secret={'set' if self.secret else 'none'})"

    def destination(self, tenant: str) -> str:
        """An id of the server, queue or bucket to which this tenant's messages are sent in turn."""
        server = self.target
        if self.kind is CallbackKind.URL:
            server = "/".join(self.target.split("/", 3)[:3]).lower()
        elif self.kind is CallbackKind.S3:
            server = self.target.partition("/")[0]
        return hashlib.sha256(f"{tenant}\n{self.kind}\n{server}".encode()).hexdigest()[:16]


def is_open_target(callback: Callback, patterns: Sequence[str]) -> bool:
    """Whether the operator allows this AWS target, which callbacks reach with its rights.

    A pattern is `<kind>:<target>`, with `*` and `?` as in file names.
    """
    return any(fnmatchcase(f"{callback.kind}:{callback.target}", pattern) for pattern in patterns)


def is_secret(text: str) -> bool:
    """Whether a text is a signing secret as Standard Webhooks writes them."""
    if not text.startswith(SECRET_PREFIX):
        return False
    try:
        return len(base64.b64decode(text[len(SECRET_PREFIX) :], validate=True)) in _SECRET_BYTES
    except ValueError:  # of base64, or of what is not ASCII
        return False


@dataclass(frozen=True, slots=True)
class Secrets:
    """Signing secrets by tenant, "" for all others, for jobs without a secret of their own.

    Each of several secrets signs, so that a receiver can replace one by the next.
    """

    by_tenant: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, text: str) -> "Secrets":
        """Reads `whsec_new,whsec_old tenant=whsec_other`. Raises ValueError without secrets."""
        found: dict[str, tuple[str, ...]] = {}
        for entry in text.split():
            tenant, listed = "", entry
            if not entry.startswith(SECRET_PREFIX):
                tenant, _, listed = entry.partition("=")
            secrets = tuple(listed.split(","))
            if not all(is_secret(secret) for secret in secrets):
                whose = f"of tenant {tenant!r}" if tenant else "for all tenants"
                raise ValueError(
                    f"a secret {whose} is not `{SECRET_PREFIX}` and 24 to 64 bytes in base64"
                )
            found[tenant] = secrets
        return cls(found)

    def signing(self, callback: Callback, tenant: str) -> tuple[str, ...]:
        """What signs the messages of a tenant's callback: its own secret, else those of the
        installation. Malformed ones are left out, because an empty key would sign, too."""
        known = self.by_tenant.get(tenant) or self.by_tenant.get("", ())
        return tuple(filter(is_secret, known if callback.secret is None else (callback.secret,)))
