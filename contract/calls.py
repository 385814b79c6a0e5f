"""What the functions are told and what they answer, as types. The calls are in functions.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from contract.events import LogEvent
from contract.jobs import TERMINAL_STATUSES, Job, JobStatus, ObjectRef


class Verdict(StrEnum):
    """What became of one job's part of a worker's call; an ended job answers its status."""

    OK = "OK"
    GAP = "GAP"
    OVER = "OVER"
    FENCED = "FENCED"
    GONE = "GONE"


# What a worker is: it takes jobs, it takes no more, it has left.
WorkerState = Literal["up", "draining", "gone"]


@dataclass(frozen=True, slots=True)
class Submission:
    """What `submit` is told beside the job itself. Tokens, seconds."""

    cost_tokens: int
    max_output_tokens: int
    deadline_s: float
    retention_s: float
    max_attempts: int = 3
    lane_bound_tokens: int = 0  # 0: no bound
    idempotency_key: str = ""
    body_hash: str = ""
    attendance_s: float = 0.0  # without a caller for so long it is cancelled; 0: never
    metadata: Mapping[str, str] = field(default_factory=dict)  # the caller's, to find it by


@dataclass(frozen=True, slots=True)
class Submitted:
    """An accepted job; `is_new` is False where the same call was accepted before."""

    job_id: str
    is_new: bool
    num_jobs_ahead: int = 0
    num_tokens_ahead: int = 0


@dataclass(frozen=True, slots=True)
class Claimed:
    """A job handed to a worker, with its fencing token and where its log ends."""

    job: Job
    epoch: int
    attempt: int
    next_number: int
    hash: str
    num_logged_tokens: int
    deadline_s: float  # from now
    is_alone: bool  # under suspicion: nothing else may run beside it


@dataclass(frozen=True, slots=True)
class Append:
    """One job's part of an append: an event, an end, or both."""

    job_id: str
    epoch: int
    number: int
    event: LogEvent | None = None
    num_tokens: int = 0
    fin: Literal["", JobStatus.SUCCEEDED, JobStatus.FAILED] = ""
    code: str = ""
    message: str = ""
    result: ObjectRef | None = None  # with an end: where the log before it is kept from now on


@dataclass(frozen=True, slots=True)
class Release:
    """One job given back: `drain` leaves its attempts as they were, `error` uses one up."""

    job_id: str
    epoch: int
    kind: Literal["drain", "error"]
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Blame:
    """One job of a step in which the engine died; `about` is JSON of sizes and hashes."""

    job_id: str
    epoch: int
    about: str


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep found: leases lapsed, deadlines passed, callers gone, retentions over."""

    num_lapsed: int
    num_expired: int
    num_unattended: int
    num_forgotten: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which of a tenant's jobs a list shows; what is empty admits all."""

    statuses: frozenset[JobStatus] = frozenset()
    lane: str = ""
    model: str = ""
    created_after_ms: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Page:
    """Jobs of a list, the youngest first. `position` is the id after which the search
    goes on, empty at the end; a page may be short, or empty, before that.
    """

    views: tuple["JobView", ...]
    position: str


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as its caller may see it. Times are Unix milliseconds of the Redis clock."""

    job: Job
    status: JobStatus
    lane: str
    attempt: int
    next_number: int
    num_output_tokens: int
    num_prompt_tokens: int
    created_ms: int
    claimed_ms: int | None
    first_token_ms: int | None
    finished_ms: int | None
    deadline_ms: int
    code: str
    message: str
    metadata: Mapping[str, str]
    result: ObjectRef | None  # where the log before its end is kept; None: here

    @property
    def is_terminal(self) -> bool:
        return self.status in TERMINAL_STATUSES
