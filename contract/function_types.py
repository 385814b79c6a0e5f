"""What the functions are told and what they answer, as types. The calls are in functions.py."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

import msgspec

from contract.callbacks import Callback
from contract.errors import JobRefused, RateLimits
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


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant may ask of all models together; 0: no limit."""

    requests_per_min: int = 0
    tokens_per_min: int = 0  # prompt and output; a job's cost is charged first, then trued up
    concurrent_tokens: int = 0  # costs of its unfinished jobs
    lane_share: float = 0.0  # of a lane's bound in tokens, that it may hold waiting; 0: all

    def __post_init__(self) -> None:
        if min(self.requests_per_min, self.tokens_per_min, self.concurrent_tokens) < 0:
            raise ValueError("a limit may not be negative")
        if not 0.0 <= self.lane_share <= 1.0:
            raise ValueError(f"lane_share is a share, not {self.lane_share}")


class Submission(msgspec.Struct, frozen=True):
    """What `submit` is told beside the job itself. Tokens, seconds.

    A job's cost is its prompt and the output to expect: the functions know what outputs were like.
    """

    max_output_tokens: int  # of all choices
    deadline_s: float
    retention_s: float
    max_attempts: int = 3
    lane_bound_tokens: int = 0  # waiting in the lane; 0: no bound
    lane_bound_s: float = 0.0  # predicted wait; 0: no bound
    limits: TenantLimits = TenantLimits()
    max_stored_bytes: int = 0  # of all jobs that are kept; 0: no bound
    max_tenant_stored_bytes: int = 0  # of its tenant's
    needs_worker: bool = False  # refused where no worker of the model lives
    cold_start_s: float = 0.0  # until a first worker is up, where none lives
    idempotency_key: str = ""
    body_hash: str = ""
    attendance_s: float = 0.0  # without a caller for so long it is cancelled; 0: never
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)  # the caller's, to find it by
    callback: Callback | None = None  # whom to tell of the end


class QueuePosition(msgspec.Struct, frozen=True):
    """What goes before a waiting job, nearly: fairness mixes tenants as their costs come.

    `eta_s`: seconds until it starts, from the measured rates; None where none was measured.
    """

    num_jobs_ahead: int = 0
    num_tokens_ahead: int = 0
    eta_s: float | None = None


class Submitted(msgspec.Struct, frozen=True):
    """An accepted job; `is_new` is False where the same call was accepted before, which says
    nothing of its place."""

    job_id: str
    is_new: bool
    position: QueuePosition = QueuePosition()
    rates: RateLimits = RateLimits()


class Quote(msgspec.Struct, frozen=True):
    """What submit would answer now: where it would refuse, why, and how long all would take."""

    refusal: JobRefused | None
    position: QueuePosition
    service_s: float | None  # from its start to its end; None where unknown
    cost_tokens: int  # prompt and the output to expect
    rates: RateLimits


class WorkerCapacity(msgspec.Struct, frozen=True):
    """What a worker says of its speed and its room; 0: not measured, not known."""

    tokens_per_s: float = 0.0  # of jobs' costs, when it has all the work that it can take
    stream_tokens_per_s: float = 0.0  # of output, that one stream gets
    max_tokens: int = 0  # of jobs that it holds at once
    max_jobs: int = 0
    lanes: tuple[str, ...] = ()  # most urgent first
    min_shares: Mapping[str, float] = msgspec.field(default_factory=dict)  # guaranteed to lanes

    @property
    def lanes_with_shares(self) -> str:
        """As a heartbeat says them: `interactive batch=0.05`."""
        shares = {lane: self.min_shares.get(lane, 0.0) for lane in self.lanes}
        return " ".join(f"{lane}={share}" if share else lane for lane, share in shares.items())


class FairRoom(msgspec.Struct, frozen=True):
    """What a worker whose places in a lane are all taken could start of tenants that have less than
    their equal share of them: places and tokens of the lane, and what each tenant holds there."""

    max_jobs: int
    max_tokens: int
    held: Mapping[str, tuple[int, int]]  # tenant → places, tokens


class LaneRoom(msgspec.Struct, frozen=True):
    """What a worker could start of a lane: its next job comes only while all that was claimed
    leaves room for it. `max_owed` of them come first at most, where the lane is owed its share.
    A job counts as many as it has choices."""

    max_jobs: int
    max_tokens: int
    max_owed: int = 2**31
    fair: FairRoom | None = None  # counts where `max_jobs` are handed out


class Claimed(msgspec.Struct, frozen=True):
    """A job handed to a worker, with its fencing token and where its log ends."""

    job: Job
    epoch: int
    attempt: int
    next_number: int
    hash: str
    num_logged_tokens: int
    deadline_s: float  # from now
    is_alone: bool  # under suspicion: nothing else may run beside it
    cost_tokens: int = 0  # prompt and the output to expect


class Append(msgspec.Struct, frozen=True):
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


class Release(msgspec.Struct, frozen=True):
    """One job given back: `drain` leaves its attempts as they were, `error` uses one up."""

    job_id: str
    epoch: int
    kind: Literal["drain", "error"]
    code: str = ""
    message: str = ""


class Blame(msgspec.Struct, frozen=True):
    """One job of a step in which the engine died; `about` is JSON of sizes and hashes."""

    job_id: str
    epoch: int
    about: str


CORRECTION_KINDS = ("lane", "line", "tenant", "list", "type")


class Correction(msgspec.Struct, frozen=True):
    """A counter or a list that was not as the jobs' records say: its key without the tag, and the
    field or member of it."""

    kind: str
    key: str
    field: str
    held: str
    holds: str


class Swept(msgspec.Struct, frozen=True):
    """What a sweep found: leases lapsed, deadlines passed, callers gone, retentions over; what it
    set right."""

    num_lapsed: int
    num_expired: int
    num_unattended: int
    num_forgotten: int
    corrections: tuple[Correction, ...] = ()


class Wanted(msgspec.Struct, frozen=True):
    """Which of a tenant's jobs a list shows; what is empty admits all."""

    statuses: frozenset[JobStatus] = frozenset()
    lane: str = ""
    model: str = ""
    created_after_ms: int = 0
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)


class JobPage(msgspec.Struct, frozen=True):
    """Jobs of a list, the youngest first. `position` is the id after which the search
    goes on, empty at the end; a page may be short, or empty, before that.
    """

    views: tuple["JobView", ...]
    position: str


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job as its caller may see it. Times are Unix milliseconds of the Redis clock.

    Fields are those of the job's record in Redis, under their `name` where one is given.
    """

    job: Job
    status: JobStatus = msgspec.field(name="state")
    lane: str
    attempt: int
    next_number: int = msgspec.field(name="next")
    num_output_tokens: int = msgspec.field(name="tokens")
    num_prompt_tokens: int = msgspec.field(name="prompt_tokens")
    created_ms: int = msgspec.field(name="created")
    claimed_ms: int | None = msgspec.field(default=None, name="claimed")
    first_token_ms: int | None = msgspec.field(default=None, name="first_token")
    finished_ms: int | None = msgspec.field(default=None, name="finished")
    deadline_ms: int = msgspec.field(name="deadline")
    code: str = ""
    message: str = ""
    metadata: Mapping[str, str]
    result: ObjectRef | None  # the object that holds the log before its end; None: Redis has it
    # At its submission; None where unknown or the job was moved.
    predicted_wait_ms: int | None = msgspec.field(default=None, name="predicted")
    position: QueuePosition | None = None  # of a queued job, where it is known

    @property
    def is_terminal(self) -> bool:
        return self.status in TERMINAL_STATUSES
