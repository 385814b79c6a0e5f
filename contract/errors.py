"""Errors between gateway, broker and worker, independent of HTTP.

BatchwayError
├── BrokerUnavailable   Redis does not answer or cannot take writes now
│   ├── BrokerUnfit     the configuration of Redis would lose jobs
│   ├── BrokerReplica   the server is a replica and takes no writes
│   └── BrokerFull      the memory or disk of Redis is full; has an ErrorCode
├── CommandDenied       the access rules of Redis deny a command; a retry does not help
├── WireError           a record in Redis that cannot be decoded
└── JobRefused          a job that is not accepted; has an ErrorCode
"""

from enum import StrEnum

import msgspec


class ErrorCode(StrEnum):
    """Why a job was refused or failed. The API shows the codes of refusals."""

    # refused at submission
    LANE_FULL = "lane_full"
    LANE_PAUSED = "lane_paused"
    NO_WORKERS = "no_workers"
    MODEL_FAILED = "model_failed"
    TENANT_QUOTA = "tenant_quota"
    DEADLINE_INFEASIBLE = "deadline_infeasible"
    UNKNOWN_LANE = "unknown_lane"
    IDEMPOTENCY_MISMATCH = "idempotency_mismatch"
    STORAGE_FULL = "storage_full"
    MEMORY_FULL = "memory_full"
    DISK_FULL = "disk_full"
    # failed after it was accepted
    PROMPT_TOO_LONG = "prompt_too_long"
    BAD_PARAMETER = "bad_parameter"
    ENGINE_ERROR = "engine_error"
    DEADLINE = "deadline"
    RETRIES = "retries"
    POISON = "poison"
    PAYLOAD_LOST = "payload_lost"
    PAYLOAD_UNAVAILABLE = "payload_unavailable"


class BatchwayError(Exception):
    """Base class of batchway's errors."""


class BrokerUnavailable(BatchwayError):
    """Redis does not answer, is loading, is full or is read-only: try again later."""


class BrokerUnfit(BrokerUnavailable):
    """Redis is configured so that it would lose jobs. The message says how, and what to set."""


class LibraryMissing(BrokerUnavailable):
    """The server that holds the partition does not hold the function library."""


class BrokerReplica(BrokerUnavailable):
    """The server can be read, but takes no writes: another one may have become the primary."""


class BrokerFull(BrokerUnavailable):
    """Redis answers and can be read, but takes no more jobs: try again later."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class CommandDenied(BatchwayError):
    """The access rules of Redis deny a command to the user of this process. Not a
    BrokerUnavailable, because retries do not help. The message names the user and the command.
    """


class WireError(BatchwayError):
    """A record in Redis that cannot be decoded. The message does not quote it."""


class RateLimit(msgspec.Struct, frozen=True):
    """A limit per minute: what is left of it, and the seconds until all of it is available."""

    limit: int
    remaining: int
    reset_s: float


class RateLimits(msgspec.Struct, frozen=True):
    """A tenant's limits per minute after a call; None where it has no such limit."""

    requests: RateLimit | None = None
    tokens: RateLimit | None = None


class JobRefused(BatchwayError):
    """The broker or the engine refused the job.

    `limit` names the limit exceeded. `retry_after_s`: seconds until a retry may succeed, computed
    from measured rates without jitter; None where unknown or never.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        limit: str = "",
        retry_after_s: float | None = None,
        rates: RateLimits | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.limit = limit
        self.retry_after_s = retry_after_s
        self.rates = rates
