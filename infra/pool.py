"""Computes how many workers there should be, and when one will be ready. The functions are
pure: they do no I/O, and the clock is an argument.

Demand is the sum of two parts: waiting work (for each lane, the tokens ahead of its last one
divided by what a worker computes in the lane's allowed wait) and running work (how full the workers
are). Unlike a target on an average, this also works with no workers.

A worker that starts counts as needed: ended now, the next call would wait for another cold start.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_WORKERS = 8  # by default
FULL = 0.8  # of a worker's KV cache; above it, sequences preempt each other
START_LIMIT_S = 3600.0  # of one start: machine, weights and load


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPolicy:
    """The operator's settings; lanes are ordered by urgency. Raises ValueError for invalid
    values.
    """

    wait_targets_s: Mapping[str, float]  # allowed wait by lane
    min_workers: int = 0
    max_workers: int = MAX_WORKERS
    worker_tokens_per_s: float = 1000.0  # used until measured
    cold_start_s: float = 300.0  # from requesting a worker to its first token
    scale_in_after_s: float = 300.0  # scale in after so long with less demand
    growth: float = 2.0  # at most so many times the ready workers may be starting
    start_limit_s: float = START_LIMIT_S  # a start that takes longer counts as none
    crashes: int = 3  # workers in a row that end before they are ready open the breaker …
    breaker_s: float = 900.0  # … for so long; then one may try. Twice as long after each …
    breaker_max_s: float = 86_400.0  # … that fails again, at most so long

    def __post_init__(self) -> None:
        if not 0 <= self.min_workers <= self.max_workers or self.max_workers < 1:
            raise ValueError("workers: 0 <= min <= max, and a max of at least 1")
        if not self.wait_targets_s or min(self.wait_targets_s.values()) <= 0:
            raise ValueError("each lane needs a wait target over 0 seconds")
        if self.worker_tokens_per_s <= 0 or self.growth <= 0 or self.crashes < 1:
            raise ValueError("tokens per second, growth and crashes must be over 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """One observation. Tokens are prompts and outputs not computed yet."""

    now_s: float
    queued_tokens: Mapping[str, int]  # by lane
    num_desired: int  # the present desired number
    num_ready: int = 0  # workers with recent heartbeats
    load: float = 0.0  # of the ready, the sum of how full each is: 0 to 1
    tokens_per_s: float | None = None  # of one worker, as measured
    failed_starts_s: Sequence[float] = ()  # in a row: when workers ended that had never been ready
    is_wanted: bool = False  # calls were refused lately because no worker was ready
    num_outdated: int = 0  # of the ready, those that a deployment replaces

    @property
    def num_current(self) -> int:
        return self.num_ready - self.num_outdated

    @property
    def num_starting(self) -> int:
        return max(0, self.num_desired - self.num_current)


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """What is kept from one decision to the next."""

    needs: tuple[tuple[float, int], ...] = ()  # (time, number needed); see _recall
    since_s: float | None = None  # of the first decision
    started_s: float | None = None  # since when workers start without one becoming ready
    num_current: int = 0  # ready workers of the current version


@dataclass(frozen=True, slots=True)
class Decision:
    """The desired number of workers and the reason. `eta_s`: the time until one is ready, or would
    be if it were requested at once; None while starts are stopped, for `paused_s`.

    Workers to retire take no more jobs and end when their jobs have ended.
    """

    num_workers: int
    num_to_retire: int
    reason: str
    eta_s: float | None
    backlog_s: float
    backlog_over_target: float
    paused_s: float = 0.0
    memory: PoolMemory = field(default_factory=PoolMemory)

    @property
    def is_breaker_open(self) -> bool:
        return self.paused_s > 0


def decide(policy: PoolPolicy, view: PoolView, memory: PoolMemory = PoolMemory()) -> Decision:
    needed = max(policy.min_workers, min(policy.max_workers, num_needed(policy, view)))
    paused_s = breaker_left_s(policy, view.failed_starts_s, view.now_s)
    is_starting = _is_starting(policy, view, memory)
    needs = _recall(policy, view, max(needed, is_starting * view.num_desired), memory)
    since_s = view.now_s if memory.since_s is None else memory.since_s
    if paused_s and max(view.num_starting, needed - view.num_desired) > 0:
        # Workers of a former version stay by their protection, and are not replaced.
        num, reason = min(view.num_desired, view.num_current), "breaker"
    elif needed > view.num_desired:
        num, reason = _grown(policy, view, needed)
    elif needed == view.num_desired:
        num, reason = needed, "enough"
    elif is_starting:
        num, reason = view.num_desired, "starting"
    elif view.now_s - since_s < policy.scale_in_after_s or needs[0][1] >= view.num_desired:
        num, reason = view.num_desired, "not yet"
    else:
        num, reason = needs[0][1], "in"
    num = min(num, policy.max_workers)
    started_s = _started_s(view, memory, num)
    return Decision(
        num,
        0 if paused_s else max(0, view.num_ready - num),
        reason,
        None if paused_s and not view.num_ready else _eta_s(policy, view, started_s),
        backlog_s(policy, view),
        backlog_over_target(policy, view),
        paused_s,
        PoolMemory(needs, since_s, started_s, view.num_current),
    )


def num_outdated_to_retire(
    num_desired: int, num_current: int, num_outdated: int, min_healthy_share: float
) -> int:
    """Returns how many ready workers of a former version a deployment no longer needs. The others
    stay until workers of the current version have taken their places."""
    return max(0, num_outdated - max(0, int(num_desired * min_healthy_share) - num_current))


def num_needed(policy: PoolPolicy, view: PoolView) -> int:
    """Workers for waiting and running work, at least one for refused calls; before limits."""
    waiting = max(
        (tokens / (_rate(policy, view) * target_s) for tokens, target_s in _ahead(policy, view)),
        default=0.0,
    )
    return max(int(view.is_wanted), math.ceil(round(waiting + view.load / FULL, 6)))


def backlog_s(policy: PoolPolicy, view: PoolView) -> float:
    """The seconds that the ready workers (at least one) need for all waiting work."""
    tokens = sum(view.queued_tokens.values())
    return tokens / (_rate(policy, view) * max(1, view.num_ready))


def backlog_over_target(policy: PoolPolicy, view: PoolView) -> float:
    """The largest backlog of a lane relative to its allowed wait."""
    rate = _rate(policy, view) * max(1, view.num_ready)
    return max((tokens / (rate * target_s) for tokens, target_s in _ahead(policy, view)), default=0)


def breaker_left_s(policy: PoolPolicy, failed_starts_s: Sequence[float], now_s: float) -> float:
    """The seconds for which no worker is started, because starts failed in a row; 0: none. There is
    no window of time: a model that fails after an hour of loading must not be tried for ever."""
    until_s, pause_s = -math.inf, policy.breaker_s
    for at_s in sorted(failed_starts_s)[policy.crashes - 1 :]:
        if at_s >= until_s:  # not one of several that started together
            until_s, pause_s = at_s + pause_s, min(2 * pause_s, policy.breaker_max_s)
    return max(0.0, until_s - now_s)


def _rate(policy: PoolPolicy, view: PoolView) -> float:
    return view.tokens_per_s or policy.worker_tokens_per_s


def _ahead(policy: PoolPolicy, view: PoolView) -> list[tuple[float, float]]:
    """For each lane with work: tokens up to its end, including more urgent lanes; and its
    target."""
    lanes, total = [], 0.0
    for lane, target_s in policy.wait_targets_s.items():
        queued = view.queued_tokens.get(lane, 0)
        total += queued
        if queued:
            lanes.append((total, target_s))
    return lanes


def _recall(
    policy: PoolPolicy, view: PoolView, needed: int, memory: PoolMemory
) -> tuple[tuple[float, int], ...]:
    """Returns the recent needs that no later one exceeds; the first is the largest.

    A pool shrinks to the most workers needed within `scale_in_after_s`. If it shrank to what one
    quiet moment needs, it would oscillate, and each oscillation costs a cold start.
    """
    after_s = view.now_s - policy.scale_in_after_s
    kept = [(at_s, num) for at_s, num in memory.needs if at_s > after_s and num > needed]
    return (*kept, (view.now_s, needed))


def _grown(policy: PoolPolicy, view: PoolView, needed: int) -> tuple[int, str]:
    if len(view.failed_starts_s) >= policy.crashes:
        return max(view.num_desired, min(needed, view.num_current + 1)), "one try"
    if view.num_desired == 0:
        return max(1, min(needed, math.ceil(policy.growth))), "from zero"
    # A backlog that grows while workers start does not show that more are needed.
    most = view.num_ready + max(1, math.ceil(view.num_ready * policy.growth))
    num = max(view.num_desired, min(needed, most))
    return num, "out" if num > view.num_desired else "starting"


def _is_starting(policy: PoolPolicy, view: PoolView, memory: PoolMemory) -> bool:
    """Whether a start may still succeed. One over its limit, for example for want of a machine,
    must not keep idle workers."""
    started_s = view.now_s if memory.started_s is None else memory.started_s
    return view.num_starting > 0 and view.now_s - started_s < policy.start_limit_s


def _started_s(view: PoolView, memory: PoolMemory, num: int) -> float | None:
    if num <= view.num_current:
        return None
    has_begun = memory.started_s is None or view.num_current > memory.num_current
    return view.now_s if has_begun else memory.started_s


def _eta_s(policy: PoolPolicy, view: PoolView, started_s: float | None) -> float:
    if view.num_ready:
        return 0.0
    if started_s is None:
        return policy.cold_start_s
    # An overdue worker may be ready at any moment.
    return max(policy.cold_start_s - (view.now_s - started_s), policy.cold_start_s / 10)
