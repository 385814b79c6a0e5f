"""Decides whether to accept a job, its cost and its predicted start: contract/lua/_admission.lua
and _ledger.lua in Python.

Has no state: tests/oracle/reference.py holds it. Tests compare its replies with the functions'.

Over 300 lines: one decision, which two files make in Redis.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from contract.errors import ErrorCode
from contract.function_types import Submission, TenantLimits
from contract.functions import UNKNOWN_MS
from tests.oracle.reference_memory import Need
from tests.oracle.reference_memory import refusal as memory_refusal
from tests.oracle.reference_pools import LaneRates, Pool, drain_ms
from tests.oracle.reference_promises import UNPROMISED_RATIO, Line, Promises

METERS = ("requests_per_min", "tokens_per_min")  # exact, each tenant's own
MIN_LENGTHS = 5  # outputs needed for an estimate of their length
GROWTH = 32  # tokens by which a cost grows ahead of what is drawn
PAUSED_RETRY_MS = 30_000
UNMEASURED_MS = 10_000  # full workers have measured their rate by then: two heartbeats


@dataclass(slots=True)
class Lengths:
    """Estimates of the lengths of choices: about nine in ten stay below."""

    estimate: float = 0.0
    num_seen: int = 0

    def learn(
        self, num_tokens: int, num_choices: int, cap: int, *, is_whole: bool, is_steered: bool
    ) -> None:
        """Moves the estimate by a fifth towards a longer output, by a fiftieth towards a shorter
        one, by less where its caller may have ended it, and not at all where it was cut."""
        length = num_tokens / num_choices
        gap = length - self.estimate
        if not is_whole and (gap <= 0 or self.num_seen == 0):
            return
        step = gap * (0.2 if gap > 0 else 0.002 if is_steered else 0.02)
        first = cap / num_choices if is_steered else length
        self.estimate = first if self.num_seen == 0 else self.estimate + step
        self.num_seen += 1


def predicted_output(
    known: Sequence[Lengths],
    max_tokens: int,
    num_choices: int,
    min_lengths: int = MIN_LENGTHS,
    expected: int = 0,
) -> int:
    """The expected output: none where there may be none; by the first estimate with enough
    observations, or what the caller expects where that is more; otherwise the cap."""
    if max_tokens == 0:
        return 0
    for lengths in known:
        if lengths.num_seen >= min_lengths:
            learned = max(1, math.ceil(lengths.estimate * num_choices), expected)
            return min(max_tokens, learned)
    return max_tokens


@dataclass(slots=True)
class Meter:
    """The use of a limit per minute, which decreases by the limit each minute (GCRA)."""

    used: float = 0.0
    at_ms: int = 0

    def level(self, limit: int, now_ms: int) -> float:
        if limit == 0:
            return 0.0
        return max(0.0, self.used - max(0, now_ms - self.at_ms) * limit / 60_000)


@dataclass(slots=True)
class Tenant:
    """A tenant's use and reservation, in all lanes of all models."""

    requests: Meter = field(default_factory=Meter)
    tokens: Meter = field(default_factory=Meter)
    reserved: int = 0  # costs of unfinished jobs
    stored_bytes: int = 0  # of its jobs that are kept

    def rates(self, limits: TenantLimits, now_ms: int) -> list[int]:
        """{requests left, ms until all are there again, tokens left, ms}; zeros without limit."""
        rates = []
        for meter, limit in (
            (self.requests, limits.requests_per_min),
            (self.tokens, limits.tokens_per_min),
        ):
            level = meter.level(limit, now_ms)
            rates.append(max(0, math.floor(limit - level)))
            rates.append(math.ceil(level * 60_000 / limit) if limit else 0)
        return rates

    def charge(self, submission: Submission, lane: str, cost: int, now_ms: int) -> None:
        limits = submission.limits
        self.reserved += cost
        self.count_request(limits, 1, now_ms)
        meter, limit = self.tokens, limits.tokens_per_min
        if limit:
            used = meter.level(limit, now_ms) + cost * price(submission, lane)
            meter.used, meter.at_ms = used, now_ms

    def count_request(self, limits: TenantLimits, more: int, now_ms: int) -> None:
        meter, limit = self.requests, limits.requests_per_min
        if limit:
            meter.used, meter.at_ms = max(0.0, meter.level(limit, now_ms) + more), now_ms

    def move(self, submission: Submission, before: str, lane: str, cost: int, now_ms: int) -> None:
        """A job goes to another lane, where its tokens may count otherwise."""
        more = cost * (price(submission, lane) - price(submission, before))
        self._meter(submission, more, now_ms)

    def grow(self, submission: Submission, lane: str, more: int, now_ms: int) -> None:
        """A job has drawn more than its cost."""
        self.reserved += more
        self._meter(submission, more * price(submission, lane), now_ms)

    def settle(
        self, submission: Submission, lane: str, cost: int, charge: int, now_ms: int
    ) -> None:
        self.reserved -= cost
        self._meter(submission, (charge - cost) * price(submission, lane), now_ms)

    def _meter(self, submission: Submission, more: float, now_ms: int) -> None:
        limit, meter = submission.limits.tokens_per_min, self.tokens
        if limit and more:
            meter.used = max(0.0, meter.level(limit, now_ms) + more)
            meter.at_ms = now_ms


def price(submission: Submission, lane: str) -> float:
    """What a token counts in the meter of tokens."""
    return submission.batch_price if lane == "batch" else 1.0


@dataclass(slots=True)
class Load:
    """The waiting and running jobs of a lane. Tokens are those of jobs' costs; `done` of the
    running."""

    queued_jobs: int = 0
    queued_tokens: int = 0
    running_jobs: int = 0
    running_tokens: int = 0
    done_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ahead:
    """The jobs ahead of a job, and the capacity of its lane and the workers."""

    jobs: int
    tokens: int
    own_tokens: int  # of them, in its own lane
    lane_tokens: int
    lane_running_tokens: int
    other_weight: float  # of the other tenants that wait in its lane, added up
    running_jobs: int
    running_tokens: int
    rest_tokens: int
    young_tokens: int  # of what runs in its lane and those before: the cost less twice what is done
    own_young_tokens: int  # of them, in its own lane
    rates: LaneRates

    @classmethod
    def of(
        cls,
        loads: Mapping[str, Load],
        pool: Pool,
        lane: str,
        own: tuple[int, int],
        weights: tuple[float, float],
        itself: tuple[int, int] = (0, 0),
    ) -> "Ahead":
        """`own`: jobs and tokens of its tenant before it; `weights`: its tenant's, and those of the
        others that wait in its lane, added up; `itself`: as counted in its lane."""
        mine = loads.get(lane, Load())
        before = pool.lanes[: pool.lanes.index(lane)] if lane in pool.lanes else ()
        counted = pool.lanes if lane in pool.lanes else (lane,)
        after = [name for name in counted if name not in (lane, *before)]
        higher = [loads.get(name, Load()) for name in before]
        running = [loads.get(name, Load()) for name in counted]
        times = (weights[1] + weights[0]) / weights[0]
        jobs = max(0, min(math.floor(own[0] * times), mine.queued_jobs - itself[0]))
        tokens = max(0, min(math.floor(own[1] * times), mine.queued_tokens - itself[1]))
        return cls(
            jobs=jobs + sum(load.queued_jobs for load in higher),
            tokens=tokens + sum(load.queued_tokens for load in higher),
            own_tokens=tokens,
            lane_tokens=mine.queued_tokens,
            lane_running_tokens=mine.running_tokens,
            other_weight=weights[1],
            running_jobs=sum(load.running_jobs for load in running),
            running_tokens=sum(load.running_tokens for load in running),
            rest_tokens=sum(load.running_tokens - load.done_tokens for load in running),
            young_tokens=sum(
                load.running_tokens - 2 * load.done_tokens for load in (*higher, mine)
            ),
            own_young_tokens=mine.running_tokens - 2 * mine.done_tokens,
            rates=pool.count_on(
                lane, before, [name for name in after if loads.get(name, Load()).queued_jobs]
            ),
        )


def wait_ms(pool: Pool, ahead: Ahead, cost: int, cold_ms: int) -> int:
    """Until a job starts: at once where workers have room; else when what is ahead has been taken
    and one of the running jobs has ended: at what is left for its lane, or at its lane's share,
    which waits for no other.

    Running jobs that began together end together: while less than half of them is computed, none
    has ended before twice what is missing to that half. Those of less urgent lanes give up their
    places.
    """
    num_before = ahead.jobs + ahead.running_jobs
    max_jobs = pool.mean("max_jobs") * pool.num_live
    max_tokens = pool.mean("max_tokens") * pool.num_live
    fits = num_before < max_jobs and ahead.tokens + ahead.running_tokens + cost <= max_tokens
    if pool.num_live > 0 and (num_before == 0 or fits):
        return 0
    if pool.num_live == 0 and num_before == 0:
        return cold_ms
    rest = ahead.rest_tokens / ahead.running_jobs if ahead.running_jobs else 0
    if not pool.rate:
        return UNKNOWN_MS
    wait = max(
        drain_ms(ahead.rates.left, ahead.tokens + rest), drain_ms(pool.rate, ahead.young_tokens)
    )
    if ahead.rates.own > 0:
        own_wait = drain_ms(ahead.rates.own, ahead.own_tokens + rest)
        wait = min(wait, max(own_wait, drain_ms(pool.rate, ahead.own_young_tokens)))
    return wait + (cold_ms if pool.num_live == 0 else 0)


def is_below_share(pool: Pool, ahead: Ahead, weight: float, num_reserved: int) -> bool:
    """Whether a tenant is handed a job before others' end: nothing goes before it, and the tenant's
    unfinished jobs, this one counted, are at most its share by weight of what runs in the lane,
    among those that wait there and itself."""
    if pool.num_live == 0 or ahead.jobs > 0 or ahead.other_weight == 0:
        return False
    return num_reserved * (ahead.other_weight + weight) <= ahead.lane_running_tokens * weight


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason, the limit that was met, and ms until another try may do.

    `promised_ms`: from then on the next of its line may come; None where nothing was promised.
    """

    reason: ErrorCode
    limit: str = ""
    retry_ms: int = UNKNOWN_MS
    promised_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job before its admission: all inputs of the decision."""

    is_paused: bool
    submission: Submission
    line: Line
    cost: int
    num_output: int  # of it, to expect
    num_told: int | None  # of it, as the caller expects
    is_learned: bool  # from earlier outputs
    num_choices: int
    weight: float  # of its tenant
    tenant: Tenant
    line_tokens: int  # of its tenant that wait in its lane
    ahead: Ahead
    pool: Pool
    now_ms: int
    need: Need  # of memory
    memory_room: float  # bytes that all jobs may take
    lane_bytes: Mapping[str, int]  # that each lane holds
    line_bytes: int  # of them, its tenant in its lane
    stored_bytes: int  # of the job
    all_stored_bytes: int  # of all jobs that are kept

    @property
    def wait_ms(self) -> int:
        if is_below_share(self.pool, self.ahead, self.weight, self.tenant.reserved + self.cost):
            return 0
        cold_ms = int(self.submission.cold_start_s * 1000)
        return wait_ms(self.pool, self.ahead, self.cost, cold_ms)

    @property
    def service_ms(self) -> int:
        num_output = self.num_output if self.num_told is None else self.num_told
        return self.pool.service_ms(num_output, self.num_choices)

    @property
    def finds_room(self) -> bool:
        """Whether the job starts at once, with none ahead of it."""
        return self.ahead.jobs == 0 and self.wait_ms == 0

    def refusal(self, promises: Promises) -> Refusal | None:
        """The reason for a refusal and the retry time, after the callers refused earlier; None if
        the job is admitted."""
        refused = self._refusal()
        gap_ms = drain_ms(self.pool.rate, UNPROMISED_RATIO * self.cost)
        if refused is None or UNKNOWN_MS in (refused.retry_ms, gap_ms) or refused.limit in METERS:
            return refused
        if refused.reason is ErrorCode.LANE_PAUSED:
            return refused
        at_ms, after_ms = promises.next(self.line, gap_ms, refused.retry_ms, self.now_ms)
        return replace(refused, retry_ms=at_ms - self.now_ms, promised_ms=after_ms)

    def _refusal(self) -> Refusal | None:
        if not self.pool.knows(self.line[0]):
            return Refusal(ErrorCode.UNKNOWN_LANE, " ".join(self.pool.lanes))
        if self.is_paused:
            return Refusal(ErrorCode.LANE_PAUSED, "", PAUSED_RETRY_MS)
        if self.pool.num_live == 0 and self.submission.needs_worker:
            return Refusal(ErrorCode.NO_WORKERS)
        if 0 < self.submission.max_stored_bytes < self.all_stored_bytes + self.stored_bytes:
            return Refusal(ErrorCode.STORAGE_FULL)
        return (
            self._tenant_refusal()
            or self._memory_refusal()
            or self._lane_refusal()
            or self._deadline_refusal()
        )

    def _memory_refusal(self) -> Refusal | None:
        found = memory_refusal(
            self.memory_room, self.lane_bytes, self.line[0], self.line_bytes, self.need.whole
        )
        if found is None:
            return None
        limit, is_alone = found
        code = ErrorCode.TENANT_QUOTA if limit == "tenant_memory" else ErrorCode.LANE_FULL
        return Refusal(code, limit, UNKNOWN_MS if is_alone else UNMEASURED_MS)

    def _tenant_refusal(self) -> Refusal | None:
        limits = self.submission.limits
        bound = self.submission.max_tenant_stored_bytes
        if 0 < bound < self.tenant.stored_bytes + self.stored_bytes:
            return self._over("stored_bytes", UNKNOWN_MS)
        for limit, meter, amount in (
            ("requests_per_min", self.tenant.requests, 1),
            (
                "tokens_per_min",
                self.tenant.tokens,
                self.cost * price(self.submission, self.line[0]),
            ),
        ):
            a_minute = getattr(limits, limit)
            level = meter.level(a_minute, self.now_ms)
            if 0 < a_minute < level + amount:
                retry_ms = math.ceil((level + amount - a_minute) * 60_000 / a_minute)
                return self._over(limit, retry_ms if amount <= a_minute else UNKNOWN_MS)
        bound, held = limits.concurrent_tokens, self.tenant.reserved
        if 0 < bound < held + self.cost:
            return self._over("concurrent_tokens", self._drain_ms(self.pool.rate, held, bound))
        share = limits.lane_share * self.submission.lane_bound_tokens
        if 0 < share < self.line_tokens + self.cost:
            return self._over(
                "lane_share", self._drain_ms(self.ahead.rates.most, self.line_tokens, share)
            )
        return None

    def _over(self, limit: str, retry_ms: int) -> Refusal:
        return Refusal(ErrorCode.TENANT_QUOTA, limit, retry_ms)

    def _lane_refusal(self) -> Refusal | None:
        bound, held = self.submission.lane_bound_tokens, self.ahead.lane_tokens
        if 0 < bound < held + self.cost:
            retry_ms = self._drain_ms(self.ahead.rates.most, held, bound)
            return Refusal(ErrorCode.LANE_FULL, "lane_tokens", retry_ms)
        over_ms = self._over_wait_ms()
        return Refusal(ErrorCode.LANE_FULL, "lane_wait", over_ms) if over_ms > 0 else None

    def _over_wait_ms(self) -> int:
        """By how much the wait exceeds the lane's bound in seconds; 0 or less if it does not.

        The cold start does not count: a pool that starts on demand would never start. Before a rate
        is measured, as much may wait as the workers hold at once.
        """
        bound_ms = int(self.submission.lane_bound_s * 1000)
        if bound_ms == 0:
            return 0
        if self.wait_ms != UNKNOWN_MS:
            is_cold = self.pool.num_live == 0
            cold_ms = int(self.submission.cold_start_s * 1000) if is_cold else 0
            return self.wait_ms - cold_ms - bound_ms
        num_workers = max(1, self.pool.num_live)
        max_jobs = self.pool.mean("max_jobs") * num_workers
        max_tokens = self.pool.mean("max_tokens") * num_workers
        is_full = self.ahead.jobs >= max_jobs or self.ahead.tokens > max_tokens
        return UNMEASURED_MS if max_jobs > 0 and is_full else 0

    def _deadline_refusal(self) -> Refusal | None:
        deadline_ms = int(self.submission.deadline_s * 1000)
        is_known = self.num_told is not None or (self.is_learned and self.wait_ms > 0)
        run_ms = self.service_ms if is_known else 0
        late_ms = self.wait_ms + run_ms - deadline_ms
        if self.wait_ms == UNKNOWN_MS or late_ms <= 0:
            return None
        retry_ms = UNKNOWN_MS if run_ms > deadline_ms else late_ms
        return Refusal(ErrorCode.DEADLINE_INFEASIBLE, "", retry_ms)

    def _drain_ms(self, rate: float, held: int, bound: float) -> int:
        """The time until a bound has room for the job; UNKNOWN_MS if the job alone exceeds it."""
        if self.cost > bound:
            return UNKNOWN_MS
        return drain_ms(rate, held + self.cost - bound)
