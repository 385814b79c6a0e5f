"""The number of workers: a table of cases, and sequences of decisions."""

from dataclasses import replace

import pytest

from infra.pool import (
    Decision,
    PoolMemory,
    PoolPolicy,
    PoolView,
    breaker_left_s,
    decide,
    num_needed,
)

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
    _, four = follow(view(4, at=0, load=0.9), view(4, at=300, load=0.9))
    assert (four.num_workers, four.num_to_retire, four.reason) == (2, 2, "in")


@pytest.mark.parametrize("num_ready", range(4))
@pytest.mark.parametrize("cold_start_s", [60, 150, 240, 420, 900, 3_500])
def test_a_pool_with_a_starting_worker_does_not_shrink(cold_start_s: int, num_ready: int) -> None:
    """However long it starts, and although nothing needs it any more: it is kept as long after it
    is ready as after its last work. So is one that somebody else has requested."""
    quiet = [view(0, at=at) for at in range(-1000, 0, 5)]
    starting = [view(4, at=at, num_ready=num_ready) for at in range(0, cold_start_s, 5)]
    ready = [view(4, at=cold_start_s + at) for at in (0, 5, 290, 295)]
    decisions = follow(*quiet, *starting, *ready)[len(quiet) :]
    assert [decision.num_workers for decision in decisions] == [4] * (len(decisions) - 1) + [0]
    assert {decision.reason for decision in decisions[: len(starting)]} == {"starting"}


def test_the_successors_of_a_deployment_are_starting_workers() -> None:
    """The old worker is idle and ready, the new one starts beside it."""
    before = [view(1, at=at, load=0.5) for at in (0, 500)]
    during = [view(1, at=at, num_outdated=1) for at in range(505, 1400, 5)]
    *_, still = follow(*before, *during)
    after = decide(POLICY, view(1, at=1700), still.memory)
    assert (still.num_workers, still.reason, still.eta_s) == (1, "starting", 0.0)
    assert after.num_workers == 0


def test_a_start_over_its_limit_keeps_no_idle_workers() -> None:
    """Where no machine is to be had, seven idle workers do not wait for the eighth for ever; one
    that becomes ready gives the others another hour."""
    views = [view(8, at=at, num_ready=6 if at < 3000 else 7) for at in range(0, 7000, 5)]
    sizes = [decision.num_workers for decision in follow(*views)]
    num_kept = sizes.index(0) * 5
    assert 3000 + 3600 <= num_kept <= 3000 + 3600 + 300


def test_a_crash_loop_stops_the_starts() -> None:
    """After three failures in a row only ready workers stay. Later one worker is tried. However
    far they are apart: a model may fail after an hour of loading."""
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
    slow = decide(POLICY, seen(10_801, 0, 0, 3_600.0, 7_200.0, 10_800.0))

    assert (twice.num_workers, twice.is_breaker_open) == (1, False)
    assert (open_.num_workers, open_.is_breaker_open, open_.eta_s) == (0, True, None)
    assert beside_good_ones.num_workers == 2
    assert still.num_workers == 0
    assert (idle.num_workers, idle.eta_s) == (0, None)
    assert (trial.num_workers, trial.reason) == (1, "one try")
    assert failed_again.num_workers == 0
    assert (slow.num_workers, slow.is_breaker_open) == (0, True)


def test_each_try_that_fails_doubles_the_pause() -> None:
    """Up to a day. Workers that started and failed together are one try."""
    failed, pauses = [10.0, 10.0, 10.0, 11.0, 12.0], []
    for _ in range(9):
        now_s = max(failed)
        pauses.append(breaker_left_s(POLICY, failed, now_s))
        failed.append(now_s + pauses[-1] + 3_600)
    assert pauses[0] == 900 - 2
    assert pauses[1:] == [1_800, 3_600, 7_200, 14_400, 28_800, 57_600, 86_400, 86_400]


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
