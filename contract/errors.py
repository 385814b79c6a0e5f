"""What can go wrong between gateway, broker and worker. Knows nothing of HTTP.

BatchwayError
├── BrokerUnavailable   Redis does not answer, or cannot take writes just now
│   ├── BrokerUnfit     it answers; it may not hold jobs, as it is configured
│   └── BrokerFull      it answers; its memory or its disk is full; carries an ErrorCode
├── CommandDenied       its rules deny this part a command: repeats do not help
├── WireError           bytes in Redis that this version cannot read
└── JobRefused          a job that is not accepted; carries an ErrorCode
"""

from enum import StrEnum
from types import TracebackType

import msgspec


class ErrorCode(StrEnum):
    """Why a job was refused or failed. The words of refusals are the API's dropped reasons."""

    # refused at submission
    LANE_FULL = "lane_full"
    NO_WORKERS = "no_workers"
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
    """Root of all errors that batchway raises on purpose."""


class BrokerUnavailable(BatchwayError):
    """Redis does not answer, is loading, is full or is read-only: try again later."""


class BrokerUnfit(BrokerUnavailable):
    """Redis is configured so that it would lose jobs. The message says how, and what to set."""


class BrokerFull(BrokerUnavailable):
    """Redis answers and can be read, but takes no more jobs: try again later."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class CommandDenied(BatchwayError):
    """The access rules of Redis deny its user a command that this part needs. No kind of
    BrokerUnavailable: whoever rides out an absence of Redis must not ride this out. The message
    names the user and the command.
    """


class WireError(BatchwayError):
    """A record in Redis that this version cannot read. The message quotes nothing of it."""


class wire_errors:
    """Turns what a decoder raises for bytes that it cannot read into WireError, and what Redis says
    of a key that holds another type; `what` names the kind of record. The error's cause is dropped,
    since it may quote the bytes.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        is_wrong_type = str(exc).startswith("WRONGTYPE")  # of redis-py, which not all parts have
        if is_wrong_type or isinstance(exc, _UNREADABLE):
            raise WireError(f"unreadable {self._what}: {type(exc).__name__}") from None


# What msgspec, json, int() and bytes.decode() raise are ValueErrors; records that lack a field, or
# have one of another type, give the others.
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)


class RateLimit(msgspec.Struct, frozen=True):
    """A limit per minute: what is left of it, and when all of it will be there again."""

    limit: int
    remaining: int
    reset_s: float


class RateLimits(msgspec.Struct, frozen=True):
    """A tenant's limits per minute as they stand after a call; None: it has no such limit."""

    requests: RateLimit | None = None
    tokens: RateLimit | None = None


class JobRefused(BatchwayError):
    """The broker or the engine did not take the job.

    `limit` names the limit that it met, `retry_after_s` when another try may do: computed from
    measured rates, without jitter, and None where unknown or never. `rates` are RateLimits.
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
