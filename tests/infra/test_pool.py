"""The number of workers: a table of cases, and sequences of decisions."""

from dataclasses import replace

import pytest

from infra.pool import Decision, PoolMemory, PoolPolicy, PoolView, decide, num_needed

POLICY = PoolPolicy(
    wait_targets_s={"interactive": 5.0, "standard": 60.0, "batch": 900.0},
    max_workers=8,
    worker_tokens_per_s=1000.0,
    cold_start_s=300.0,
    growth=1.0,
)


def view(num_desired: int = 0, *, at: float = 0.0, **fields: object) -> PoolView:
    """What the pool observes. By default all requested workers are ready."""
    given: dict[str, object] = {"queued_tokens": {}, "num_ready": num_desired} | fields
    return PoolView(now_s=at, num_desired=num_desired, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("queued", "load", "num"),
    [
        ({}, 0.0, 0),
        ({"batch": 1}, 0.0, 1),  # a single token needs a worker
        ({"interactive": 5_000}, 0.0, 1),
        ({"interactive": 5_001}, 0.0, 2),
        ({"standard": 60_000}, 0.0, 1),
        ({"batch": 900_000}, 0.0, 1),
        ({"batch": 900_001}, 0.0, 2),
        ({"interactive": 10_000, "batch": 100}, 0.0, 2),  # the worst lane counts
        ({"interactive": 30_000, "standard": 30_000}, 0.0, 6),
        ({"interactive": 100, "standard": 119_900}, 0.0, 2),  # urgent tokens come first
        ({}, 0.8, 1),  # running jobs need workers too
        ({}, 0.81, 2),
        ({"interactive": 2_500}, 1.2, 2),
        ({"interactive": 2_501}, 1.2, 3),
        ({"unknown": 10**9}, 0.0, 0),  # a lane that this pool does not serve
    ],
)
def test_waiting_and_running_jobs_need_workers(
    queued: dict[str, int], load: float, num: int
) -> None:
    """Before limits: tokens divided by what a worker computes within the lane's wait target."""
    assert num_needed(POLICY, view(1, queued_tokens=queued, load=load)) == num


@pytest.mark.parametrize(
    ("seen", "num", "reason"),
    [
        (view(0), 0, "enough"),
        (view(0, queued_tokens={"batch": 1}), 1, "from zero"),
        (view(0, is_wanted=True), 1, "from zero"),
        (view(1, is_wanted=True, num_ready=0), 1, "enough"),
        (view(2, is_wanted=True, queued_tokens={"interactive": 6_000}), 2, "enough"),
        (view(0, queued_tokens={"interactive": 10**6}), 1, "from zero"),
        (view(1, queued_tokens={"interactive": 10**6}, num_ready=0), 1, "starting"),
        (view(1, queued_tokens={"interactive": 10**6}), 2, "out"),
        (view(2, queued_tokens={"interactive": 10**6}), 4, "out"),
        (view(4, queued_tokens={"interactive": 10**6}), 8, "out"),
        (view(8, queued_tokens={"interactive": 10**6}), 8, "enough"),
        (view(4, queued_tokens={"interactive": 10**6}, num_ready=2), 4, "starting"),
        (view(2, queued_tokens={"interactive": 6_000}), 2, "enough"),
        (view(2, load=0.1), 2, "not yet"),
        (view(3, tokens_per_s=10.0, queued_tokens={"standard": 2400}), 4, "out"),
    ],
)
def test_decisions(seen: PoolView, num: int, reason: str) -> None:
    """The pool grows at once, by at most as many workers as are ready. It shrinks later."""
    decision = decide(POLICY, seen)
    assert (decision.num_workers, decision.reason) == (num, reason)


@pytest.mark.parametrize(
    ("policy", "num"), [(replace(POLICY, min_workers=2), 2), (replace(POLICY, max_workers=1), 1)]
)
def test_limits_hold(policy: PoolPolicy, num: int) -> None:
    """With no waiting token and with a million."""
    queued = {"interactive": 10**6} if policy.max_workers == 1 else {}
    assert decide(policy, view(num, queued_tokens=queued)).num_workers == num


def follow(*seen: PoolView, policy: PoolPolicy = POLICY) -> list[Decision]:
    """A sequence of decisions, each with the memory of the previous one."""
    decisions: list[Decision] = []
    for one in seen:
        memory = decisions[-1].memory if decisions else PoolMemory()
        decisions.append(decide(policy, one, memory))
    return decisions


def test_the_pool_shrinks_only_after_a_quiet_period() -> None:
    """A new burst restarts the period."""
    burst = {"interactive": 15_000}
    decisions = follow(
        view(3, at=0),
        view(3, at=299),
        view(3, at=299.5, queued_tokens=burst),
        view(3, at=400),
        view(3, at=599),
        view(3, at=600),
    )
    assert [decision.num_workers for decision in decisions] == [3, 3, 3, 3, 3, 0]


def test_the_pool_shrinks_to_the_recent_maximum() -> None:
    """Not to the need at the end of the period."""
    decisions = follow(
        view(4, at=0, load=2.4),
        view(4, at=200, load=0.8),
        view(4, at=250, load=1.6),
        view(4, at=290),
        view(4, at=301),
        view(2, at=551),
    )
    assert [decision.num_workers for decision in decisions] == [4, 4, 4, 4, 2, 0]


def test_surplus_workers_are_retired() -> None:
    """They are drained. Workers that still start are ended without."""
    _, four = follow(view(4, at=0, load=0.9), view(4, at=300, load=0.9))
    _, starting = follow(view(4, at=0, num_ready=1), view(4, at=300, num_ready=1, load=0.5))
    assert (four.num_workers, four.num_to_retire, four.reason) == (2, 2, "in")
    assert (starting.num_workers, starting.num_to_retire) == (1, 0)


def test_a_crash_loop_stops_the_starts() -> None:
    """After three failures in a row only ready workers stay. Later one worker is tried."""
    queued = {"interactive": 10**6}
    failed = (100.0, 400.0, 700.0)

    def seen(at: float, num_desired: int, num_ready: int, *failed_s: float) -> PoolView:
        return view(
            num_desired, at=at, num_ready=num_ready, queued_tokens=queued, failed_starts_s=failed_s
        )

    twice = decide(POLICY, seen(701, 1, 0, *failed[:2]))
    open_ = decide(POLICY, seen(701, 1, 0, *failed))
    beside_good_ones = decide(POLICY, seen(701, 4, 2, *failed))
    still = decide(POLICY, seen(1599, 0, 0, *failed))
    idle = decide(POLICY, view(0, at=701, failed_starts_s=failed))
    trial = decide(POLICY, seen(1600, 0, 0, *failed))
    failed_again = decide(POLICY, seen(1800, 1, 0, *failed, 1790.0))
    forgotten = decide(POLICY, seen(2500, 0, 0, *failed[:2], 2499.0))

    assert (twice.num_workers, twice.is_breaker_open) == (1, False)
    assert (open_.num_workers, open_.is_breaker_open, open_.eta_s) == (0, True, None)
    assert beside_good_ones.num_workers == 2
    assert still.num_workers == 0
    assert (idle.num_workers, idle.eta_s) == (0, None)
    assert (trial.num_workers, trial.reason) == (1, "from zero")
    assert failed_again.num_workers == 0
    assert forgotten.num_workers == 1


def test_a_waiting_job_has_an_eta() -> None:
    """The rest of a cold start; 0 once a worker is ready."""
    queued = {"batch": 1}
    first, later, overdue, there = follow(
        view(0, at=0, queued_tokens=queued),
        view(1, at=100, num_ready=0, queued_tokens=queued),
        view(1, at=400, num_ready=0, queued_tokens=queued),
        view(1, at=401, queued_tokens=queued),
    )
    assert [first.eta_s, later.eta_s, overdue.eta_s, there.eta_s] == [300.0, 200.0, 30.0, 0.0]
    assert decide(POLICY, view(0)).eta_s == 300.0  # if one were wanted now


def test_the_backlog_is_reported() -> None:
    """For alarms: seconds of work, and the largest ratio of a lane's wait to its target."""
    seen = view(2, queued_tokens={"interactive": 20_000, "batch": 100_000})
    decision = decide(POLICY, seen)
    assert decision.backlog_s == 60.0
    assert decision.backlog_over_target == 2.0


@pytest.mark.parametrize(
    "fields",
    [
        {"min_workers": 3, "max_workers": 2},
        {"max_workers": 0},
        {"wait_targets_s": {}},
        {"wait_targets_s": {"batch": 0.0}},
        {"growth": 0.0},
        {"crashes": 0},
    ],
)
def test_an_invalid_policy_is_an_error(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"\w+"):
        replace(POLICY, **fields)  # type: ignore[arg-type]
