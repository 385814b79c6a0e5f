"""The pool on an ECS that ends any unprotected task: scale-in and rolling deployments."""

import random
from typing import Any

import pytest

from contract.keys import Keys
from infra.aws.pool_service import PoolService, PoolState, PoolWatch
from infra.aws.workforce import EcsService
from infra.pool import PoolPolicy
from tests.aws.conftest import Clock
from tests.aws.fake_ecs import FakeEcs

POLICY = PoolPolicy(wait_targets_s={"interactive": 5.0}, max_workers=8, scale_in_after_s=20.0)


def pool_on(ecs: FakeEcs) -> PoolService:
    """Without a Redis: the tests hand the sight over."""
    unused: Any = None
    clock = Clock()
    watch = PoolWatch(unused, Keys("test"), "m", ("interactive",))
    return PoolService(POLICY, watch, unused, EcsService(ecs, "c", "s", clock), clock_s=clock)


def step(pool: PoolService, ecs: FakeEcs, sight: PoolState) -> list[str]:
    """One step of the pool, then one of ECS; returns the drained workers."""
    _, retired = pool.size(sight)
    ecs.drain(retired)
    ecs.tick()
    pool.clock_s.now_s += 5.0  # type: ignore[attr-defined]
    return retired


@pytest.mark.campaign
def test_scale_in_leaves_exactly_the_needed_workers() -> None:
    """And ends no worker that holds jobs, whichever tasks ECS picks: 1,000 seeds."""
    for seed in range(1000):
        rng = random.Random(seed)
        ecs = FakeEcs(rng, num_desired=rng.randint(2, 8))
        ecs.start(rng.randint(1, ecs.num_desired), is_ready=True)
        ecs.start(ecs.num_desired - len(ecs.tasks))
        pool = pool_on(ecs)
        num_needed = rng.randint(1, ecs.num_desired)
        for _ in range(60):
            sight = ecs.sight()
            for task in ecs.tasks:  # the pool has seen these; work may come at any time
                if task.incarnation in {w.incarnation for w in sight.workers}:
                    task.num_jobs += rng.random() < 0.3
            share = num_needed * 0.8 / max(1, len(sight.workers))
            step(pool, ecs, ecs.sight(load=share))
        assert not ecs.ended_with_jobs, seed
        draining = [task for task in ecs.tasks if task.is_draining]
        assert ecs.num_desired == num_needed, seed
        assert len(ecs.tasks) - len(draining) == num_needed, seed


@pytest.mark.parametrize(("min_percent", "max_percent"), [(100, 200), (50, 100)])
def test_a_deployment_drains_old_revisions_only(min_percent: int, max_percent: int) -> None:
    """Busy old workers go, idle new ones stay; at a group's limit old ones make room."""
    for seed in range(200):
        rng = random.Random(seed)
        num = rng.randint(1, 6)
        ecs = FakeEcs(rng, num, min_percent, max_percent)
        ecs.start(num, is_ready=True)
        old = {task.incarnation for task in ecs.tasks}
        pool = pool_on(ecs)
        share = num * 0.8
        step(pool, ecs, ecs.sight(load=share / num))
        ecs.definition = "worker:2"
        drained: list[str] = []
        for _ in range(60):
            for task in ecs.tasks:
                if task.incarnation in old and not task.is_draining:
                    task.num_jobs = 3
            num_ready = len(ecs.sight().workers)
            waiting = 5000 * num if num_ready == 0 else 0
            drained += step(pool, ecs, ecs.sight(share / max(1, num_ready), waiting))
        assert set(drained) == old, seed
        assert not ecs.ended_with_jobs, seed
        assert [task.definition for task in ecs.tasks] == ["worker:2"] * num, seed
        assert ecs.num_started == 2 * num, seed


def test_protection_is_renewed_before_it_expires() -> None:
    ecs = FakeEcs(random.Random(0), num_desired=12)
    ecs.start(12, is_ready=True)
    pool = pool_on(ecs)
    calls = []
    protect = ecs.update_task_protection
    ecs.update_task_protection = lambda **given: calls.append(given) or protect(**given)  # type: ignore
    for _ in range(3):
        pool.size(ecs.sight(load=1.0))
    assert [len(call["tasks"]) for call in calls] == [10, 2]
    pool.clock_s.now_s += 601.0  # type: ignore[attr-defined]
    pool.size(ecs.sight(load=1.0))
    assert len(calls) == 4
    assert calls[0]["expiresInMinutes"] * 60 > 2 * 601
