"""Types of the functions' arguments and replies. The calls are in functions.py."""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Literal

import msgspec
from msgspec import field

from contract.callbacks import Callback
from contract.errors import JobRefused, RateLimits
from contract.events import LogEntry, LogEvent
from contract.jobs import TERMINAL_STATUSES, Job, JobStatus, MarkKind, ObjectRef

MAX_CLAIM = 5  # jobs of one call, which Redis runs in a millisecond or two


class Verdict(StrEnum):
    """The reply for one job in a worker's call; for an ended job the reply is its status."""

    OK = "OK"
    GAP = "GAP"
    OVER = "OVER"
    FENCED = "FENCED"
    GONE = "GONE"
    RUNNING = "RUNNING"


# A worker claims jobs, loads its lost engine again, claims no more jobs, or has exited.
WorkerState = Literal["up", "loading", "draining", "gone"]


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's limits over all models; 0: no limit."""

    requests_per_min: int = 0
    tokens_per_min: int = 0  # prompt and output; charged with a job's cost, corrected at its end
    concurrent_tokens: int = 0  # costs of its unfinished jobs
    lane_share: float = 0.0  # of a lane's token bound, for its waiting jobs; 0: all


class Submission(msgspec.Struct, frozen=True):
    """Terms of a job's submission. Tokens, seconds.

    Fields are the terms of submit.lua, under their `name` where one is given; those in seconds are
    `_ms` there. The functions compute a job's cost: its prompt and the output predicted from
    earlier jobs.
    """

    max_output_tokens: int = field(name="max_tokens")  # of all choices
    deadline_s: float  # from now, or from the start
    retention_s: float = field(name="ttl_s")
    start_at_s: float = field(default=0.0, name="start_s")  # Unix time; 0: at once
    priority: int = 0  # in its tenant's queue, before the deadline: lower is earlier
    max_attempts: int = 3
    lane_bound_tokens: int = field(default=0, name="lane_tokens")  # waiting in it; 0: no bound
    lane_bound_s: float = field(default=0.0, name="lane_wait_s")  # predicted wait; 0: no bound
    limits: TenantLimits = TenantLimits()
    batch_price: float = 1.0  # of a token in the lane `batch`, in the meter of tokens: 0 to 1
    cached_price: float = 1.0  # of a prompt's token found in the cache, likewise
    max_stored_bytes: int = field(default=0, name="max_bytes")  # of all kept jobs; 0: no bound
    max_tenant_stored_bytes: int = field(default=0, name="max_tenant_bytes")
    needs_worker: bool = False  # refuse without a live worker of the model
    cold_start_s: float = field(default=0.0, name="cold_s")  # until a first worker is up
    idempotency_key: str = field(default="", name="idem_key")
    body_hash: str = ""
    attendance_s: float = 0.0  # cancelled after this long without a caller; 0: never
    metadata: Mapping[str, str] = field(default_factory=dict)  # the caller's, for searches
    callback: Callback | None = None  # receives messages about the job
    vector_bytes: int = 0  # of a prefill-only job's output
    is_ephemeral: bool = field(default=False, name="is_passing")  # not read after its delivery
    call_prompt_tokens: int = 0  # of a flow's calls, more than its own prompt; an estimate
    is_counted: bool = False  # `enter` has counted it as a request
    marks: bytes = b""  # of its session and its prompt (residence.py); empty: it goes to any worker


class QueuePosition(msgspec.Struct, frozen=True):
    """The estimated work ahead of a waiting job.

    `eta_s`: seconds until it starts at the measured rates; None where none is measured.
    """

    num_jobs_ahead: int = 0
    num_tokens_ahead: int = 0
    eta_s: float | None = None


class Submitted(msgspec.Struct, frozen=True):
    """An accepted job. `is_new` is False where the same call was accepted before; position and
    rates are then unset."""

    job_id: str
    is_new: bool
    position: QueuePosition | None = QueuePosition()  # None: its start is to come
    rates: RateLimits = RateLimits()


class Quote(msgspec.Struct, frozen=True):
    """What submit would reply now: a refusal or None, waiting time and service time."""

    refusal: JobRefused | None
    position: QueuePosition
    service_s: float | None  # from its start to its end; None where unknown
    cost_tokens: int  # prompt and predicted output
    rates: RateLimits
    num_cached_tokens: int = 0  # of the prompt, that a worker seems to hold


class WorkerCapacity(msgspec.Struct, frozen=True):
    """A worker's speed and capacity; 0: not measured or unknown."""

    tokens_per_s: float = 0.0  # of jobs' costs, under full load
    stream_tokens_per_s: float = 0.0  # of output, in one stream
    max_tokens: int = 0  # of jobs that it holds at once
    max_jobs: int = 0
    lanes: tuple[str, ...] = ()  # most urgent first
    min_shares: Mapping[str, float] = msgspec.field(default_factory=dict)  # guaranteed to lanes

    @property
    def lanes_with_shares(self) -> str:
        """As in a heartbeat: `interactive batch=0.05`."""
        shares = {lane: self.min_shares.get(lane, 0.0) for lane in self.lanes}
        return " ".join(f"{lane}={share}" if share else lane for lane, share in shares.items())


class FairRoom(msgspec.Struct, frozen=True):
    """A lane's slots and tokens at a worker, and each tenant's part of them. With all slots taken,
    the worker still claims jobs of tenants below their share by weight."""

    max_jobs: int
    max_tokens: int
    held: Mapping[str, tuple[int, int]]  # tenant → slots, tokens


class LaneRoom(msgspec.Struct, frozen=True):
    """A lane's room at a worker: a claim takes the lane's next job only while all claimed jobs
    leave room for it. At most `max_owed` slots go first because of the lane's deficit of its
    minimum share. Each choice of a job fills a slot."""

    max_jobs: int
    max_tokens: int
    max_owed: int = 2**31
    fair: FairRoom | None = None  # used where `max_jobs` is 0


class Claimed(msgspec.Struct, frozen=True):
    """A job assigned to a worker, with its fencing token and the end of its log."""

    job: Job
    epoch: int
    attempt: int
    next_number: int
    hash: str
    num_logged_tokens: int
    deadline_s: float  # from now
    is_alone: bool  # a suspect: it must run alone
    cost_tokens: int = 0  # prompt and predicted output


class Claims(list[Claimed]):
    """Jobs of one call. `again_s`: when jobs that it left to other workers are left no more."""

    again_s: float | None = None


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
    result: ObjectRef | None = None  # with an end: the object that holds the log before it
    prompt_tokens: int = 0  # with a flow's end: of all its calls; 0: of the job's own prompt
    cached_tokens: int = 0  # with a flow's end: of all its calls; others' events tell theirs
    marks: tuple["JobMark", ...] = ()
    held: bytes = b""  # with an end: marks of the prefixes that the worker keeps of it


class Release(msgspec.Struct, frozen=True):
    """A job returned to its lane (`drain` does not count the attempt), or kept and offered."""

    job_id: str
    epoch: int
    kind: Literal["drain", "error", "offer"]
    code: str = ""
    message: str = ""


class Blame(msgspec.Struct, frozen=True):
    """One job of a step in which the engine died; `about` is JSON of sizes and hashes."""

    job_id: str
    epoch: int
    about: str


class Swept(msgspec.Struct, frozen=True):
    """Numbers of lapsed leases, expired and unattended jobs, jobs whose start has come, and
    forgotten jobs of a sweep."""

    num_lapsed: int
    num_expired: int
    num_unattended: int
    num_begun: int
    num_forgotten: int


class Wanted(msgspec.Struct, frozen=True, omit_defaults=True):
    """Filters of jobs, of a list or an operation; an empty one admits all. The functions read them
    under their `name` where one is given."""

    statuses: frozenset[JobStatus] = msgspec.field(default=frozenset(), name="states")
    lanes: frozenset[str] = frozenset()
    model: str = ""
    error_code: str = msgspec.field(default="", name="code")
    created_after_ms: int = msgspec.field(default=0, name="since")
    created_before_ms: int = msgspec.field(default=0, name="before")  # 0: any
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)
    is_chats: bool = False  # of one tenant's list: stored chats alone
    is_ascending: bool = False  # of one tenant's list: the oldest first


class JobPage(msgspec.Struct, frozen=True):
    """A page of a list. `position`: id after which the next page begins, empty at the end. A page
    before the end may be short or empty.
    """

    views: tuple["JobView", ...]
    position: str


class JobMark(msgspec.Struct, frozen=True):
    """What an engine did with a job: `num` chunks of a prompt, or a loss of its place. Times are in
    ms of the Redis clock; in an append, ms ago."""

    kind: MarkKind
    begun_ms: int
    ended_ms: int
    num: int
    num_tokens: int  # computed, or to be computed again


class JobRun(msgspec.Struct, frozen=True):
    """A claim of a job: by whom, when (Redis clock), and the number of its first event; what that
    worker's engine did with it, as far as its output or end has told of it."""

    worker: str
    claimed_ms: int
    first_number: int
    marks: tuple[JobMark, ...] = ()


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
    num_cached_tokens: int = msgspec.field(default=0, name="cached")  # of the prompt
    created_ms: int = msgspec.field(name="created")
    claimed_ms: int | None = msgspec.field(default=None, name="claimed")
    first_token_ms: int | None = msgspec.field(default=None, name="first_token")
    finished_ms: int | None = msgspec.field(default=None, name="finished")
    deadline_ms: int = msgspec.field(name="deadline")
    code: str = ""
    message: str = ""
    metadata: Mapping[str, str]
    result: ObjectRef | None  # the object that holds the log before its end; None: Redis has it
    start_ms: int | None = msgspec.field(default=None, name="start")  # it does not start before
    # At its submission; None where unknown or the job was moved.
    predicted_wait_ms: int | None = msgspec.field(default=None, name="predicted")
    position: QueuePosition | None = None  # of a queued job, where it is known
    runs: tuple["JobRun", ...] = ()  # the last claims, oldest first

    @property
    def is_terminal(self) -> bool:
        return self.status in TERMINAL_STATUSES

    @property
    def wait_ms(self) -> int | None:
        """From its submission, or from its start, until a worker claimed it."""
        if self.claimed_ms is None:
            return None
        return self.claimed_ms - max(self.created_ms, self.start_ms or 0)

    def ends_with(self, page: Sequence[LogEntry]) -> bool:
        """Whether a page of its log that was read with it is the last."""
        return not page or page[-1].number >= self.next_number - 1


class LaneSnapshot(msgspec.Struct, frozen=True):
    """A lane's waiting and running jobs. Costs in tokens; 0 s where no job waits."""

    num_queued: int
    queued_tokens: int
    num_running: int
    running_tokens: int
    oldest_wait_s: float  # since the first waiting job was submitted

    def with_(self, other: "LaneSnapshot") -> "LaneSnapshot":
        """Both together."""
        return LaneSnapshot(
            self.num_queued + other.num_queued,
            self.queued_tokens + other.queued_tokens,
            self.num_running + other.num_running,
            self.running_tokens + other.running_tokens,
            max(self.oldest_wait_s, other.oldest_wait_s),
        )


class WorkerSnapshot(msgspec.Struct, frozen=True):
    """A live worker by its last heartbeat, `seen_s` seconds ago."""

    incarnation: str
    seen_s: float
    num_jobs_held: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_places: int = 0  # 0: unknown
    version: str = ""  # of batchway
    device: str = ""  # its name; empty: unknown
    notice: str = ""  # what operators should know of it
    num_cached_blocks: int | None = None  # part of the free ones; None: unknown
    num_retained_blocks: int = 0  # part of the cached ones, for sessions whose tools run
    gpu_share: float | None = None  # of time in which its GPU computes; None: no GPU, or unknown

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use, from 0 to 1."""
        if not self.num_blocks or not self.num_running:
            return 0.0
        return 1.0 - self.num_free_blocks / self.num_blocks


class WorkerAside(msgspec.Struct, frozen=True):
    """A worker that lives and claims no jobs: `loading` again or `draining`, for so long."""

    worker: WorkerSnapshot
    state: str
    for_s: float


class FleetSnapshot(msgspec.Struct, frozen=True):
    """`totals` by field, see contract/lua/_totals.lua; `deliveries` of callbacks by outcome."""

    now_s: float  # of the Redis clock
    lanes: Mapping[str, LaneSnapshot]
    workers: tuple[WorkerSnapshot, ...]
    totals: Mapping[str, int]
    deliveries: Mapping[str, int]
    aside: tuple[WorkerAside, ...] = ()


def merged(parts: Sequence[FleetSnapshot]) -> FleetSnapshot:
    """The fleet over its partitions; of the oldest waits the longest."""
    first, *others = parts
    if not others:
        return first
    lanes = dict(first.lanes)
    totals, deliveries = Counter(first.totals), Counter(first.deliveries)
    for part in others:
        for name, lane in part.lanes.items():
            lanes[name] = lanes[name].with_(lane) if name in lanes else lane
        totals.update(part.totals)
        deliveries.update(part.deliveries)
    workers = tuple(worker for part in parts for worker in part.workers)
    aside = tuple(each for part in parts for each in part.aside)
    return FleetSnapshot(first.now_s, lanes, workers, totals, deliveries, aside)


class WatchedJob(msgspec.Struct, frozen=True):
    """A job that a worker holds. Times are Unix milliseconds of the Redis clock; 0: not yet."""

    worker: str
    job_id: str
    tenant: str
    lane: str
    attempt: int
    claimed_ms: int
    first_token_ms: int
    num_prompt_tokens: int
    num_output_tokens: int
    max_output_tokens: int


class WaitingTenant(msgspec.Struct, frozen=True):
    """A tenant's waiting jobs in a lane, and its weight there."""

    lane: str
    tenant: str
    num_jobs: int
    num_tokens: int
    weight: float


class Watched(msgspec.Struct, frozen=True):
    """What people watch of a model: held jobs by worker, and tenants that wait; of all models,
    callbacks that are to be sent and those that were given up in the last week."""

    held: tuple[WatchedJob, ...]
    waiting: tuple[WaitingTenant, ...]
    num_due_callbacks: int
    num_dead_callbacks: int
