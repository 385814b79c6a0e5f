"""The functions in Python, on plain dictionaries and a clock that tests set.

The specification of the state table: tests compare the functions in Redis with it, call by call. It
has no concurrency, no expiry and no pub/sub.

Over 300 lines: it is one table of states, which is checked against the functions as a whole.
"""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from contract.callbacks import MessageKind
from contract.codec import decode_entry, encode
from contract.errors import BrokerFull, ErrorCode, JobRefused
from contract.events import End, LogEntry, LogEvent
from contract.function_types import (
    Append,
    Blame,
    Claimed,
    JobMark,
    JobPage,
    JobView,
    LaneRoom,
    QueuePosition,
    Quote,
    Release,
    Submission,
    Submitted,
    Swept,
    TenantLimits,
    Verdict,
    Wanted,
    WorkerCapacity,
    WorkerState,
)
from contract.functions import (
    BOOT_GRACE_S,
    MAX_LOOKS,
    UNKNOWN_MS,
    decode_position,
    decode_rates,
    decode_runs,
    encoded_parts,
    refusal,
    stored_bytes,
)
from contract.jobs import TERMINAL_STATUSES, Job, JobStatus, ObjectRef
from contract.pauses import Line, Pause, PausedBy
from tests.oracle.reference_admission import (
    GROWTH,
    MIN_LENGTHS,
    Ahead,
    Candidate,
    Lengths,
    Load,
    Refusal,
    Tenant,
    is_below_share,
    predicted_output,
    wait_ms,
)
from tests.oracle.reference_fairness import MAX_BACK, MAX_PASSED, MAX_SKIPPED, Places, Shares, Turns
from tests.oracle.reference_files import BatchesReference, FilesReference
from tests.oracle.reference_memory import MAX_FORGOTTEN, PASSING_MS, log_bytes, need_of
from tests.oracle.reference_operations import OperationsReference
from tests.oracle.reference_outbox import OutboxReference
from tests.oracle.reference_pools import WORKER_TTL_MS, Pool, Use
from tests.oracle.reference_promises import Promises

FIRST_HASH = "00000000"
MAX_RELEASES = 32
OFFER_MS = 2500
MAX_BEYOND = 3  # jobs that a claim ends, or assigns beyond its rooms
MAX_RUNS_BYTES = 1024
SUSPECT = "suspect"
BACK = "back"

_RUNNING = (JobStatus.CLAIMED, JobStatus.STREAMING)


@dataclass(slots=True)
class Record:
    """A job in the state table. Times are in ms of the reference's clock."""

    job: Job
    submission: Submission
    lane: str
    created_ms: int
    deadline_ms: int
    cost: int = 0  # prompt + output to expect, or more once drawn; reserved until the end
    charged: int = 0  # to its tenant's turns in its lane, once it was handed out
    passed: int = 0  # jobs that went before it because it did not fit
    charge: int | None = None  # of the cost, once it has ended; the rest was refunded
    turn: tuple[int, int] = (0, 0)  # jobs and tokens that must leave its line before it
    state: JobStatus = JobStatus.QUEUED
    queue: str = ""  # a tenant's, BACK or SUSPECT, while queued and while running
    owner: str = ""
    epoch: int = 0
    attempt: int = 0
    releases: int = 0
    lapses: int = 0
    crashes: int = 0
    lease_ms: int | None = None
    attended_until_ms: int | None = None
    num_tokens: int = 0
    predicted_ms: int = UNKNOWN_MS  # its wait, at submission
    claimed_ms: int | None = None
    runs: str = ""  # a line for each claim and mark, MAX_RUNS_BYTES at most
    first_token_ms: int | None = None
    finished_ms: int | None = None
    code: str = ""
    message: str = ""
    result: ObjectRef | None = None
    fixed_bytes: int = 0  # in Redis, without its log
    held_bytes: int = 0  # that count in its lane
    token_bytes: int = 0  # of them, of its log for each token
    is_passing: bool = False
    log: list[LogEntry] = field(default_factory=list)

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL_STATUSES

    @property
    def done(self) -> int:
        """The computed tokens of its cost; the prompt counts with the first output."""
        num_prompt = self.job.num_prompt_tokens
        return min(self.cost, num_prompt + self.num_tokens) if self.num_tokens else 0

    @property
    def next_number(self) -> int:
        return len(self.log) + 1

    @property
    def hash(self) -> str:
        return self.log[-1].hash if self.log else FIRST_HASH

    def matches(self, wanted: Wanted) -> bool:
        """By all filters but those of time."""
        return (
            (not wanted.statuses or self.state in wanted.statuses)
            and (not wanted.lanes or self.lane in wanted.lanes)
            and wanted.error_code in ("", self.code)
            and wanted.model in ("", self.job.model)
            and wanted.metadata.items() <= self.submission.metadata.items()
        )


class Reference:
    """One partition. Every method does what the function of its name does."""

    def __init__(
        self,
        max_passed: int = MAX_PASSED,
        min_lengths: int = MIN_LENGTHS,
        growth: int = GROWTH,
    ) -> None:
        self.now_ms = 0
        self._max_passed = max_passed
        self._min_lengths = min_lengths
        self._growth = growth
        self.records: dict[str, Record] = {}
        self.orphaned: set[str] = set()  # forgotten jobs that keep something in the object store
        self.outbox = OutboxReference()
        self.files = FilesReference()
        self.batches = BatchesReference(self.files, self.outbox)
        self.operations = OperationsReference(self)
        self._queues: dict[tuple[str, str, str], list[str]] = {}  # (model, lane, queue) → ids
        self._turns_of: dict[tuple[str, str], Turns] = {}  # (model, lane) → its tenants
        self._shares: dict[str, Shares] = {}  # model → its lanes
        self._keys: dict[tuple[str, str], tuple[str, str]] = {}
        self._workers: dict[str, dict[str, tuple[int, WorkerCapacity]]] = {}
        self._known_workers: set[str] = set()  # also those that drain
        self.aside: dict[str, tuple[WorkerState, int]] = {}  # which claim no jobs: since ms
        self._pools: dict[str, Pool] = {}
        self._promises_of: dict[str, Promises] = {}  # model →
        self._tenants: dict[str, Tenant] = {}
        self._weights: dict[str, float] = {}  # of tenants, by the latest job of each
        self.lengths: dict[tuple[str, str, str], Lengths] = {}
        self.calibrations: dict[tuple[str, str], list[tuple[int, int]]] = {}  # predicted, actual
        self.totals: dict[str, Counter[str]] = defaultdict(Counter)  # by model; without buckets
        self._offers: dict[tuple[str, str], dict[tuple[str, int, int], int]] = {}  # until ms
        self._left: dict[tuple[str, str, str], tuple[int, int]] = {}  # line → jobs, tokens
        self._turns: dict[str, tuple[str, int]] = {}  # model → (incarnation, until ms)
        self.paused: dict[Line, int] = {}  # since ms
        self._grace_ms = 0  # until then nothing lapses
        self.is_restarted = False
        self.memory_room = math.inf
        self.wakes: list[tuple[str, str]] = []  # (model, lane) of each hint published to workers

    # --- callers ------------------------------------------------------------------------------

    def enter(self, tenant: str, limits: TenantLimits) -> None:
        """Raises JobRefused."""
        known = self._tenants.setdefault(tenant, Tenant())
        a_minute = limits.requests_per_min
        level = known.requests.level(a_minute, self.now_ms)
        if 0 < a_minute < level + 1:
            retry_ms = math.ceil((level + 1 - a_minute) * 60_000 / a_minute)
            rates = decode_rates(limits, known.rates(limits, self.now_ms))
            raise refusal(None, "tenant_quota", "requests_per_min", retry_ms, rates)
        known.count_request(limits, 1, self.now_ms)

    def submit(self, job: Job, submission: Submission) -> Submitted:
        """Raises JobRefused, BrokerFull."""
        s = submission
        if s.is_counted:
            self._tenants[job.tenant].count_request(s.limits, -1, self.now_ms)
        known = self._keys.get((job.tenant, s.idempotency_key)) if s.idempotency_key else None
        if known is not None:
            if known[1] != s.body_hash:
                raise refusal(job, "idempotency_mismatch", "", UNKNOWN_MS, None)
            return Submitted(known[0], False)
        if job.id in self.records:
            return Submitted(job.id, False)
        if self.memory_room <= 0 and not job.parent:
            self.totals[job.model][f"refusals_total:{job.lane}:memory_full"] += 1
            raise BrokerFull(ErrorCode.MEMORY_FULL, "")
        candidate = self._candidate(job, s)
        promises = self._promises_of.setdefault(job.model, Promises())
        refused = candidate.refusal(promises)
        is_tight = refused is not None and refused.limit in ("lane_memory", "tenant_memory")
        if is_tight and self._make_room(job.lane):
            candidate = self._candidate(job, s)
            refused = candidate.refusal(promises)
        if refused is not None:
            if refused.promised_ms is not None:
                promises.book(candidate.line, refused.promised_ms)
            self.totals[job.model][f"refusals_total:{job.lane}:{refused.reason}"] += 1
            raise self._refused(job, candidate, refused)
        if candidate.finds_room:
            promises.forget(candidate.line)
        deadline_ms = self.now_ms + int(s.deadline_s * 1000)
        record = Record(job, s, job.lane, self.now_ms, deadline_ms, candidate.cost)
        record.predicted_ms = candidate.wait_ms
        record.fixed_bytes, record.held_bytes, record.token_bytes = candidate.need
        record.is_passing = s.is_passing
        if s.attendance_s > 0:
            record.attended_until_ms = self.now_ms + int(s.attendance_s * 1000)
        self.records[job.id] = record
        if s.idempotency_key:
            self._keys[(job.tenant, s.idempotency_key)] = (job.id, s.body_hash)
        self._weights[job.tenant] = job.weight
        candidate.tenant.charge(s, record.lane, record.cost, self.now_ms)
        candidate.tenant.stored_bytes += candidate.stored_bytes
        self._enqueue(record, job.tenant)
        rates = decode_rates(s.limits, candidate.tenant.rates(s.limits, self.now_ms))
        return Submitted(job.id, True, _place(candidate.ahead, record.predicted_ms), rates)

    def quote(self, job: Job, submission: Submission) -> Quote:
        candidate = self._candidate(job, submission)
        refused = candidate.refusal(self._promises_of.get(job.model, Promises()))
        return Quote(
            None if refused is None else self._refused(job, candidate, refused),
            _place(candidate.ahead, candidate.wait_ms),
            candidate.service_ms / 1000 or None,
            candidate.cost,
            decode_rates(submission.limits, candidate.tenant.rates(submission.limits, self.now_ms)),
        )

    def position(self, job_id: str, tenant: str) -> QueuePosition | None:
        """The job's place in the queue, as in the reply to `read`."""
        record = self._owned(job_id, tenant)
        if record is None or record.state is not JobStatus.QUEUED:
            return None
        if record.queue in (BACK, SUSPECT):
            return None
        model, lane = record.job.model, record.lane
        left = self._left.get((model, lane, tenant), (0, 0))
        own = max(0, record.turn[0] - left[0]), max(0, record.turn[1] - left[1])
        pool = self._pool(model)
        weight = self._weight(tenant)
        weights = weight, self._weight_of_others(model, lane, tenant)
        ahead = Ahead.of(self._loads(model, lane), pool, lane, own, weights, (1, record.cost))
        if is_below_share(pool, ahead, weight, self._tenants[tenant].reserved):
            return _place(ahead, 0)
        cold_ms = int(record.submission.cold_start_s * 1000)
        return _place(ahead, wait_ms(pool, ahead, record.cost, cold_ms))

    def cancel(self, job_id: str, tenant: str) -> JobStatus | None:
        record = self._owned(job_id, tenant)
        if record is not None and not record.is_terminal:
            self._end(record, JobStatus.CANCELLED)
        return None if record is None else record.state

    def reprioritise(
        self, job_id: str, tenant: str, *, lane: str = "", deadline_s: float | None = None
    ) -> Verdict | JobStatus | None:
        record = self._owned(job_id, tenant)
        if record is None or record.is_terminal:
            return None if record is None else record.state
        if deadline_s is not None:
            record.deadline_ms = self.now_ms + int(deadline_s * 1000)
        if lane in ("", record.lane):
            return Verdict.OK
        tenant_of_job = self._tenants[record.job.tenant]
        tenant_of_job.move(record.submission, record.lane, lane, record.cost, self.now_ms)
        if record.state is not JobStatus.QUEUED:
            self._move_charge(record, lane, keeps=True)
            record.lane, record.predicted_ms = lane, UNKNOWN_MS
            return Verdict.OK
        self._leave_queue(record)
        self._move_charge(record, lane, keeps=record.queue == SUSPECT)
        record.lane, record.predicted_ms = lane, UNKNOWN_MS
        self._enqueue(record, SUSPECT if record.queue == SUSPECT else record.job.tenant)
        return Verdict.OK

    def _move_charge(self, record: Record, lane: str, *, keeps: bool) -> None:
        """Moves the job's charge to another lane, unless it waits there to be charged anew."""
        model, tenant = record.job.model, record.job.tenant
        num_tokens = record.charged / self._weight(tenant)
        if record.charged:
            self._turns_in(model, record.lane).bill(tenant, -num_tokens)
        if record.charged and keeps:
            self._turns_in(model, lane).bill(tenant, num_tokens)
        elif not keeps:
            record.charged = 0

    def detach(
        self, job_id: str, tenant: str, *, deadline_s: float, retention_s: float
    ) -> Verdict | JobStatus | None:
        record = self._owned(job_id, tenant)
        if record is None or record.is_terminal:
            return None if record is None else record.state
        record.deadline_ms = max(record.deadline_ms, self.now_ms + int(deadline_s * 1000))
        record.attended_until_ms = None
        record.is_passing = False
        longest_s = max(record.submission.retention_s, retention_s)
        record.submission = replace(record.submission, attendance_s=0.0, retention_s=longest_s)
        return Verdict.OK

    def attend(self, job_ids: Sequence[str]) -> int:
        records = [self.records[i] for i in job_ids if i in self.records]
        attended = [r for r in records if r.submission.attendance_s > 0]
        for record in attended:
            if record.attended_until_ms is not None:
                attendance_ms = int(record.submission.attendance_s * 1000)
                record.attended_until_ms = self.now_ms + attendance_ms
        return len(attended)

    def list_jobs(
        self,
        tenant: str,
        wanted: Wanted,
        *,
        after: str = "",
        max_jobs: int = 20,
        max_looks: int = MAX_LOOKS,
    ) -> JobPage | None:
        records = [r for r in self.records.values() if tenant in ("", r.job.tenant)]
        records.sort(key=lambda r: (r.created_ms, r.job.id), reverse=True)
        ids = [r.job.id for r in records]
        if after and after not in ids:
            return None
        first = ids.index(after) + 1 if after else 0
        if wanted.created_before_ms:
            younger = [r for r in records if r.created_ms >= wanted.created_before_ms]
            first = max(first, len(younger))
        looked = records[first : first + max_looks]
        views: list[JobView] = []
        for index, record in enumerate(looked):
            if record.created_ms <= wanted.created_after_ms:
                return JobPage(tuple(views), "")
            if record.matches(wanted):
                if len(views) == max_jobs:
                    return JobPage(tuple(views), looked[index - 1].job.id)
                views.append(_view(record))
        return JobPage(tuple(views), looked[-1].job.id if len(looked) == max_looks else "")

    def pause(self, line: Line, by: PausedBy) -> Pause:
        return Pause(line, self.paused.setdefault(line, self.now_ms), by)

    def resume(self, line: Line, by: PausedBy) -> bool:
        if self.paused.pop(line, None) is None:
            return False
        if line.model:
            self.wakes.append((line.model, line.lane or "*"))
        return True

    def _is_paused(self, model: str, lane: str, tenant: str) -> bool:
        """Without a tenant: whether all of the lane is."""
        return any(
            line.model in ("", model) and line.lane in ("", lane) and line.tenant in ("", tenant)
            for line in self.paused
        )

    def delete(self, job_id: str, tenant: str) -> JobStatus | bool:
        record = self._owned(job_id, tenant)
        if record is not None and record.is_terminal:
            self._forget(record)
            return True
        return False if record is None else record.state

    # --- workers ------------------------------------------------------------------------------

    def claim(
        self,
        incarnation: str,
        model: str,
        lanes: Sequence[str],
        *,
        lease_s: float,
        max_jobs: int,
        max_tokens: int,
        is_idle: bool = False,
        config_version: str = "",
        min_shares: Mapping[str, float] | None = None,
        rooms: Mapping[str, LaneRoom] | None = None,
    ) -> list[Claimed]:
        lease_ms = int(lease_s * 1000)
        if self._has_turn(model, incarnation, lease_ms):
            return self._claim_suspect(model, incarnation, lease_ms) if is_idle else []
        claimed: list[Claimed] = []
        lanes = [lane for lane in lanes if not self._is_paused(model, lane, "")]
        shares = [(lane, (min_shares or {}).get(lane, 0.0)) for lane in lanes]
        for lane in lanes:
            turns = self._turns_in(model, lane)
            for tenant in [name for name in turns.active if self._is_paused(model, lane, name)]:
                turns.active[tenant] = max(turns.active[tenant], turns.clock)
        if rooms is None:
            rooms = dict.fromkeys(lanes, LaneRoom(max_jobs, max_tokens))
        places = {
            lane: Places(
                room.fair.max_jobs, room.fair.max_tokens, dict(room.fair.held), self._weights
            )
            for lane, room in rooms.items()
            if room.fair is not None and room.max_jobs == 0
        }
        num_tokens = num_filled = num_beyond = 0
        num_taken: Counter[str] = Counter()
        while num_beyond < MAX_BEYOND:
            skipped: list[Record] = []
            left = {
                lane: LaneRoom(
                    room.max_jobs - num_filled,
                    room.max_tokens - num_tokens,
                    room.max_owed - num_taken[lane],
                )
                for lane, room in rooms.items()
                if num_filled < room.max_jobs
            }
            found, is_blocked = self._choose(model, shares, left, places, skipped)
            if found is None and not is_blocked:
                found = self._take_offer(model, lanes, left, max_tokens, incarnation)
            if found is None:
                break
            lane = found.lane
            taken = self._take(found, incarnation, lease_ms)
            num_beyond += taken is None or lane in places
            if num_beyond == MAX_BEYOND:
                self.wakes.append((model, lane))
            if taken is None:
                continue
            claimed.append(taken)
            num_tokens += found.cost
            num_filled += found.job.num_places
            num_taken[found.lane] += found.job.num_places
            if found.lane in places:
                places[found.lane].hold(found.job.tenant, found.job.num_places, found.cost)
            for record in skipped:
                record.passed += 1
            waiting = {lane for lane, load in self._loads(model).items() if load.queued_jobs}
            used = self._pools.setdefault(model, Pool()).used.setdefault(found.lane, Use())
            used.note(found.cost, self.now_ms)
            self._shares_in(model).book(shares, found.lane, found.cost, waiting)
        return claimed

    def mine(self, incarnation: str, known_ids: Sequence[str], *, lease_s: float) -> list[Claimed]:
        found = [
            r for r in self.records.values() if r.owner == incarnation and r.job.id not in known_ids
        ]
        for record in found:
            record.lease_ms = self.now_ms + int(lease_s * 1000)
        return [self._handed_out(record) for record in found]

    def append(
        self, incarnation: str, items: Sequence[Append], *, lease_s: float
    ) -> list[tuple[Verdict | JobStatus, int]]:
        return [self._append(incarnation, item, int(lease_s * 1000)) for item in items]

    def heartbeat(
        self,
        incarnation: str,
        model: str,
        held: Sequence[tuple[str, int]],
        *,
        lease_s: float,
        info: str,
        capacity: WorkerCapacity = WorkerCapacity(),  # noqa: B008 - it is frozen
        state: WorkerState = "up",
    ) -> list[str]:
        lease_ms = int(lease_s * 1000)
        workers = self._workers.setdefault(model, {})
        workers.pop(incarnation, None)
        self._known_workers.discard(incarnation)
        _, since_ms = self.aside.pop(incarnation, ("up", self.now_ms))
        if state in ("loading", "draining"):
            self.aside[incarnation] = state, since_ms
        if state == "up":
            workers[incarnation] = self.now_ms, capacity
        if state != "gone":
            self._known_workers.add(incarnation)
            late_ms = self.now_ms - 6 * lease_ms
            for other in [w for w, (seen_ms, _) in workers.items() if seen_ms <= late_ms]:
                del workers[other]
            pool = self._pools.setdefault(model, Pool())
            pool.lanes = capacity.lanes
            pool.shares = {name: capacity.min_shares.get(name, 0.0) for name in pool.lanes}
        self._pools.setdefault(model, Pool()).measure(self._live(model))
        lost = []
        for job_id, epoch in held:
            record = self.records.get(job_id)
            if _fence(record, incarnation, epoch) is not None:
                lost.append(job_id)
            elif record is not None:
                record.lease_ms = self.now_ms + lease_ms
        return lost

    def live_workers(self, model: str) -> set[str]:
        """The workers that take jobs."""
        return set(self._workers.get(model, {}))

    def drain(self, incarnations: Sequence[str]) -> list[bool]:
        return [incarnation in self._known_workers for incarnation in incarnations]

    def release(
        self, incarnation: str, items: Sequence[Release]
    ) -> list[tuple[Verdict | JobStatus, int]]:
        return [(self._release(incarnation, item), 0) for item in items]

    def blame(
        self, incarnation: str, items: Sequence[Blame], *, max_crashes: int
    ) -> list[tuple[Verdict | JobStatus, int]]:
        return [(self._blame(incarnation, item, max_crashes), 0) for item in items]

    def sweep(self, max_jobs: int = 400) -> Swept:
        if self.is_restarted:
            self.is_restarted = False
            self._grace_ms = self.now_ms + int(BOOT_GRACE_S * 1000)
        is_grace = self.now_ms < self._grace_ms
        open_records = [r for r in self.records.values() if not r.is_terminal]
        expired = [r for r in open_records if r.deadline_ms <= self.now_ms]
        for record in sorted(expired, key=lambda r: (r.deadline_ms, r.job.id)):
            self._end(record, JobStatus.EXPIRED)
        unattended = [
            r
            for r in open_records
            if not r.is_terminal
            and not is_grace
            and r.attended_until_ms is not None
            and r.attended_until_ms <= self.now_ms
        ]
        for record in sorted(unattended, key=lambda r: (r.attended_until_ms, r.job.id)):
            self._end(record, JobStatus.CANCELLED)
        leased = [r for r in open_records if r.lease_ms is not None and not is_grace]
        lapsed = [r for r in leased if r.lease_ms <= self.now_ms]  # type: ignore[operator]
        for record in sorted(lapsed, key=lambda r: (r.lease_ms, r.job.id)):
            record.lapses += 1
            self._give_back(record, BACK if record.lapses == 1 else SUSPECT)
        forgotten = [r for r in self.records.values() if self._is_over(r)]
        for record in forgotten:
            self._forget(record)
        return Swept(len(lapsed), len(expired), len(unattended), len(forgotten))

    def restart(self) -> None:
        """Redis has been restarted: the next sweep begins a grace period."""
        self.is_restarted = True

    # --- transitions --------------------------------------------------------------------------

    def _append(
        self, incarnation: str, item: Append, lease_ms: int
    ) -> tuple[Verdict | JobStatus, int]:
        record = self.records.get(item.job_id)
        refusal = _fence(record, incarnation, item.epoch)
        if record is None or refusal is not None:
            return refusal or Verdict.GONE, 0
        if item.number != record.next_number:
            is_repeat = item.number < record.next_number
            return (Verdict.OK if is_repeat else Verdict.GAP), record.next_number
        if self._expires(record):
            return JobStatus.EXPIRED, 0
        if record.num_tokens + item.num_tokens > record.submission.max_output_tokens:
            return Verdict.OVER, record.num_tokens
        if lease_ms > 0:
            record.lease_ms = self.now_ms + lease_ms
        marked = record.runs + "".join(self._mark_line(mark) for mark in item.marks)
        record.runs = marked if len(marked) <= MAX_RUNS_BYTES else record.runs
        if item.event is not None:
            record.num_tokens += item.num_tokens
            self._grow(record)
            self._count("generation_tokens_total", record, item.num_tokens)
            if item.num_tokens and record.first_token_ms is None:
                record.first_token_ms = self.now_ms
                self._count("prompt_tokens_total", record, record.job.num_prompt_tokens)
                self._count_age("time_to_first_token_seconds", record)
            record.state = JobStatus.STREAMING
            _log(record, item.event)
            if not item.fin and _passes_progress(record, item.num_tokens):
                self._post(record, MessageKind.PROGRESS)
        if item.fin:
            is_kept_elsewhere = item.result is not None
            self._end(
                record, item.fin, item.code, item.message, is_kept_elsewhere=is_kept_elsewhere
            )
            record.result = item.result
        return Verdict.OK, record.next_number

    def _grow(self, record: Record) -> None:
        num_prompt = record.job.num_prompt_tokens
        excess = num_prompt + record.num_tokens - record.cost
        if excess <= 0:
            return
        most = num_prompt + record.submission.max_output_tokens - record.cost
        more = min(excess + self._growth, most)
        record.cost += more
        tenant = self._tenants[record.job.tenant]
        tenant.grow(record.submission, record.lane, more, self.now_ms)
        record.held_bytes += record.token_bytes * more

    def _mark_line(self, mark: JobMark) -> str:
        begun_ms, ended_ms = self.now_ms - mark.begun_ms, self.now_ms - mark.ended_ms
        return f"{mark.kind} {begun_ms} {ended_ms} {mark.num} {mark.num_tokens}\n"

    def _release(self, incarnation: str, item: Release) -> Verdict | JobStatus:
        record = self.records.get(item.job_id)
        refusal = _fence(record, incarnation, item.epoch)
        if record is None or refusal is not None:
            return refusal or Verdict.GONE
        if self._expires(record):
            return JobStatus.EXPIRED
        if item.kind == "offer":
            offers = self._offers_in(record.job.model, record.lane)
            for late in [offer for offer, until_ms in offers.items() if until_ms <= self.now_ms]:
                del offers[late]
            offers[_offer_of(record)] = self.now_ms + OFFER_MS
            return Verdict.OK
        if item.kind == "drain":
            if record.releases >= MAX_RELEASES:
                self._end(
                    record, JobStatus.FAILED, ErrorCode.RETRIES, "released by workers too often"
                )
                return JobStatus.FAILED
            record.releases += 1
            record.attempt -= 1
        elif record.attempt >= record.submission.max_attempts:
            self._end(record, JobStatus.FAILED, item.code, item.message)
            return JobStatus.FAILED
        self._give_back(record, BACK)
        return Verdict.OK

    def _blame(self, incarnation: str, item: Blame, max_crashes: int) -> Verdict | JobStatus:
        record = self.records.get(item.job_id)
        refusal = _fence(record, incarnation, item.epoch)
        if record is None or refusal is not None:
            return refusal or Verdict.GONE
        if self._expires(record):
            return JobStatus.EXPIRED
        record.crashes += 1
        if record.crashes < max_crashes:
            self._give_back(record, SUSPECT if record.crashes == max_crashes - 1 else BACK)
            return Verdict.OK
        message = f"the engine died on this job {record.crashes} times"
        self._end(record, JobStatus.FAILED, ErrorCode.POISON, message)
        return JobStatus.FAILED

    def _take(self, record: Record, incarnation: str, lease_ms: int) -> Claimed | None:
        if self._expires(record):
            return None
        if self._line(record) is not None:
            tenant, lane = record.job.tenant, record.lane
            num_tokens = record.cost / self._weight(tenant)
            self._turns_in(record.job.model, lane).charge(tenant, num_tokens)
            record.charged = record.cost
        self._leave_queue(record)
        record.state = JobStatus.CLAIMED
        record.owner = incarnation
        record.epoch += 1
        record.attempt += 1
        claim = f"{self.now_ms} {record.next_number} {incarnation}\n"
        record.runs = (record.runs + claim)[-MAX_RUNS_BYTES:]
        self._count("attempts_total", record, 1)
        if record.claimed_ms is None:
            record.claimed_ms = self.now_ms
            self._count_age("request_queue_time_seconds", record)
            self._calibrate(record)
        record.lease_ms = self.now_ms + lease_ms
        callback = record.submission.callback
        if record.epoch == 1 and callback is not None and callback.notifies_start:
            self._post(record, MessageKind.STARTED)
        return self._handed_out(record)

    def _calibrate(self, record: Record) -> None:
        if record.predicted_ms != UNKNOWN_MS:
            pairs = self.calibrations.setdefault((record.job.model, record.lane), [])
            pairs.insert(0, (record.predicted_ms, self.now_ms - record.created_ms))
            del pairs[1000:]

    def _give_back(self, record: Record, queue: str) -> None:
        record.owner, record.lease_ms = "", None
        self._enqueue(record, queue)

    def _expires(self, record: Record) -> bool:
        """Ends a job whose deadline has passed."""
        if self.now_ms < record.deadline_ms:
            return False
        self._end(record, JobStatus.EXPIRED)
        return True

    def _end(
        self,
        record: Record,
        status: JobStatus,
        code: str = "",
        message: str = "",
        *,
        is_kept_elsewhere: bool = False,
    ) -> None:
        _log(
            record,
            End(status, code, message, record.job.num_prompt_tokens, record.num_tokens),
        )
        record.held_bytes = record.fixed_bytes + len(message.encode())
        if not is_kept_elsewhere:
            record.held_bytes += log_bytes(record.log)
        self._settle(record, status)
        self._count("requests_total", record, 1, f":{status}")
        if status is JobStatus.SUCCEEDED:
            self._count_age("e2e_request_latency_seconds", record)
        if record.state is JobStatus.QUEUED:
            self._leave_queue(record)
        record.state, record.owner = status, ""
        record.code, record.message, record.finished_ms = code, message, self.now_ms
        record.lease_ms = record.attended_until_ms = None
        self._post(record, MessageKind(status.value))

    def _count(self, metric: str, record: Record, value: int, label: str = "") -> None:
        if value:
            self.totals[record.job.model][f"{metric}:{record.lane}{label}"] += value

    def _count_age(self, metric: str, record: Record) -> None:
        self._count(metric, record, 1000 * (self.now_ms - record.created_ms), ":sum")

    def _post(self, record: Record, kind: MessageKind) -> None:
        job, callback = record.job, record.submission.callback
        self.outbox.post(job.id, job.tenant, callback, kind, self.now_ms)

    def _is_over(self, record: Record) -> bool:
        """Whether a job ended so long ago that its record has expired."""
        if record.finished_ms is None:
            return False
        return record.finished_ms + int(record.submission.retention_s * 1000) <= self.now_ms

    def _make_room(self, lane: str) -> bool:
        """Forgets the oldest results of a lane's synchronous calls."""
        until_ms = self.now_ms - PASSING_MS
        old = sorted(
            (record.finished_ms, record.job.id)
            for record in self.records.values()
            if record.is_passing and record.lane == lane and record.finished_ms is not None
            if record.finished_ms <= until_ms
        )[:MAX_FORGOTTEN]
        for _, job_id in old:
            self._forget(self.records[job_id])
        return bool(old)

    def _forget(self, record: Record) -> None:
        del self.records[record.job.id]
        tenant = self._tenants[record.job.tenant]
        tenant.stored_bytes -= _stored_bytes(record.job, record.submission)
        if record.job.stored_prompt is not None or record.result is not None:
            self.orphaned.add(record.job.id)

    # --- queues -------------------------------------------------------------------------------

    def _queue_of(self, record: Record, queue: str) -> list[str]:
        lane = "" if queue == SUSPECT else record.lane
        return self._queues.setdefault((record.job.model, lane, queue), [])

    def _enqueue(self, record: Record, queue: str) -> None:
        record.state, record.queue = JobStatus.QUEUED, queue
        line = self._line(record)
        if line is not None:
            left = self._left.get(line, (0, 0))
            waiting = [self.records[i] for i in self._queue_of(record, queue)]
            if not waiting:
                self._turns_in(record.job.model, record.lane).join(record.job.tenant)
            record.turn = left[0] + len(waiting), left[1] + sum(r.cost for r in waiting)
        self._queue_of(record, queue).append(record.job.id)
        self.wakes.append((record.job.model, record.lane))

    def _leave_queue(self, record: Record) -> None:
        queue = self._queue_of(record, record.queue)
        queue.remove(record.job.id)
        line = self._line(record)
        if line is not None and queue:
            left = self._left.get(line, (0, 0))
            self._left[line] = left[0] + 1, left[1] + record.cost
        elif line is not None:
            self._left.pop(line, None)
            self._turns_in(record.job.model, record.lane).retire(record.job.tenant)

    def _line(self, record: Record) -> tuple[str, str, str] | None:
        """The tenant's queue in the job's lane, if the job waits there."""
        if record.queue in (BACK, SUSPECT):
            return None
        return record.job.model, record.lane, record.job.tenant

    def _turns_in(self, model: str, lane: str) -> Turns:
        return self._turns_of.setdefault((model, lane), Turns())

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _weight_of_others(self, model: str, lane: str, tenant: str) -> float:
        """The weights of the other tenants that wait in a lane."""
        active = self._turns_in(model, lane).active
        names = sorted(active, key=lambda name: (active[name], name))
        others = [name for name in names if name != tenant]
        return sum(self._weight(name) for name in others if not self._is_paused(model, lane, name))

    def _shares_in(self, model: str) -> Shares:
        return self._shares.setdefault(model, Shares())

    def _choose(
        self,
        model: str,
        shares: list[tuple[str, float]],
        rooms: Mapping[str, LaneRoom],
        places: Mapping[str, Places],
        skipped: list[Record],
    ) -> tuple[Record | None, bool]:
        """The next job to hand out: from a lane whose deficit covers its cost, otherwise in the
        order of lanes; True if no job may go before one that waits."""
        for lane, share in [(lane, share) for lane, share in shares if lane in rooms]:
            deficit = self._shares_in(model).deficit.get(lane, 0.0) if share > 0 else 0.0
            if deficit > 0 and rooms[lane].max_owed > 0:
                passed: list[Record] = []
                num_tokens = rooms[lane].max_tokens
                found, is_blocked = self._next_in_lane(model, lane, num_tokens, passed)
                if is_blocked:
                    return None, True
                if found is not None and found.cost <= deficit:
                    skipped += passed
                    return found, False
        for lane, _ in shares:
            if lane in rooms:
                found, is_blocked = self._next_in_lane(model, lane, rooms[lane].max_tokens, skipped)
                if found is not None or is_blocked:
                    return found, is_blocked
            elif lane in places:
                found = self._next_below_share(model, lane, places[lane], skipped)
                if found is not None:
                    return found, False
        return None, False

    def _offers_in(self, model: str, lane: str) -> dict[tuple[str, int, int], int]:
        return self._offers.setdefault((model, lane), {})

    def _take_offer(
        self,
        model: str,
        lanes: Sequence[str],
        rooms: Mapping[str, LaneRoom],
        max_tokens: int,
        incarnation: str,
    ) -> Record | None:
        """The first job that another worker offers and that fits; it waits in its lane again."""
        for lane in [lane for lane in lanes if lane in rooms]:
            most = min(max_tokens, rooms[lane].max_tokens)
            offers = [
                (ms, o) for o, ms in self._offers_in(model, lane).items() if ms >= self.now_ms
            ]
            for _, offer in sorted(offers):
                record = self.records.get(offer[0])
                if record is None or record.lane != lane or offer != _offer_of(record):
                    continue  # it has moved, or gone on
                is_held = record.state in _RUNNING and record.owner != incarnation
                if is_held and record.cost / record.job.num_places <= most:
                    record.attempt -= 1
                    self._give_back(record, BACK)
                    return record
        return None

    def _next_below_share(
        self, model: str, lane: str, places: Places, skipped: list[Record]
    ) -> Record | None:
        """A job of a tenant with less than its share of a lane's places, released ones first."""
        found = self._next_back_below_share(model, lane, places, skipped)
        if found is not None:
            return found
        for tenant in self._turns_in(model, lane).order():
            room = places.room_of(tenant)
            if room > 0:
                passed: list[Record] = []
                found, _ = self._next_in_line((model, lane, tenant), room, passed)
                if found is not None:
                    skipped += passed
                    return found
        return None

    def _next_back_below_share(
        self, model: str, lane: str, places: Places, skipped: list[Record]
    ) -> Record | None:
        passed: list[Record] = []
        for record in self._waiting((model, lane, BACK))[:MAX_BACK]:
            room = places.room_of(record.job.tenant)
            if room <= 0:
                continue
            if record.cost / record.job.num_places <= room:
                skipped += passed
                return record
            if record.passed >= self._max_passed:
                return None
            passed.append(record)
            if len(passed) == MAX_SKIPPED:
                return None
        return None

    def _next_in_lane(
        self, model: str, lane: str, room: int, skipped: list[Record]
    ) -> tuple[Record | None, bool]:
        """Released jobs first, then by tenant; True if no job may go before one that waits. There
        must be room for one of its choices."""
        for queue in (BACK, *self._turns_in(model, lane).order()):
            found, is_blocked = self._next_in_line((model, lane, queue), room, skipped)
            if found is not None or is_blocked:
                return found, is_blocked
        return None, False

    def _next_in_line(
        self, line: tuple[str, str, str], room: int, skipped: list[Record]
    ) -> tuple[Record | None, bool]:
        """The same for one tenant's queue."""
        for num_skipped, record in enumerate(self._waiting(line), start=1):
            if record.cost / record.job.num_places <= room:
                return record, False
            if record.passed >= self._max_passed:
                return None, True
            skipped.append(record)
            if num_skipped == MAX_SKIPPED:
                break
        return None, False

    def _waiting(self, queue: tuple[str, str, str]) -> list[Record]:
        """The jobs of a queue that are not paused."""
        records = [self.records[job_id] for job_id in self._queues.get(queue, [])]
        return [r for r in records if not self._is_paused(r.job.model, r.lane, r.job.tenant)]

    def _has_turn(self, model: str, incarnation: str, lease_ms: int) -> bool:
        if not self._waiting((model, "", SUSPECT)):
            return False
        holder, until_ms = self._turns.get(model, ("", 0))
        if until_ms <= self.now_ms:
            quota = max(1, len(self._workers.get(model, {})) // 4)
            alone = [r for r in self.records.values() if r.queue == SUSPECT and r.owner]
            if len([r for r in alone if r.job.model == model]) >= quota:
                return False
            holder = incarnation
        if holder == incarnation:
            self._turns[model] = (incarnation, self.now_ms + lease_ms)
        return holder == incarnation

    def _claim_suspect(self, model: str, incarnation: str, lease_ms: int) -> list[Claimed]:
        for _ in range(MAX_BEYOND):
            if not (queue := self._waiting((model, "", SUSPECT))):
                return []
            taken = self._take(queue[0], incarnation, lease_ms)
            if taken is not None:
                del self._turns[model]
                return [taken]
        self.wakes.append((model, ""))
        return []

    # --- admission ----------------------------------------------------------------------------

    def _candidate(self, job: Job, s: Submission) -> Candidate:
        model, lane, tenant = job.model, job.lane, job.tenant
        is_paused = not job.parent and self._is_paused(model, lane, tenant)
        known = [self.lengths.get((model, lane, name), Lengths()) for name in (tenant, "")]
        expected = job.params.expected_tokens * job.num_places
        is_told = expected > 0 or s.max_output_tokens == 0
        num_output = predicted_output(
            known, s.max_output_tokens, job.num_places, self._min_lengths, expected
        )
        line = [self.records[i] for i in self._queues.get((model, lane, tenant), [])]
        own = len(line), sum(r.cost for r in line)
        pool = self._pool(model)
        weights = job.weight, self._weight_of_others(model, lane, tenant)
        return Candidate(
            is_paused=is_paused,
            submission=s,
            line=(lane, tenant),
            cost=job.num_prompt_tokens + num_output,
            num_output=num_output,
            num_told=min(expected, s.max_output_tokens) if is_told else None,
            is_learned=any(lengths.num_seen >= self._min_lengths for lengths in known),
            num_choices=job.num_places,
            weight=job.weight,
            tenant=self._tenants.setdefault(tenant, Tenant()),
            line_tokens=own[1],
            ahead=Ahead.of(self._loads(model, lane), pool, lane, own, weights),
            pool=pool,
            now_ms=self.now_ms,
            need=need_of(
                job,
                s,
                num_output,
                is_cap=s.max_output_tokens > 0
                and not any(lengths.num_seen >= self._min_lengths for lengths in known),
            ),
            memory_room=math.inf if job.parent else self.memory_room,
            lane_bytes=self._lane_bytes(),
            line_bytes=sum(
                record.held_bytes
                for record in self.records.values()
                if (record.lane, record.job.tenant) == (lane, tenant)
            ),
            stored_bytes=_stored_bytes(job, s),
            all_stored_bytes=sum(t.stored_bytes for t in self._tenants.values()),
        )

    def _lane_bytes(self) -> dict[str, int]:
        held: Counter[str] = Counter()
        for record in self.records.values():
            held[record.lane] += record.held_bytes
        return dict(held)

    def _refused(self, job: Job, candidate: Candidate, refused: Refusal) -> JobRefused:
        s = candidate.submission
        rates = decode_rates(s.limits, candidate.tenant.rates(s.limits, self.now_ms))
        return refusal(job, refused.reason, refused.limit, refused.retry_ms, rates)

    def _settle(self, record: Record, status: JobStatus) -> None:
        """The charge at the job's end: nothing if no worker took it."""
        num_prompt = record.job.num_prompt_tokens
        record.charge = num_prompt + record.num_tokens if record.epoch else 0
        tenant = self._tenants[record.job.tenant]
        tenant.settle(record.submission, record.lane, record.cost, record.charge, self.now_ms)
        if record.charged:
            turns = self._turns_in(record.job.model, record.lane)
            weight = self._weight(record.job.tenant)
            turns.bill(record.job.tenant, (record.charge - record.charged) / weight)
        cap = record.submission.max_output_tokens
        for name in (record.job.tenant, ""):
            key = (record.job.model, record.lane, name)
            self.lengths.setdefault(key, Lengths()).learn(
                record.num_tokens,
                record.job.num_places,
                cap,
                is_whole=status is JobStatus.SUCCEEDED and record.num_tokens < cap,
                is_steered=record.job.params.is_steered,
            )

    def _live(self, model: str) -> list[WorkerCapacity]:
        since_ms = self.now_ms - WORKER_TTL_MS
        workers = self._workers.get(model, {})
        by_time = sorted(workers, key=lambda name: (workers[name][0], name))
        return [workers[name][1] for name in by_time if workers[name][0] >= since_ms]

    def _pool(self, model: str) -> Pool:
        pool = self._pools.setdefault(model, Pool())
        pool.num_live, pool.now_ms = len(self._live(model)), self.now_ms
        return pool

    def _loads(self, model: str, of: str | None = None) -> dict[str, Load]:
        """`of`: a lane, whose jobs do not wait for paused ones of others."""
        loads: dict[str, Load] = {}
        for record in self.records.values():
            if record.job.model != model or record.is_terminal:
                continue
            load = loads.setdefault(record.lane, Load())
            if record.state is JobStatus.QUEUED:
                if of not in (None, record.lane) and self._is_left_out(record):
                    continue
                load.queued_jobs += 1
                load.queued_tokens += record.cost
            else:
                load.running_jobs += 1
                load.running_tokens += record.cost
                load.done_tokens += record.done
        return loads

    def _is_left_out(self, record: Record) -> bool:
        model, lane, tenant = record.job.model, record.lane, record.job.tenant
        if self._is_paused(model, lane, ""):
            return True
        return self._line(record) is not None and self._is_paused(model, lane, tenant)

    # --- permissions --------------------------------------------------------------------------

    def _handed_out(self, record: Record) -> Claimed:
        return Claimed(
            record.job,
            record.epoch,
            record.attempt,
            record.next_number,
            record.hash,
            record.num_tokens,
            (record.deadline_ms - self.now_ms) / 1000,
            record.queue == SUSPECT,
            record.cost,
        )

    def _owned(self, job_id: str, tenant: str) -> Record | None:
        record = self.records.get(job_id)
        return record if record is not None and record.job.tenant == tenant else None


def _offer_of(record: Record) -> tuple[str, int, int]:
    return record.job.id, record.epoch, record.next_number


def _fence(record: Record | None, incarnation: str, epoch: int) -> Verdict | JobStatus | None:
    if record is None:
        return Verdict.GONE
    if record.is_terminal:
        return record.state
    if (record.owner, record.epoch) != (incarnation, epoch) or record.state not in _RUNNING:
        return Verdict.FENCED
    return None


def _view(record: Record) -> JobView:
    return JobView(
        job=record.job,
        status=record.state,
        lane=record.lane,
        attempt=record.attempt,
        next_number=record.next_number,
        num_output_tokens=record.num_tokens,
        num_prompt_tokens=record.job.num_prompt_tokens,
        created_ms=record.created_ms,
        claimed_ms=record.claimed_ms,
        first_token_ms=record.first_token_ms,
        finished_ms=record.finished_ms,
        deadline_ms=record.deadline_ms,
        code=record.code,
        message=record.message,
        metadata=dict(record.submission.metadata),
        result=record.result,
        predicted_wait_ms=None if record.predicted_ms == UNKNOWN_MS else record.predicted_ms,
        runs=decode_runs(record.runs.encode()),
    )


def _passes_progress(record: Record, num_new: int) -> bool:
    callback = record.submission.callback
    every = 0 if callback is None else callback.progress_tokens
    return every > 0 and record.num_tokens % every < num_new


def _log(record: Record, event: LogEvent) -> None:
    raw = encode(event)
    digest = hashlib.sha1(record.hash.encode() + raw, usedforsecurity=False).hexdigest()[:8]
    record.log.append(decode_entry(record.next_number, digest.encode(), raw))


def _place(ahead: Ahead, wait: int) -> QueuePosition:
    return decode_position((ahead.jobs, ahead.tokens, wait))


def _stored_bytes(job: Job, submission: Submission) -> int:
    return stored_bytes(job, submission, encoded_parts(job, submission))
